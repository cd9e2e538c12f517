"""When completions end, on the tiny tokenizer."""

import pytest

from upswing.engine.base import FinishReason, Sampling
from upswing.engine.stopping import StopChecker
from upswing.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def stops_after(tokens: list[int], **settings: object) -> tuple[int, FinishReason] | None:
    checker = StopChecker(Sampling(**settings), TOKENIZER)  # type: ignore[arg-type]
    for count in range(1, len(tokens) + 1):
        reason = checker.check(tokens[:count])
        if reason:
            return count, reason
    return None


@pytest.mark.parametrize("stop", ["</search>", "</sea", "ch>", "city</search", "é", "日本", " 12", "1\n"])
@pytest.mark.parametrize("text", ["<search>capital city</search>\nabc", "the é 日本 of 12\n</sea", "x" * 50 + "日本"])
def test_stops_at_the_first_token_whose_text_has_it(stop: str, text: str) -> None:
    tokens = ids(text)
    seen = (count for count in range(1, len(tokens) + 1) if stop in TOKENIZER.decode(tokens[:count]))
    first = next(seen, None)
    expected = None if first is None else (first, FinishReason.STOP)
    assert stops_after(tokens, stop_strings=(stop,), max_tokens=999) == expected


def test_special_tokens_count_as_text() -> None:
    assert stops_after([5, 6, 2, 7], stop_strings=("<|im_end|>",)) == (3, FinishReason.STOP)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [([5, 6, 30], FinishReason.STOP), ([5, 6, 31], FinishReason.STOP), ([5, 6, 7], FinishReason.LENGTH)],
)
def test_every_end_token_counts_at_the_limit(completion: list[int], expected: FinishReason) -> None:
    """Case TOK-04."""
    assert stops_after(completion, stop_tokens=(30, 31), max_tokens=3) == (3, expected)
