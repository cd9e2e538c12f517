"""The tiny model and its tokenizer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.models.tiny import PROTOCOL_TOKENS, VOCAB_SIZE, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


def test_special_and_protocol_tokens_are_single() -> None:
    assert ids("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    for token in PROTOCOL_TOKENS:
        assert len(ids(f"a{token}b")) == 3
    assert TOKENIZER.decode(ids("<search>x</search><|im_end|>"), skip_special_tokens=True) == "<search>x</search>"
    assert TOKENIZER.eos_token_id == 2


def test_digits_stand_alone() -> None:
    assert [TOKENIZER.decode([i]) for i in ids("a1234")] == ["a", "1", "2", "3", "4"]


def test_vocabulary_is_complete_and_common_words_are_short() -> None:
    assert len(TOKENIZER) == VOCAB_SIZE == len(set(TOKENIZER.get_vocab().values()))
    assert len(ids("the capital of France")) <= 5


def test_chat_template_takes_every_role() -> None:
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "tool")]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert text == body + "<|im_start|>assistant\n"


def test_weights_are_always_the_same_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = tiny_model()
    assert torch.equal(torch.rand(3), expected)
    second = tiny_model()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not first.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype(dtype: torch.dtype) -> None:
    assert {parameter.dtype for parameter in tiny_model(dtype).parameters()} == {dtype}
