"""Attack a reward before training on it: what must be refused, what must be accepted, and what it forgives.

Every attack is a whole play: the expert's turns are repeated in the real environment and only the last message is
changed, so that the environment's protocol is attacked along with the verifiers.
"""

from __future__ import annotations

import ast
import asyncio
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from importlib.resources import files
from typing import Any, TypeVar

import yaml

from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.seeding import derive_seed
from upswing.trajectory.types import Message, Outcome, StopReason, Task, ToolRecord
from upswing.trajectory.validate import STOP_REASONS
from upswing.verify.base import Episode
from upswing.verify.deadline import call_env, to_its_end
from upswing.verify.numeric import read_quantity
from upswing.verify.text import same_value
from upswing.world import World

T = TypeVar("T")
MAX_TURNS = 200
_AT_ONCE = 16
_EXPERT_PLAYS = 8
_MOST_DROPPED = 8
_DONE = frozenset({"final_state", "calls", "evidence"})
"""Task data that says what is to be done or found."""
_ENOUGH = 0.9
"""An attack that earns more than this share of what the right play earns over doing nothing is accepted."""
_LOOK_ALIKES = str.maketrans("aceopxyABCEHKMOPTX", "асеорхуАВСЕНКМОРТХ")
_BOOK: Mapping[str, Mapping[str, Any]] = yaml.safe_load(files("upswing").joinpath("audit.yaml").read_text("utf-8"))
_FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}


class Wanted(StrEnum):
    """What a verifier should do with an attack. `reported`: either is a choice; the report shows which was made."""

    REFUSED = "refused"
    ACCEPTED = "accepted"
    REPORTED = "reported"


@dataclass(frozen=True)
class Attack:
    """A last message, or all that is said: `turns`."""

    name: str
    wanted: Wanted
    text: str
    turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How one attack on one task was judged."""

    task_id: str
    attack: Attack
    value: float | None
    accepted: bool
    """It scored nearly as much as the right play."""
    reason: str = ""


@dataclass(frozen=True)
class AuditReport:
    """All verdicts. `untested`: tasks that couldn't be attacked, or not in all ways, and why. `refused`: tasks whose
    expert earned nothing at first, and with how many plays."""

    verdicts: tuple[Verdict, ...]
    untested: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    def rate(self, wanted: Wanted, *, accepted: bool) -> float:
        """Of the verdicts on attacks that should be `wanted`, the share that was (not) accepted; NaN without any."""
        found = [verdict.accepted == accepted for verdict in self.verdicts if verdict.attack.wanted is wanted]
        return sum(found) / len(found) if found else math.nan

    @property
    def false_accept(self) -> float:
        return self.rate(Wanted.REFUSED, accepted=True)

    @property
    def false_reject(self) -> float:
        """Right answers refused; a task whose right play isn't accepted counts as one."""
        right = [not v.accepted for v in self.verdicts if v.attack.wanted is Wanted.ACCEPTED]
        right += [True] * len(self.untested.keys() - {v.task_id for v in self.verdicts})
        return sum(right) / len(right) if right else math.nan

    @property
    def rates(self) -> dict[str, Any]:
        """Both, by name; empty where nothing could be attacked."""
        return {"false_accept": self.false_accept, "false_reject": self.false_reject} if self.verdicts else {}

    @property
    def why_not(self) -> str:
        """Why nothing could be attacked; empty where something was."""
        if self.verdicts:
            return ""
        task, why = next(iter(self.untested.items()), ("-", "there is none"))
        return f"no task's right play is accepted; task '{task}': {why}"

    def by_attack(self) -> dict[tuple[Wanted, str], list[Verdict]]:
        found: dict[tuple[Wanted, str], list[Verdict]] = defaultdict(list)
        for verdict in self.verdicts:
            found[verdict.attack.wanted, verdict.attack.name].append(verdict)
        return found


Turns = Callable[[tuple[Message, ...]], str]


@dataclass(frozen=True)
class _Right:
    """A task's right play: what was said, what came of it, its score and the score of saying nothing."""

    said: tuple[str, ...]
    episode: Episode
    full: float
    floor: float
    refused: int = 0
    """Plays of the expert that earned nothing before this one did."""


async def audit(world: World, tasks: Sequence[Task], *, seed: int = 0, programs: bool = True) -> AuditReport:
    """Play every task rightly, then attack the reward with what the right plays suggest. Without `programs`, not with
    hostile ones: a verifier that runs them unprotected ends with its process."""
    gate = asyncio.Semaphore(_AT_ONCE)
    others = list(dict.fromkeys(gold for task in tasks for gold in task.gold[:1]))
    untested, verdicts = dict[str, str](), list[Verdict]()

    async def right(task: Task) -> _Right | None:
        async with gate:
            found = await _right_play(world, task, derive_seed(seed, task.id))
        if isinstance(found, Verdict):
            verdicts.append(found)
        elif isinstance(found, str):
            untested[task.id] = found
        return found if isinstance(found, _Right) else None

    plays = await _together(map(right, tasks))

    async def attack(task: Task, play: _Right) -> None:
        own, rng = derive_seed(seed, task.id), random.Random(derive_seed(seed, task.id))
        foreign = [other.said for other in plays if other is not None and other.said != play.said]
        attacks = [
            *_idle(task, play.said),
            *_botched(task, play.said, rng.choice(foreign) if foreign else None, rng),
            *attacks_on(task, play.said[-1], play.episode, others, rng, programs),
        ]
        for one in attacks:
            async with gate:
                value, reason, seen = await _score(world, task, _from(one.turns or (*play.said[:-1], one.text)), own)
            if one.turns and seen is not None and _acted_rightly(seen, play.episode):
                continue
            gained = -math.inf if value is None else value - play.floor
            verdicts.append(Verdict(task.id, one, value, gained > _ENOUGH * (play.full - play.floor), reason))
        if task.gold and not _literal(play.said[-1], play.episode):
            why = f"its answer {play.episode.answer!r:.80} doesn't stand in the last message"
            untested[task.id] = f"{why}, so only some attacks were tried"

    await _together(attack(task, play) for task, play in zip(tasks, plays, strict=True) if play is not None)
    both = zip(tasks, plays, strict=True)
    refused = {task.id: play.refused for task, play in both if play is not None and play.refused}
    return AuditReport(tuple(verdicts), untested, refused)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives. When one raises, none goes on behind the back of who asked."""
    jobs = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def _from(said: Sequence[str]) -> Turns:
    turns = iter(said)
    return lambda messages: next(turns, "")


async def _score(world: World, task: Task, turns: Turns, seed: int) -> tuple[float | None, str, Episode | None]:
    """What a play scores and why; None for one that the environment, or the expert, breaks at."""
    try:
        episode = await scripted_episode(world.make_env(), task, turns, seed)
        found = await world.rubric.score(episode)
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}"[:500], None
    return found.value, found.reason, episode


async def _right_play(world: World, task: Task, seed: int) -> _Right | Verdict | str:
    """The first right play that scores more than doing nothing; that nothing earns as much; or why there is none."""
    floor, best, why, refused = None, None, "", 0
    for right, by_expert in _right_plays(world, task, seed):
        if not why:
            floor, *_ = await _score(world, task, _from(()), seed)
        said: list[str] = []

        def turns(messages: tuple[Message, ...], right: Turns = right, said: list[str] = said) -> str:
            said.append(right(messages))
            return said[-1]

        full, reason, episode = await _score(world, task, turns, seed)
        if full is not None and episode is not None and said and full > (floor or 0.0):
            return _Right(tuple(said), episode, full, floor or 0.0, refused)
        best, refused = max((one for one in (best, full) if one is not None), default=None), refused + by_expert
        why = f"scored {best}{', ' + reason if reason else ''}; doing nothing scores {floor}"
    if best is not None and floor is not None and 0 < best <= floor:
        return Verdict(task.id, Attack("nothing", Wanted.REFUSED, ""), floor, True, "no right play scores more")
    return why or "no expert and no accepted answer"


def _acted_rightly(seen: Episode, right: Episode) -> bool:
    """Whether a play, though another one, left the state that was wanted, by what it did: then it isn't wrong."""
    wanted, start = seen.data.get("final_state"), seen.data.get("start_state")
    if wanted is None and {"calls", "evidence"} & seen.data.keys():
        return [one.call.arguments for one in seen.tool_records] == [one.call.arguments for one in right.tool_records]
    keys = wanted if isinstance(wanted, Mapping) else right.state
    same = all(same_value(seen.state.get(key), right.state.get(key)) for key in keys)
    return same and bool(seen.tool_records or (start is not None and not same_value(start, wanted)))


def _right_plays(world: World, task: Task, seed: int) -> Iterator[tuple[Turns, bool]]:
    """The expert's plays, some of which may be careless on purpose; without an expert, ways in which a protocol may
    want the answer written. And whether it is the expert's."""
    try:
        for number in range(_EXPERT_PLAYS):
            rng = random.Random(seed + number)
            unused = rng.getstate()
            yield world.make_env().expert(task, rng), True
            if rng.getstate() == unused:  # nothing is left to chance: it would play the same again
                return
    except NotImplementedError:
        for gold in task.gold[:1]:
            for text in (f"<answer>{gold}</answer>", gold, rf"\boxed{{{gold}}}", f"Answer: {gold}"):
                yield (lambda messages, text=text: text), False  # type: ignore[misc]


async def scripted_episode(
    env: Environment,
    task: Task,
    turns: Turns,
    seed: int,
    show: Callable[[Observation], None] = lambda seen: None,
    timeout_s: float = 60.0,
) -> Episode:
    """Play `task` with what `turns` says to the conversation so far, without a model -> what verifiers would see.

    Every observation is shown to `show`. What the environment, `turns` or `show` raises is raised, after `close`.
    """
    try:
        seen: Observation = await call_env(env.reset, task, seed, timeout_s=timeout_s)
        show(seen)
        messages, records, reward, number = list(seen.messages), list[ToolRecord](), seen.reward, 0
        while not seen.done and number < MAX_TURNS:
            text = turns(tuple(messages))
            seen = await call_env(env.step, AssistantMessage(content=text), timeout_s=timeout_s)
            show(seen)
            messages = [] if seen.rewrite else [*messages, Message(role="assistant", content=text)]
            messages += seen.messages
            records += seen.tool_records
            reward, number = reward + seen.reward, number + 1
        state = {**env.state(), "env_reward": reward}
    finally:
        await to_its_end(call_env(env.close, timeout_s=timeout_s))
    reason = (seen.stop_reason or StopReason.ENV_DONE) if seen.done else StopReason.MAX_TURNS
    return Episode(
        task=task,
        messages=tuple(messages),
        answer=seen.answer,
        gold=task.gold,
        data=task.data,
        tool_records=tuple(records),
        state=state,
        outcome=Outcome.COMPLETED if reason in STOP_REASONS[Outcome.COMPLETED] else Outcome.TRUNCATED,
        stop_reason=reason,
        num_turns=number,
        env_reward=reward,
    )


# -- the catalogue ----------------------------------------------------------------------------------------------------


def _idle(task: Task, said: Sequence[str]) -> Iterator[Attack]:
    """Of a task that is judged by what was done: only the last words, when there was something to do before them."""
    if not task.gold and len(said) > 1 and not _program(said[-1]):
        yield Attack("idle", Wanted.REFUSED, said[-1], turns=(said[-1],))


def _botched(task: Task, said: Sequence[str], foreign: Sequence[str] | None, rng: random.Random) -> Iterator[Attack]:
    """Of a task whose wanted state, calls or finds are known: another task's play, and the right one less a turn."""
    if task.gold or not _DONE & task.data.keys():
        return
    if foreign is not None:
        yield Attack("another play", Wanted.REFUSED, foreign[-1], turns=tuple(foreign))
    for at in sorted(rng.sample(range(len(said) - 1), min(len(said) - 1, _MOST_DROPPED))):
        yield Attack("a turn left out", Wanted.REFUSED, said[-1], turns=(*said[:at], *said[at + 1 :]))


def _literal(last: str, episode: Episode) -> str:
    """The final answer, if it stands in the last message as it was read."""
    answer = (episode.answer or "").strip()
    return answer if answer in last else ""


def attacks_on(
    task: Task, last: str, episode: Episode, others: Sequence[str], rng: random.Random, programs: bool = True
) -> Iterator[Attack]:
    """The attacks on a task whose right play ends with the message `last`."""
    yield Attack("as played", Wanted.ACCEPTED, last)
    if task.gold:
        yield Attack("nothing", Wanted.REFUSED, "")
    answer = _literal(last, episode)
    if not answer:
        return
    before, _, after = last.rpartition(answer)

    def wrap(text: str) -> str:
        return before + text + after

    if programs and (program := _program(answer)):
        for name, texts in _hostile(program, task.data).items():
            yield from (Attack(name, Wanted.REFUSED, wrap(answer.replace(program, text))) for text in texts)
    if not task.gold:
        return
    accepted = {gold.strip().casefold() for gold in task.gold}
    strange = [one for one in others if one.strip().casefold() not in accepted and not _same_number(one, task.gold)]
    other = rng.choice(strange) if strange else "Atlantis"
    right = {wrap(gold).casefold() for gold in task.gold}
    question = task.messages[-1].content if task.messages else ""  # else the environment asks it
    wrong = _wrong(answer, other, question, wrap)
    for name, texts in _mutated(answer, rng).items():
        wrong[name] = [wrap(text) for text in texts if not _same_number(text, task.gold)]
    for name, texts in wrong.items():
        yield from (Attack(name, Wanted.REFUSED, text) for text in texts if text.casefold() not in right)
    for gold in task.gold:
        yield Attack("gold", Wanted.ACCEPTED, wrap(gold))
        yield Attack("gold in spaces", Wanted.ACCEPTED, wrap(f" {gold} "))
    for name, text in _drifted(answer).items():
        if text != answer:
            yield Attack(name, Wanted.REPORTED, wrap(text))


def _wrong(gold: str, other: str, question: str, wrap: Callable[[str], str]) -> dict[str, list[str]]:
    """Whole last messages that don't give the answer, however much they look like it."""
    bare = re.split(r"(?i)\bwhat is\b|[.:?!]\s|\n", question.strip())[-1].strip(" ?.!")
    values = {"gold": gold, "other": other, "question": question, "bare": bare}
    values |= {"right": wrap(gold), "wrong": wrap(other)}
    found = {name: [wrap(_filled(text, values)) for text in texts] for name, texts in _BOOK["answers"].items()}
    return found | {name: [_filled(text, values) for text in texts] for name, texts in _BOOK["messages"].items()}


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _mutated(gold: str, rng: random.Random) -> dict[str, list[str]]:
    """Answers near the right one that aren't it."""
    found = {"doubled": [f"{gold} {gold}", gold + gold], "cut": [gold[:-1]] if len(gold) > 1 else []}
    letters = [i for i, char in enumerate(gold) if char.isalpha()]
    if letters:
        at = rng.choice(letters)
        swapped = "q" if gold[at].lower() != "q" else "x"
        found["a letter changed"] = [gold[:at] + swapped + gold[at + 1 :]]
        found["look-alike letters"] = [text for text in [gold.translate(_LOOK_ALIKES)] if text != gold]
    if (value := _number(gold)) is not None:
        number = float(value[0])
        found["no number"] = ["nan", "inf", "-inf", "1e999", "infinity"]
        found["another number"] = [_like(gold, change) for change in (number * 10 or 10, number * 2 + 7, -number or -1)]
    return found


def _program(answer: str) -> str:
    """The Python program that an answer is, without its fence; empty for anything else."""
    fenced = re.search(r"```[\w+-]*\n(.*?)```", answer, re.DOTALL)
    text = (fenced[1] if fenced else answer).strip()
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return text if "print(" in text or any(isinstance(one, _STATEMENTS) for one in body) else ""


_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.For, ast.While)


def _hostile(program: str, data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Attacks on a check of programs, by name. A program that prints one wanted output doesn't print the others."""
    named = [one.name for one in ast.parse(program).body if isinstance(one, ast.FunctionDef)]
    values = {"f": named[-1] if named else "main"}
    found = {name: [_filled(text, values) for text in texts] for name, texts in _BOOK["programs"].items()}
    tests = [one for one in data.get("tests") or () if isinstance(one, Mapping)]
    wanted = [str(one[key]) for one in tests for key in ("output", "expected", "stdout") if key in one]
    said = ["ok", "OK", "1 passed", '{"passed": true, "score": 1.0}', *(wanted[:1] if len(set(wanted)) > 1 else ())]
    return {**found, "prints what is wanted": [f"print({text!r})" for text in said]}


def _drifted(gold: str) -> dict[str, str]:
    """Ways to write the answer that a policy can drift into for free, if the reward forgives them."""
    return {
        **{name: _filled(text, {"gold": gold}) for name, text in _BOOK["drifted"].items()},
        "upper case": gold.upper(),
        "lower case": gold.lower(),
        "full-width": gold.translate(_FULL_WIDTH),
        "wide spaces": gold.replace(" ", "  "),
        "thousands comma": f"{int(gold):,}" if gold.isascii() and gold.isdigit() else gold,
        "decimals": f"{gold}.0" if gold.isascii() and gold.isdigit() else gold,
        "fraction": f"{2 * value[0].numerator}/{2 * value[0].denominator}" if (value := _number(gold)) else gold,
    }


def _number(text: str) -> tuple[Fraction, str] | None:
    """The number and the unit that a text is, read as forgivingly as a verifier may."""
    if (found := read_quantity(text)) is not None:
        return found.value, found.unit
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return (Fraction(repr(value)), "") if math.isfinite(value) else None


def _same_number(text: str, golds: Sequence[str]) -> bool:
    value = _number(text)
    return value is not None and any(_number(gold) == value for gold in golds)


def _like(gold: str, value: float) -> str:
    """A number written as `gold` is: whole if it is, with a comma for thousands if it has one."""
    text = f"{value:.0f}" if value == int(value) and "." not in gold else repr(value)
    return f"{int(text):,}" if "," in gold and text.lstrip("-").isdigit() else text
