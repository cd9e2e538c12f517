"""Code: write a small Python function step by step as told, try it in a sandbox, and have it judged by hidden tests."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.generated import GeneratedEnv, book
from upswing.envs.tools import tool
from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Task
from upswing.verify.sandbox import SandboxLimits, SandboxResult, SandboxUnavailable, default_sandbox

_BOOK = book("code")
_LIMITS = SandboxLimits(wall_s=5.0, cpu_s=5.0, memory_mb=256, output_bytes=20_000)
_TESTS, _EXAMPLES = 8, 2
_MOST_ERROR = 400
"""Characters of an error's end that the agent sees."""


class Sandboxed(GeneratedEnv):
    """Its tools run in the sandbox; `unsafe_local`: without isolation. Raises ConfigError where there is none."""

    unsafe_local: bool = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        try:
            self._sandbox = default_sandbox(self.unsafe_local)
        except SandboxUnavailable as problem:
            raise ConfigError(f"{self.name}: {problem}") from problem


class Code(Sandboxed):
    """One tool, `run_python(code)`; the answer is the program, for the verifier `code`.

    A task is a function of 2 to `steps` steps on a list, a text or a dict. The prompt shows two examples; the tests are
    others. The splits differ in which steps follow each other. Options: `steps`; `expert_noise`, the chance that the
    expert's first draft has a wrong name in it; `unsafe_local`, run code without isolation.
    """

    name = "code"
    steps: Annotated[int, Field(ge=2, le=6)] = 3

    @tool()
    async def run_python(self, code: str) -> str:
        """Run a Python program by itself for at most 5 seconds; -> what it prints."""
        return shown(await self._sandbox.run_python(code, limits=_LIMITS))

    def draw(self, rng: random.Random) -> Task:
        while True:
            start = rng.choice(list(_BOOK["starts"]))
            chain, forms = self._chain(rng, start)
            given = [_input(rng, start) for _ in range(_TESTS + _EXAMPLES)]
            codes = [code for _, code in chain]
            wanted = [_run(codes, x) for x in given]
            shorter = [_without(codes, at, given[_EXAMPLES:]) for at in range(len(codes))]
            # Every step must count, and no constant or echo may pass.
            if len(set(map(repr, wanted[_EXAMPLES:]))) > 3 and wanted[_EXAMPLES:] not in [given[_EXAMPLES:], *shorter]:
                break
        steps = "\n".join(f"{number}. {ask}" for number, (ask, _) in enumerate(chain, 1))
        pairs = list(zip(given, wanted, strict=True))
        examples = "\n".join(f"solve({x!r}) == {y!r}" for x, y in pairs[:_EXAMPLES])
        question = (
            f"Write a Python function solve(x). x is {_BOOK['starts'][start]}. Step by step:\n{steps}\n"
            f"Return what the last step gives. For example:\n{examples}\n"
            "Try it with run_python. Then answer with the whole function in one ```python block; it is tested on "
            "other inputs."
        )
        return self.make_task(
            question,
            question,
            split_by=" ".join(forms),
            kind=start,
            codes=codes,
            examples=[list(pair) for pair in pairs[:_EXAMPLES]],
            tests=[{"call": "solve", "args": [x], "expected": y} for x, y in pairs[_EXAMPLES:]],
        )

    def _chain(self, rng: random.Random, kind: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Steps as (told, done), and the forms that they were made of."""
        chain, forms = list[tuple[str, str]](), list[str]()
        length = rng.randint(2, self.steps)
        while len(chain) < length and kind in _BOOK:
            options = [(to, form) for to, each in _BOOK[kind].items() for form in each if form["ask"] not in forms]
            to, form = rng.choice(options)
            if to not in _BOOK and len(chain) < length - 1:  # nothing follows a number
                continue
            names = {"{k}": str(rng.randint(1, 9)), "{d}": str(rng.randint(2, 4)), "{c}": rng.choice("aeilmr")}
            ask, code = (_filled(form[key], names) for key in ("ask", "code"))
            chain.append((ask, code))
            forms.append(form["ask"])
            kind = to
        return chain, forms

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """Knows how each step is put in Python, and tries the examples."""
        program = "\n".join(["def solve(x):", *(f"    x = {code}" for code in task.data["codes"]), "    return x"])
        if heard and not heard[-1].startswith("Error"):
            return self.say(f"```python\n{program}\n```")
        tried = "\n".join(f"print(solve({x!r}) == {y!r})" for x, y in task.data["examples"])
        draft = program.replace("return x", "return y") if careless and not heard else program
        return self.call("run_python", code=f"{draft}\n\n{tried}")


def shown(result: SandboxResult) -> str:
    """What a command printed. Raises ValueError when it was stopped or ended with an error, with the end of it."""
    out, err = (text.decode("utf-8", "replace").strip() for text in (result.stdout, result.stderr))
    if result.killed:
        raise ValueError(f"stopped: {result.killed}. {(err or out)[-_MOST_ERROR:]}".strip())
    if result.returncode and (err or result.returncode != 1):  # 1 without a word: grep found nothing, diff something
        raise ValueError(f"exit code {result.returncode}. {(err or out)[-_MOST_ERROR:]}".strip())
    return "\n".join(filter(None, (out, err))) or "(no output)"


def _filled(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{[kdc]\}", lambda found: names[found[0]], text)


@lru_cache(4096)
def _compiled(code: str) -> CodeType:
    return compile(code, "step", "eval")


def _run(codes: list[str], x: Any) -> Any:
    for code in codes:
        x = eval(_compiled(code), {"x": x})
    return x


def _without(codes: list[str], at: int, given: list[Any]) -> list[Any]:
    """What the function gives with one step left out; nothing where the others don't fit together then."""
    try:
        return [_run(codes[:at] + codes[at + 1 :], x) for x in given]
    except (TypeError, AttributeError, ValueError):
        return []


def _input(rng: random.Random, kind: str) -> Any:
    words = rng.choices(_BOOK["pool"], k=rng.randint(0, 7))
    if kind == "numbers":
        return [rng.randint(-9, 30) for _ in range(rng.randint(0, 9))]
    if kind == "counts":
        return {word: rng.randint(0, 20) for word in words}
    return words if kind == "words" else " ".join(words)
