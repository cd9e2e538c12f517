"""Whatever an agent writes is read in linear time, without a crash, and says one thing; rendered calls come back.

`python tests/envs/test_parsing_fuzz.py --n 100000 --seed 1` runs more of the same.
"""

import argparse
import json
import random
import time
from itertools import islice

import pytest

from upswing.envs.parsers import HermesParser, LlamaJsonParser, PythonParser, QwenXmlParser, TagsParser
from upswing.envs.parsing import MAX_CALLS
from upswing.trajectory.types import ToolCall

pytestmark = pytest.mark.filterwarnings("ignore:.*invalid")  # of Python, about what the agent wrote
PARAMETERS = {"search": ["query", "k"], "write": ["text", "lines", "options"], "now": []}
TEXTS = {"search": ["query"], "write": ["text"], "now": []}
PARSERS = {
    "hermes": HermesParser(),
    "llama3_json": LlamaJsonParser(),
    "qwen_coder_xml": QwenXmlParser(TEXTS),
    "python": PythonParser(PARAMETERS),
    "tags": TagsParser({"search": "query", "write": "text"}),
}
FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<answer>", "</answer>", "<search>"),
    *("</search>", "<function=", "<function=search>", "</function>", "<parameter=query>", "</parameter>", "<write>"),
    *(
        "<|python_tag|>",
        '{"name": "',
        '"arguments": ',
        '"parameters": {',
        "search(",
        "now()",
        "query=",
        "\\u0000",
        "\0",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        '"""',
        "\\",
        ",",
        ":",
        ";",
        "=",
        "<",
        ">",
        "\n",
        "\r",
        " ",
        "é",
        "\u2028",
    ),
    *("NaN", "-Infinity", "1e999", "9" * 5000, "0x" + "f" * 99, "null", "True", "\ud800", "\\ud800", "😀", "[" * 99),
    *("*a, **b", "lambda: 0", "__import__('os').system('true')", "f'{1}'", "b''", "{1, 2}", "...", "- " * 99, "# no"),
)


def some_text(rng: random.Random) -> str:
    pieces = (chr(rng.randrange(1, 0xD800)) if rng.random() < 0.1 else rng.choice(FRAGMENTS) for _ in range(9))
    return "".join(islice(pieces, rng.randrange(5)))


def some_value(rng: random.Random, depth: int = 0):
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {plain(some_text(rng)): some_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    text = plain(some_text(rng))
    return [text, rng.randrange(-(10**20), 10**20), rng.gauss(0, 1e9), 5e-324, rng.random() < 0.5, None][kind]


def plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def some_calls(rng: random.Random, fmt: str) -> list[ToolCall]:
    """Calls that the format can express."""
    calls = []
    for number in range(rng.randrange(1, 4)):
        name = rng.choice(["search", "write"] if fmt == "tags" else list(PARAMETERS))
        keys = TEXTS[name] if fmt == "tags" else [key for key in PARAMETERS[name] if rng.random() < 0.8]
        arguments = {key: plain(some_text(rng)) if key in TEXTS[name] else some_value(rng) for key in keys}
        if fmt == "tags":  # nothing in a tag is escaped, and its text is stripped
            arguments = {
                key: "".join(c for c in text if c not in "<>").strip() or "x" for key, text in arguments.items()
            }
        if fmt == "qwen_coder_xml" and any(tag in json.dumps(arguments) for tag in ("</parameter>", "</think>")):
            arguments = {}
        calls.append(ToolCall(name=name, arguments=arguments, id=f"call_{number}"))
    return calls


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randrange(1, 5)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + 20)
        text = rng.choice(
            [text[:a] + text[b:], text[:a], text[:b] + text[a:b] * rng.randrange(3) + text[b:]]
            + [text[:a] + rng.choice(FRAGMENTS) + text[a:]] * 3
        )
    return text


def check_reading(text: str, parsers=PARSERS) -> None:
    for name, parser in parsers.items():
        parsed = parser.parse(text)
        assert (bool(parsed.calls) + (parsed.answer is not None) + bool(parsed.error)) == 1, (name, text)
        assert [call.id for call in parsed.calls] == [f"call_{n}" for n in range(len(parsed.calls))]
        assert len(parsed.calls) <= MAX_CALLS and set(parsed.call_errors) <= {call.id for call in parsed.calls}
        for call in parsed.calls:  # storable, and a call with an error has nothing that could be run
            json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
            assert not (call.id in parsed.call_errors and call.arguments), (name, text)
        "\n".join([parsed.answer or "", parsed.error or "", *parsed.call_errors.values()]).encode()


def check_round_trip(rng: random.Random, fmt: str) -> str:
    """Returns the rendered calls, with some reasoning in front."""
    parser, calls = PARSERS[fmt], some_calls(rng, fmt)
    draft = mutated(rng, parser.render(some_calls(rng, fmt))).replace("<think>", "").replace("</think>", "")
    opened = rng.choice(["", "<think>", None])
    text = parser.render(calls)
    text = text if opened is None else f"{opened}{draft}</think>\n{text}"
    parsed = parser.parse(text)
    assert (list(parsed.calls), parsed.call_errors, parsed.error) == (calls, {}, None), (fmt, text, parsed)
    return text


def fuzz(number: int, seed: int) -> None:
    rng = random.Random(seed)
    for n in range(number):
        text = check_round_trip(rng, list(PARSERS)[n % len(PARSERS)])
        check_reading(mutated(rng, text) if n % 4 else "".join(rng.choices(FRAGMENTS, k=rng.randrange(12))))


def test_fuzzed_turns():
    fuzz(4000, seed=0)


UNITS = (
    *("<", "[", "(", '"', "\\", " ", "a.", "f(", "search(", "search[", '{"name":', '{"a":', "now() ", "<tool_call>"),
    *("</think>", "<think>", "<think></think>", "<|python_tag|>", "<search>", "<search></search>", "<answer>\n"),
    *('<tool_call>{"', '<tool_call>{"\\"</think>', "<tool_call>\n{\n</think>", '<tool_call>{"name":"now"}</tool_call>'),
    *("<tool_call><function=f><parameter=x>", "<tool_call><function=f><parameter=x></think>", "<function=", "{} ", "-"),
    '<tool_call>{"name": "\\"<tool_call>',
)


@pytest.mark.parametrize("name", PARSERS)
def test_time_is_linear(name):
    for unit in UNITS:
        started = time.process_time()
        check_reading(unit * (200_000 // len(unit)), {name: PARSERS[name]})
        assert time.process_time() - started < 1.5, unit
    started = time.process_time()
    check_reading("<" * 1_000_000, {name: PARSERS[name]})
    assert time.process_time() - started < 1.5


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--n", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    begun = time.process_time()
    fuzz(given.n, given.seed)
    print(f"{given.n} turns in {time.process_time() - begun:.1f} s (CPU): nothing found")
