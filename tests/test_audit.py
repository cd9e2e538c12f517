"""`upswing audit`: it must find the holes that rewards really have, and none in one without."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from upswing.audit import AuditReport, audit
from upswing.cli.main import app
from upswing.envs import ToolEnv, environment_factory
from upswing.trajectory.types import Message, Task, ToolCall
from upswing.verify import Rubric, verifier_from
from upswing.verify.penalties import LengthPenalty
from upswing.world import World


def audited(env, verifier, count: int = 8, **args) -> AuditReport:
    """`env`: a name, or tasks that are answered at once."""
    make = environment_factory(env, args) if isinstance(env, str) else lambda: args.get("kind", ToolEnv)(tasks=env)
    rubric = verifier if isinstance(verifier, Rubric) else Rubric([("v", verifier_from(verifier), 1.0)])
    world = World(make_env=make, rubric=rubric, tasks=make().tasks)
    return asyncio.run(audit(world, list(islice(world.tasks("train", 0), count))))


def asked(*golds: str) -> list[Task]:
    question = Message(role="user", content="How many are there in all?")
    return [Task(id=gold, messages=(question,), gold=(gold,) if gold else ()) for gold in golds]


def accepted(report: AuditReport) -> set[str]:
    return {v.attack.name for v in report.verdicts if v.accepted}


def test_a_strict_reward_has_no_hole():
    for env, verifier in (
        ("geo_search", "strict_match"),
        ("calculator", "strict_match"),
        ("sql", "state"),
        ("grid", "state"),
        ("wordle", "state"),
        ("customer_service", "state"),
        ("web_shop", "state"),
        ("memory", "strict_match"),
        (asked("12.50", "5.0", "0", "1/2", "0.5", "1,000"), "numeric"),
        (asked("12.50", "5.0", "0", "0.5"), number_is),
    ):
        report = audited(env, verifier, 4)
        assert report.false_accept == 0 and report.false_reject == 0 and not report.untested, (env, report.by_attack())
        assert len(report.verdicts) >= 6
        assert not isinstance(env, str) or verifier != "state" or "another play" in {n for _, n in report.by_attack()}


def test_what_the_lenient_match_forgives_is_shown():
    report = audited("geo_search", "exact_match")
    assert {"leading dot", "trailing dot", "article", "lower case", "quoted"} <= accepted(report)
    assert not {"leading dot", "article"} & accepted(audited("geo_search", "strict_match"))


def contains(answer, gold):
    return any(one in (answer or "") for one in gold)


def number_is(answer, gold):
    try:
        return float(answer) == float(gold[0])
    except (TypeError, ValueError):
        return False


def anywhere(messages, gold):
    """Reads the gold wherever it stands."""
    return any(one in m.content for m in messages if m.role == "assistant" for one in gold)


def generous(answer):
    return answer is not None


def number_like(answer):
    try:
        return float(answer) is not None
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize(
    ("check", "holes"),
    [
        (contains, {"A or B", "list of answers", "denied", "doubled"}),
        (anywhere, {"thinking only", "beside the answer", "made-up result", "A or B"}),
        (generous, {"another answer", "question echoed", "told to accept", "a letter changed"}),
        (number_like, {"no number", "another number"}),
        ("math", {"question echoed"}),
    ],
)
def test_holes_are_found(check, holes):
    env = "calculator" if check in (number_like, "math") else "geo_search"
    report = audited(env, check)
    assert holes <= {v.attack.name for v in report.verdicts if v.accepted and v.attack.wanted == "refused"}
    assert report.false_accept > 0


def test_a_hole_is_one_however_the_reward_is_dressed_up():
    """A length penalty takes a little off every longer answer, and something is paid for nothing."""
    check = Rubric(
        [("c", contains, 1.0), ("short", LengthPenalty(free=0, limit=4000), 0.2), ("fixed", lambda answer: 1.0, 5.0)]
    )
    assert {"A or B", "list of answers", "denied"} <= accepted(audited("geo_search", check))


def test_a_state_that_is_read_in_part():
    def orders_only(state, data):
        return state["orders"] == data["final_state"]["orders"]

    def anything_bought(tool_records):
        return any("buy" in str(record.call.arguments).lower() for record in tool_records)

    assert "a turn left out" in accepted(audited("customer_service", orders_only, 8))
    assert "another play" in accepted(audited("web_shop", anything_bought))


class Fragile(ToolEnv):
    async def step(self, message):
        if "full marks" in message.content:
            raise OSError("no")
        return await super().step(message)


class Shouting(ToolEnv):
    async def step(self, message):
        seen = await super().step(message)
        return replace(seen, answer=seen.answer and seen.answer.upper())


def test_what_breaks_or_can_not_be_attacked_is_told_and_ends_nothing():
    report = audited(asked("Lima", "Oslo"), "strict_match", kind=Fragile)
    broken = [v for v in report.verdicts if v.value is None]
    assert len(broken) == 2 and all("OSError: no" in v.reason and not v.accepted for v in broken)
    assert report.false_accept == 0 and not report.untested
    report = audited([Task(id="0", messages=(), gold=("4",))], "strict_match")
    assert report.false_accept == report.false_reject == 0 and not report.untested, "its environment may ask"
    report = audited(asked(""), "strict_match")
    assert "no expert and no accepted answer" in report.untested[""] and report.false_reject == 1
    report = audited(asked("LIMA", "Oslo"), lambda answer, gold: answer == gold[0].upper(), kind=Shouting)
    assert "doesn't stand in the last message" in report.untested["Oslo"] and report.false_reject == 0
    assert "LIMA" not in report.untested


class Careless(ToolEnv):
    """An expert that is wrong on purpose, often enough for there to be something left to learn."""

    def expert(self, task, rng):
        answer = task.gold[0] if rng.random() < 0.4 else "Atlantis"
        return lambda messages: answer


def test_an_expert_that_is_careless_on_purpose_is_no_right_answer_refused():
    report = audited(asked("Lima", "Oslo", "Kyiv", "Rome", "Bern", "Cairo"), "strict_match", kind=Careless)
    assert report.false_reject == report.false_accept == 0
    assert report.refused and not report.untested, "it is told, though"
    report = audited(asked("Lima", "Oslo"), lambda answer, gold: 0.0, kind=Careless)
    assert report.false_reject == 1 and len(report.untested) == 2


def test_an_expert_is_asked_no_oftener_than_there_is_need():
    plans, judged = [], []

    class Planner(ToolEnv):
        def expert(self, task, rng):
            plans.append(task.id)
            if len(plans) > 1:
                raise ValueError("one plan is all it has")
            return lambda messages: task.gold[0]

    def refuses(answer):
        judged.append(answer)
        return 0.0

    assert audited(asked("Lima"), "strict_match", kind=Planner).false_reject == 0 and plans == ["Lima"]
    plans.clear()
    assert audited(asked("Lima"), refuses, kind=Planner).false_reject == 1
    assert plans == ["Lima"] and judged == [None, "Lima"], "it draws nothing, so it would play the same again"


PROGRAM = "```python\ndef solve(x):\n    return x[::-1]\n```"


class Coding(ToolEnv):
    def expert(self, task, rng):
        return lambda messages: PROGRAM


def exits_with_0(answer):
    """Runs the program with its tests behind it, and believes the exit code."""
    program = (answer or "").removeprefix("```python\n").removesuffix("```")
    tests = "\nassert solve([1, 2]) == [2, 1]\nassert solve('ab') == 'ba'"
    try:
        done = subprocess.run([sys.executable, "-c", program + tests], capture_output=True, timeout=1, check=False)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(bool(program) and done.returncode == 0)


def prints_ok(answer):
    """Believes what is printed."""
    return "def solve(x)" in (answer or "") or "print('ok')" in (answer or "")


def test_programs_are_attacked():
    task = replace(asked("")[0], data={"tests": [{"input": "ab", "output": "ba"}, {"input": "cd", "output": "dc"}]})
    report = audited([task], exits_with_0, kind=Coding)
    assert accepted(report) == {"as played", "exits with 0", "patches the checker"} and report.false_reject == 0
    tried = {v.attack.name for v in report.verdicts if v.attack.wanted == "refused"}
    assert tried >= {"does nothing", "exits with 0", "reads the tests", "sleeps", "prints what is wanted"}
    assert accepted(audited([task], prints_ok, kind=Coding)) == {"as played", "prints what is wanted"}


def test_calls_and_finds_are_attacked_by_other_plays():
    plans = [[("note", {"text": f"{who} {i}"}) for i in range(2)] for who in ("Mira", "Kofi")]
    calls = [[{"name": name, "arguments": given} for name, given in plan] for plan in plans]
    tasks = [replace(asked(f"{i}")[0], gold=(), data={"calls": one, "plan": plans[i]}) for i, one in enumerate(calls)]

    class Notes(ToolEnv):
        def __init__(self, **args):
            super().__init__(tools=[note], **args)

        def expert(self, task, rng):
            turns = iter(self.parser.render([ToolCall(name=n, arguments=a)]) for n, a in task.data["plan"])
            return lambda messages: next(turns, "done")

    for check, found in (("tool_calls", set()), (noted, {"another play", "a turn left out"})):
        report = audited(tasks, check, kind=Notes)
        tried = {v.attack.name for v in report.verdicts if v.attack.wanted == "refused"}
        assert {"another play", "a turn left out", "idle"} <= tried, report.untested
        assert {v.attack.name for v in report.verdicts if v.accepted and v.attack.wanted == "refused"} == found


def note(text: str) -> str:
    """Note something."""
    return "ok"


def noted(tool_records):
    return any(record.call.name == "note" for record in tool_records)


@pytest.mark.parametrize(
    "check",
    [
        lambda answer: 1.0,  # accepts everything
        lambda answer: answer is None,  # rewards doing nothing
        lambda answer, gold: bool(answer) and gold[0].startswith(answer),  # prefix
        "exact_match",
    ],
)
def test_a_bad_reward_does_not_pass(check):
    report = audited(asked("Paris", "Lima"), check)
    assert report.false_accept > 0 or report.false_reject > 0 or "leading dot" in accepted(report)


def test_auditing_needs_no_torch():
    code = "import sys, upswing.audit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_doing_nothing_is_an_attack_on_a_state():
    def says_done(answer):
        return answer == "done"

    report = audited("sql", says_done, change_frac=1.0)
    assert "idle" in accepted(report)


def test_a_reward_that_refuses_the_right_answer():
    report = audited("geo_search", lambda answer: 0.0)
    assert not report.verdicts and len(report.untested) == 8
    assert "doing nothing scores" in next(iter(report.untested.values()))


def test_a_reward_that_nothing_earns_as_well_is_a_hole_and_not_untested():
    report = audited("geo_search", lambda answer: 1.0)
    assert report.false_accept == 1 and not report.untested and accepted(report) == {"nothing"}


def broken(answer, gold):
    if answer not in gold:
        raise RuntimeError("no")
    return 1.0


def test_what_cannot_be_scored_is_not_accepted():
    report = audited("geo_search", broken)
    assert report.false_accept == 0 and any(v.value is None for v in report.verdicts)


RECIPE = """
name: audited
model: tiny
env: {name: geo_search, args: {kinds: [one_hop]}}
verifiers: [%s]
stages:
  - {stage: eval, of: [base], tasks: 4}
"""


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path):
    results = {}
    for name in ("strict_match", f"{__file__}:contains"):
        (tmp_path / "r.yaml").write_text(RECIPE % name)
        results[name[-8:]] = CliRunner().invoke(app, ["audit", str(tmp_path / "r.yaml"), "--tasks", "3"])
    good, bad = results["ct_match"], results["contains"]
    assert good.exit_code == 0, good.output
    assert bad.exit_code == 1
    tables = [json.loads(line) for line in bad.stdout.splitlines() if '"table"' in line]
    assert any(row[1] == "A or B" and row[3] == "1" for row in tables[1]["rows"])
    assert "of wrong answers accepted" in bad.stdout


def test_the_command_refuses_what_cannot_be_attacked(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(RECIPE % "{name: regex, args: {pattern: nothing}}")
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "r.yaml"), "--tasks", "2"])
    assert result.exit_code == 2 and "no task's right play is accepted" in result.stderr


def test_the_command_says_what_is_missing_when_nothing_can_be_refused(tmp_path: Path):
    """Tasks without an accepted answer, a wanted state or calls, which are won in one turn."""
    (tmp_path / "env.py").write_text(
        "from upswing.envs import ToolEnv\nfrom upswing.trajectory.types import Message, Task\n"
        "class Env(ToolEnv):\n    def tasks(self, split, seed=0):\n"
        "        yield Task(id='t', messages=(Message(role='user', content='Say yes.'),))\n"
        "    def expert(self, task, rng):\n        return lambda messages: 'yes'\n"
        "def polite(answer):\n    return answer == 'yes'\n"
    )
    recipe = RECIPE.replace("{name: geo_search, args: {kinds: [one_hop]}}", f"{tmp_path}/env.py:Env")
    (tmp_path / "r.yaml").write_text(recipe % f"{tmp_path}/env.py:polite")
    result = CliRunner().invoke(app, ["audit", str(tmp_path / "r.yaml"), "--tasks", "1"])
    assert result.exit_code == 2 and "nothing could be tried that must be refused" in result.stderr, result.output
    assert "nan" not in result.stdout and "final_state" in result.stderr
