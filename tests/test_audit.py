"""`upswing audit`: it must find the holes that rewards really have, and none in one without."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from upswing.audit import AuditReport, audit
from upswing.cli.main import app
from upswing.envs import environment_factory
from upswing.verify import Rubric, verifier_from
from upswing.world import World


def audited(env: str, verifier, count: int = 8, **args) -> AuditReport:
    make = environment_factory(env, args)
    rubric = Rubric([("v", verifier_from(verifier), 1.0)])
    world = World(make_env=make, rubric=rubric, tasks=make().tasks)
    return asyncio.run(audit(world, list(islice(world.tasks("train", 0), count))))


def accepted(report: AuditReport) -> set[str]:
    return {v.attack.name for v in report.verdicts if v.accepted}


def test_a_strict_reward_has_no_hole():
    for env, verifier in (
        ("geo_search", "strict_match"),
        ("calculator", "strict_match"),
        ("sql", "state"),
        ("grid", "state"),
    ):
        report = audited(env, verifier)
        assert report.false_accept == 0 and report.false_reject == 0 and not report.untested, (env, report.by_attack())
        assert len(report.verdicts) >= 8


def test_what_the_lenient_match_forgives_is_shown():
    report = audited("geo_search", "exact_match")
    assert {"leading dot", "trailing dot", "article", "lower case", "quoted"} <= accepted(report)
    assert not {"leading dot", "article"} & accepted(audited("geo_search", "strict_match"))


def contains(answer, gold):
    return any(one in (answer or "") for one in gold)


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
    ],
)
def test_holes_are_found(check, holes):
    env = "calculator" if check is number_like else "geo_search"
    report = audited(env, check)
    assert holes <= {v.attack.name for v in report.verdicts if v.accepted and v.attack.wanted == "refused"}
    assert report.false_accept > 0


def test_doing_nothing_is_an_attack_on_a_state():
    def says_done(answer):
        return answer == "done"

    report = audited("sql", says_done, change_frac=1.0)
    assert "idle" in accepted(report)


def test_a_reward_that_refuses_the_right_answer():
    report = audited("geo_search", lambda answer: 0.0)
    assert not report.verdicts and len(report.untested) == 8
    assert "doing nothing scores" in next(iter(report.untested.values()))


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
