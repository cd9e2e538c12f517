"""Safeguards in the loop: findings reach people and files, actions the next update, and a kill changes nothing."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from upswing.errors import UpswingError
from upswing.monitor.findings import Finding, Judgement, Remedy
from upswing.monitor.history import History
from upswing.monitor.watch import News, Observed, Watch
from upswing.recipe import recipe_from
from upswing.stages import guard
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Task
from upswing.view.run_folder import read_json_lines

from .test_algorithms import TwoTurns, recipe, run, weights
from .test_rl_edges import extra_of

SEVERAL = {"minibatches": 2, "updates_per_batch": 2}


class Scripted:
    """A watch that finds what `script` says, from the step on that it says it for."""

    script: ClassVar[dict[int, tuple[tuple[str, Any], ...]]] = {}

    def __init__(self, stage: str, facts: Any, trajectories: Any) -> None:
        self.stage, self.facts, self.present, self.heard = stage, facts, dict[str, Finding](), []
        self.history = History(stage, (), facts=facts)
        type(self).last = self

    def observe(self, row: Any) -> Any:
        step = int(row["step"])
        self.history.add(row)
        self.heard.append(row)
        now = dict(next((found for first, found in sorted(self.script.items(), reverse=True) if first <= step), ()))
        began = [self.finding(mode, severity, step) for mode, severity in now.items() if mode not in self.present]
        ended = [self.present.pop(mode) for mode in sorted(self.present.keys() - now.keys())]
        self.present |= {one.mode: one for one in began}
        judgements = [Judgement(mode=one.mode, status="finding", finding=one) for one in self.present.values()]
        judgements += [Judgement(mode=one.mode, status="ok") for one in ended]
        news = [News(kind="began", finding=one, step=step) for one in began]
        news += [News(kind="ended", finding=one, step=step) for one in ended]
        return Observed(judgements=tuple(judgements), news=tuple(news))

    def finding(self, mode: str, severity: Any, step: int) -> Finding:
        kept: dict[str, Any] = {"stage": self.stage, "step": step, "since": step, "causes": ("too fast",)}
        remedies = (Remedy(text="Slow down.", change={"lr": 1e-6, "limits.turn_tokens": 8}),)
        texts = {"title": f"The {mode}", "evidence": ("it rose to 3",), "trajectories": ("t<1>",)}
        return Finding(mode=mode, severity=severity, remedies=remedies, **texts, **kept)


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(guard, "Watch", Scripted)
    monkeypatch.setattr(Scripted, "script", {})
    return Scripted


def small(**rl: Any) -> Any:
    return recipe({"tasks_per_step": 2, "group_size": 2, "save_every": 1, "keep_checkpoints": 9, **rl})


def findings(out: Path) -> list[dict[str, Any]]:
    """Those of the watch and of safeguards."""
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_json_lines(out / "findings.jsonl")]
    return [row for row in rows if row.get("step") and "mode" in row]


def killed_after(whole: Path, out: Path, step: int) -> Path:
    """A copy of a run as a kill shortly after a checkpoint leaves it."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints/rl").iterdir():
        if path.name == "final" or int(path.name[-6:]) > step:
            shutil.rmtree(path)
    (out / "state.json").write_text('{"stages": {}, "next_version": 99}')
    return out


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_off_or_without_a_finding_training_is_bit_for_bit_the_same(tmp_path: Path, watch: type[Scripted]) -> None:
    run(small(steps=3, safeguards="auto"), tmp_path / "auto")
    assert extra_of(tmp_path / "auto/checkpoints/rl/final")["safeguards"]["actions"] == []
    watch.script = {1: (("kl_explosion", "critical"),)}
    rows = run(small(steps=3), tmp_path / "off")
    assert same(tmp_path / "auto", tmp_path / "off")
    assert "safeguard_actions" not in rows[-1]
    (row,) = findings(tmp_path / "off")
    assert (row["mode"], row["step"], row["stage"]) == ("kl_explosion", 1, "rl")
    page = (tmp_path / "off/report.html").read_text()
    assert "rl.lr=1e-06 limits.turn_tokens=8" in page and "t&lt;1&gt;" in page and "too fast" in page


def test_actions_change_the_next_update_and_a_kill_between_changes_nothing(
    tmp_path: Path, watch: type[Scripted], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.script = {
        2: (("kl_explosion", "warning"), ("likelihood_displacement", "warning")),
        4: (("entropy_collapse", "warning"),),
        5: (),
    }
    monkeypatch.setattr("upswing.monitor.safeguards.COOLDOWN", 1)
    one = small(steps=6, safeguards=["lr", "llds", "entropy", "kl"], **SEVERAL)
    rows = run(one, tmp_path / "whole")
    assert [row["lr"] for row in rows] == [1e-3] * 2 + [5e-4] * 4
    assert [row.get("llds") is not None for row in rows] == [False] * 3 + [True] * 3
    assert [row["safeguard_actions"] for row in rows] == [0, 0, 1, 2, 3, 3]
    assert rows[3]["set_llds_coef"] == 0.2 and rows[4]["set_entropy_coef"] == 0.005
    said = findings(tmp_path / "whole")
    assert [(row.get("kind"), row["step"]) for row in said if row["mode"] == "kl_explosion"] == [
        (None, 2), ("action", 2), ("over", 4)
    ]  # fmt: skip
    page = (tmp_path / "whole/report.html").read_text()
    assert "lr 0.001 -&gt; 0.0005" in page and "over at step 4" in page
    assert (
        "safeguard lr: lr 0.001 -> 0.0005 (The kl_explosion: it rose to 3)"
        in (tmp_path / "whole/events.log").read_text()
    )
    assert "The kl_explosion (rl, since step 2): it rose to 3. Slow down. rl.lr=1e-06" in capsys.readouterr().out
    out = killed_after(tmp_path / "whole", tmp_path / "killed", 3)
    lines = (out / "findings.jsonl").read_text().splitlines()
    unsaid = next(i for i, line in enumerate(lines) if '"likelihood_displacement"' in line)  # killed before it was kept
    (out / "findings.jsonl").write_text("\n".join(lines[:unsaid] + lines[unsaid + 1 :]) + "\n")
    run(one, out, resume=True)
    assert same(tmp_path / "whole", out) and sorted(map(str, findings(out))) == sorted(map(str, said))
    assert extra_of(out / "checkpoints/rl/final") == extra_of(tmp_path / "whole/checkpoints/rl/final")


def test_a_kl_that_is_switched_on_has_its_reference_also_after_a_kill(tmp_path: Path, watch: type[Scripted]) -> None:
    watch.script = {1: (("overfitting", "warning"),)}
    one = small(steps=4, safeguards=["kl"])
    rows = run(one, tmp_path / "whole")
    assert rows[0].get("kl") is None and all(row["kl"] > 0 and row["set_kl_coef"] == 0.1 for row in rows[1:])
    out = killed_after(tmp_path / "whole", tmp_path / "killed", 2)
    assert [row["kl"] for row in run(one, out, resume=True)] == [row.get("kl") for row in rows]
    assert same(tmp_path / "whole", out)


@pytest.mark.parametrize(
    "more", [{}, {"max_staleness": 1, "kl_coef": 0.01, "ref_refresh_steps": 1}], ids=["sync", "async"]
)
def test_a_rollback_brings_weights_and_optimizer_back_and_loses_no_task(
    tmp_path: Path, watch: type[Scripted], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(guard, "best_checkpoint", lambda rows, saved: 2 if 2 in saved else None)
    monkeypatch.setattr(guard, "is_worse", lambda rows, best: True)
    watch.script = {4: (("kl_explosion", "critical"),), 5: ()}
    one = small(steps=6, keep_checkpoints=3, safeguards=["lr", "rollback"], **more)
    rows = run(one, tmp_path / "whole")
    folder = tmp_path / "whole/checkpoints/rl"
    kept = sorted(path.name for path in folder.glob("step-*"))
    assert kept == ["step-000002", "step-000004", "step-000005", "step-000006"], "the best stays beside the newest"
    best, back = (torch.load(folder / f"step-00000{i}/learner_state.pt", weights_only=True) for i in (2, 4))
    assert [back[key] for key in ("updates", "version")] == [4, best["version"]]
    for key, state in best["optimizer"]["state"].items():
        assert all(torch.equal(value, back["optimizer"]["state"][key][name]) for name, value in state.items())
    two, four = (_model(folder / f"step-00000{i}") for i in (2, 4))
    assert all(torch.equal(two[name], four[name]) for name in two)
    assert [row["lr"] for row in rows] == [1e-3] * 4 + [2.5e-4] * 2
    played = Counter(
        stored.trajectory.task.id for stored in TrajectoryStore(tmp_path / "whole/trajectories").read("rl")
    )
    assert set(played.values()) == {2} and len(played) == 12
    assert more or played.keys() == {f"train{n}" for n in range(12)}
    assert all(row.get("staleness_max", 0) <= more.get("max_staleness", 0) for row in rows)
    assert watch.last.heard[2]["step"] == 5, "the watch forgets what was rolled back"
    assert "back to the weights of step 2" in (tmp_path / "whole/report.html").read_text()
    if not more:
        out = killed_after(tmp_path / "whole", tmp_path / "killed", 4)
        run(one, out, resume=True)
        assert same(tmp_path / "whole", out) and findings(out) == findings(tmp_path / "whole")


def test_before_the_first_checkpoint_a_rollback_goes_to_the_start_weights(
    tmp_path: Path, watch: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "is_worse", lambda rows, best: True)
    watch.script = {2: (("kl_explosion", "critical"), ("stale_updates", "warning"))}
    one = small(steps=2, save_every=100, safeguards=["lr", "rollback"], **SEVERAL)
    run(one, tmp_path / "run")
    folder = tmp_path / "run/checkpoints/rl"
    first, last = _model(folder / "step-000000"), _model(folder / "final")
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert "back to the weights of step 0 (" in (tmp_path / "run/events.log").read_text()
    assert "held back meanwhile: stale_updates" in (tmp_path / "run/events.log").read_text()


def _model(folder: Path) -> dict[str, torch.Tensor]:
    from upswing.models.load import load_model

    return {name: p.detach().clone() for name, p in load_model(str(folder)).model.named_parameters()}


def test_the_run_stops_with_the_reason_when_nothing_helps(tmp_path: Path, watch: type[Scripted], monkeypatch) -> None:
    monkeypatch.setattr("upswing.monitor.safeguards.PATIENCE", 2)
    watch.script = {1: (("error_storm", "critical"),)}
    with pytest.raises(
        UpswingError,
        match=r"rl: stopped at step 7: The error_storm: it rose to 3. Tried: nothing that .* To try: Slow down",
    ):
        run(small(steps=8, safeguards="auto"), tmp_path / "run")
    assert [row["safeguard"] for row in findings(tmp_path / "run") if row.get("kind") == "action"] == ["stop"]
    assert max(path.name for path in (tmp_path / "run/checkpoints/rl").iterdir()) == "step-000006"


def test_a_learning_rate_far_too_high_is_found_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "Watch", Watch)  # the real one
    rl = {
        "tasks_per_step": 4,
        "group_size": 4,
        "lr": 0.05,
        "kl_coef": 1e-3,
        "safeguards": ["lr", "rollback"],
        **SEVERAL,
    }
    rows = run(small(steps=5, **rl), tmp_path / "run")
    said = findings(tmp_path / "run")
    actions = [row for row in said if row.get("kind") == "action"]
    assert rows[-1]["lr"] < 0.05 and actions and rows[-1]["safeguard_actions"] == len(actions)


class Six(TwoTurns):
    """Six tasks over and over, of which two are always solved."""

    def tasks(self, split: str, seed: int):
        for number in range(10_000):
            yield Task(id=f"{number % 6}", messages=(Message(role="user", content=f"say {number % 6}"),))


def easy(messages: tuple[Message, ...]) -> float:
    asked = next(m.content for m in messages if m.role == "user")
    return 1.0 if asked in ("say 0", "say 3") else float(len(messages[-1].content) % 2)


def test_solved_tasks_are_left_out_also_after_a_kill(tmp_path: Path, watch: type[Scripted]) -> None:
    watch.script = {4: (("advantage_collapse", "warning"),)}
    one = small(steps=8, tasks_per_step=3, group_size=6, safeguards=["curriculum"])
    one = recipe_from(
        {**one.to_dict(), "env": "tests.stages.test_safeguards:Six", "verifiers": ["tests.stages.test_safeguards:easy"]}
    )
    run(one, tmp_path / "whole")

    def tasks(out: Path) -> list[str]:
        return [s.trajectory.task.id for s in TrajectoryStore(out / "trajectories").read("rl")][::6]

    played = tasks(tmp_path / "whole")
    assert played[:12] == [str(n % 6) for n in range(12)]
    assert played[12:] == [str(n) for n in (1, 2, 4, 5) * 3]
    out = killed_after(tmp_path / "whole", tmp_path / "killed", 5)
    run(one, out, resume=True)
    assert tasks(out) == played and same(tmp_path / "whole", out)


def test_at_most_half_of_the_tasks_are_left_out_however_often(
    tmp_path: Path, watch: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "STORED_STEPS", 4)
    watch.script = {4: (("advantage_collapse", "warning"),)}
    one = small(steps=14, tasks_per_step=3, safeguards=["curriculum"])
    always = {"env": "tests.stages.test_safeguards:Six", "verifiers": ["tests.stages.test_safeguards:always"]}
    run(recipe_from({**one.to_dict(), **always}), tmp_path / "run")
    last = [s.trajectory.task.id for s in TrajectoryStore(tmp_path / "run/trajectories").read("rl") if s.step > 11]
    assert set(last) == {"3", "4", "5"}


def always(messages: tuple[Message, ...]) -> float:
    return 1.0


def test_what_a_signal_does_not_mean_is_not_heard(tmp_path: Path, watch: type[Scripted]) -> None:
    first = {"stage": "rl", "name": "first", "steps": 1, "tasks_per_step": 2, "eval_every": 0}
    teach = {"stage": "distill", "from": "base", "teacher": "first", "steps": 1, "tasks_per_step": 2, "eval_every": 1,
             "eval_tasks": 2}  # fmt: skip
    run(recipe_from({**recipe({}).to_dict(), "stages": [first, teach]}), tmp_path / "run")
    heard = [row for row in watch.last.heard if "train_s" in row]
    assert watch.last.stage == "distill" and len(heard) == 1 and len(watch.last.heard) == 3
    assert "kl" not in heard[0] and "zero_variance_frac" not in heard[0] and math.isfinite(heard[0]["entropy"])
    assert watch.last.facts["turn_tokens"] == 32 and watch.last.facts["stage"] == "distill"
