"""Edges of the rl and distill stages: what ran out, was cut, warms up, or has nothing to learn from."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.envs.base import AssistantMessage, Observation
from upswing.errors import ConfigError, UpswingError
from upswing.recipe import recipe_from
from upswing.recipe.presets import PRESETS
from upswing.stages import distill
from upswing.stages.credit import Evidence, assign
from upswing.stages.distill import DistillMethod
from upswing.stages.rl import _is_informative
from upswing.stages.rows import make_batch, rewards_of
from upswing.stages.runner import check
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group, Outcome, Score, StopReason
from upswing.view.run_folder import read_json_lines

from .test_algorithms import TwoTurns, batch_of, recipe, run, stage, trajectory, weights


class FewTasks(TwoTurns):
    def tasks(self, split: str, seed: int):
        yield from islice(super().tasks(split, seed), 10)


class OneTurn(TwoTurns):
    def step(self, message: AssistantMessage) -> Observation:
        return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=message.content)


def extra_of(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(checkpoint / "learner_state.pt", weights_only=True)["extra"]
    return found


def with_env(one: Any, name: str) -> Any:
    return recipe_from({**one.to_dict(), "env": f"tests.stages.test_rl_edges:{name}"})


def killed_at_step_1(whole: Path, out: Path) -> Path:
    shutil.copytree(whole, out)
    for late in ("final", "step-000003", "step-000002", "critic-step-000003", "critic-step-000002"):
        shutil.rmtree(out / "checkpoints/rl" / late, ignore_errors=True)
    (out / "state.json").write_text('{"stages": {}, "next_version": 9}')
    return out


def test_dynamic_sampling_takes_every_task_of_the_stream_in_turn_also_after_a_kill(tmp_path: Path) -> None:
    one = recipe({"algorithm": "dapo", "steps": 3, "tasks_per_step": 2, "save_every": 1,
                  "keep_checkpoints": 3, "dynamic_sampling": 3})  # fmt: skip
    rows = run(one, tmp_path / "whole")
    stored = list(TrajectoryStore(tmp_path / "whole/trajectories").read("rl"))
    played = {s.trajectory.task.id for s in stored}
    assert played == {f"train{number}" for number in range(len(played))} and 6 < len(played) < 18
    assert extra_of(tmp_path / "whole/checkpoints/rl/final")["scheduler"] == {"next": len(played), "open": []}
    out = killed_at_step_1(tmp_path / "whole", tmp_path / "killed")
    assert [row["reward"] for row in run(one, out, resume=True)] == [row["reward"] for row in rows]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(out)[name], tensor), name


@pytest.mark.parametrize(
    ("rewards", "strict", "paid", "kept"),
    [
        ((0.0, 0.0), (1.0, 0.0), False, False),  # a verifier that refuses right answers: nothing to learn from
        ((1.0, 0.0), (1.0, 1.0), False, True),
        ((1.0, 0.9), (1.0, 1.0), True, False),  # a shaped reward differs in every group
        ((1.0, 0.0), (1.0, 0.0), True, True),
        ((0.5, 0.5), (1.0, 0.0), True, False),
        ((1.0, None), (1.0, None), True, False),
        ((1.0, 0.0), (None, None), False, True),
    ],
)
def test_dynamic_sampling_keeps_groups_whose_rewards_differ_and_success_where_it_is_paid(
    rewards: tuple[float | None, ...], strict: tuple[float | None, ...], paid: bool, kept: bool
) -> None:
    scores = [Score(value=r, components={"strict_match": s}) for r, s in zip(rewards, strict, strict=True)]
    played = tuple(trajectory(i, None, score=score) for i, score in enumerate(scores))
    assert _is_informative(Group(task=played[0].task, trajectories=played), "as_is", success=paid) is kept


def test_tasks_that_run_out_lose_no_finished_step(tmp_path: Path) -> None:
    one = with_env(recipe({"steps": 4, "save_every": 0}), "FewTasks")
    with pytest.raises(UpswingError, match=r"rl: the train tasks ran out at batch 3, 4 tasks each; make"):
        run(one, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run/checkpoints/rl").iterdir()] == ["step-000002"]


@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "ppo", "group_size": 1, "critic": {"kind": "head"}},
        {"algorithm": "reinforce", "group_size": 1},
        {"stage": "distill", "teacher": "first"},
    ],
    ids=["ppo", "reinforce", "distill"],
)
def test_what_learns_without_a_spread_in_groups_is_not_warned_of_having_none(
    rl: dict[str, Any], tmp_path: Path
) -> None:
    first = {"stage": "rl", "name": "first", "steps": 1, "tasks_per_step": 2, "group_size": 2, "eval_every": 0}
    common = {"steps": 2, "tasks_per_step": 4, "eval_every": 0, "early_warning": {"steps": 1, "stop": True}}
    one = recipe_from({**recipe({}).to_dict(), "stages": [first, {"stage": "rl", "from": "base", **common, **rl}]})
    assert len(run(with_env(one, "OneTurn"), tmp_path / "run")) == 2
    findings = read_json_lines(tmp_path / "run/findings.jsonl")
    spread = ("no group has a reward spread", "advantage_collapse", "echo_trap")
    assert not [row for row in findings if row["stage"] != "first" and {row["title"], row.get("mode")} & {*spread}]


def test_the_kl_coefficient_rests_while_only_the_critic_trains(tmp_path: Path) -> None:
    rl = {"algorithm": "ppo", "kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 1, "critic": {"warmup_steps": 2}}
    rows = run(recipe({**rl, "steps": 3, "save_every": 1, "keep_checkpoints": 3}), tmp_path / "run")
    found = [extra_of(tmp_path / f"run/checkpoints/rl/step-00000{i}")["kl_coef"] for i in (1, 2, 3)]
    assert found == [0.5, 0.5, pytest.approx(0.4)] and [row["kl"] for row in rows] == [0.0, 0.0, 0.0]
    assert "lr" not in rows[0] and rows[2]["num_steps"] == 1


def test_ppo_with_lora_adapts_the_critic_too_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    one = recipe({"algorithm": "ppo", "steps": 3, "save_every": 1, "keep_checkpoints": 3, "lora": {"r": 2}})
    run(one, tmp_path / "whole")
    state = torch.load(tmp_path / "whole/checkpoints/rl/critic-step-000003/learner_state.pt", weights_only=True)
    sizes = [value["exp_avg"].shape for value in state["optimizer"]["state"].values()]
    assert all(2 in size or size[0] == 1 for size in sizes)  # factors of rank 2, and the head
    out = killed_at_step_1(tmp_path / "whole", tmp_path / "killed")
    run(one, out, resume=True)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(out)[name], tensor), name


# -- rewards ------------------------------------------------------------


def test_a_reward_model_judges_what_the_verifiers_could_and_the_rules_stay() -> None:
    cut = {"outcome": Outcome.TRUNCATED, "stop_reason": StopReason.MAX_TOKENS}
    late = {"outcome": Outcome.TRUNCATED, "stop_reason": StopReason.TIMEOUT}
    given = [
        trajectory(0, 1.0),
        replace(trajectory(1, 1.0), **cut),
        replace(trajectory(2, 1.0), **late),
        trajectory(3, None, score=Score(value=None, reason="judge is down")),
        trajectory(4, 1.0),
    ]
    judged = [3.0, 4.0, 5.0, 6.0, None]
    nan = pytest.approx(math.nan, nan_ok=True)
    assert rewards_of(given, "as_is", judged) == [3.0, 4.0, nan, nan, nan]
    assert rewards_of(given, "mask", judged) == [3.0, 4.0, nan, nan, nan]
    assert rewards_of(given, "zero", judged) == [3.0, 0.0, nan, nan, nan]
    assert rewards_of(given, "zero") == [1.0, 0.0, nan, nan, 1.0]


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_in_which_nothing_could_be_scored_gives_no_rows_and_no_error(name: str) -> None:
    broken = {"outcome": Outcome.ERRORED, "stop_reason": StopReason.ERROR, "error": "OSError: gone"}
    batch = batch_of(*[trajectory(i, None, **broken) for i in range(4)])
    none_N = torch.zeros(0, dtype=torch.float64)
    evidence = Evidence(values_N=none_N, greedy_B=torch.zeros(4, dtype=torch.float64), weights={"a": 1.0})
    found = assign(stage(algorithm=name, **({"pass_k": 2} if name == "pass_at_k" else {})), batch, evidence)
    assert found.rows == () and (found.returns_N is None or not len(found.returns_N))


# -- distillation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("distill", "words"),
    [
        ({"teacher": "nobody"}, "stages.1.teacher: no earlier stage with weights 'nobody' (base, first"),
        ({"teacher": "frist"}, "did you mean 'first'?"),
        ({"teacher": "first"}, "stages.1.teacher: got 'first', the weights that the student starts from"),
        ({"teacher": "previous"}, "the weights that the student starts from"),
        ({"teacher": "base", "from": "base"}, "the weights that the student starts from"),
        ({"teacher": "tiny", "from": "base"}, "the weights that the student starts from"),
        ({"teacher": "base"}, None),
        ({"teacher": "previous", "from": "base"}, None),
        ({"teacher": "tiny"}, None),
    ],
)
def test_a_teacher_is_found_before_anything_is_loaded(distill: dict[str, Any], words: str | None) -> None:
    first = {"stage": "rl", "name": "first", "steps": 1, "eval_every": 0}
    one = recipe({})
    two = recipe_from(
        {**one.to_dict(), "stages": [first, {"stage": "distill", "steps": 1, "eval_every": 0, **distill}]}
    )
    if words is None:
        check(two)
        return
    with pytest.raises(ConfigError) as caught:
        check(two)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_base_model_can_teach_and_the_engines_cache_is_gone_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, slots = DistillMethod.learn, list[int]()

    async def learn(self: DistillMethod, *args: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            slots.append(self.context.engine._cache.num_slots)
            return make_batch(*args, **options)

        slots.append(self.context.engine._cache.num_slots)
        monkeypatch.setattr(distill, "make_batch", noted)
        return await own(self, *args)

    monkeypatch.setattr(DistillMethod, "learn", learn)
    first = {"stage": "rl", "name": "first", "steps": 1, "tasks_per_step": 4, "lr": 1e-2, "eval_every": 0}
    back = {"stage": "distill", "steps": 2, "teacher": "base", "tasks_per_step": 4, "eval_every": 0, "lr": 1e-3}
    rows = run(recipe_from({**recipe({}).to_dict(), "stages": [first, back]}), tmp_path / "run")
    assert rows[0]["kl"] > 0 and rows[0]["num_rows_skipped"] == 0
    assert min(slots[::2]) > 0 and slots[1::2] == [0, 0]


def test_a_dry_run_names_a_teacher_that_is_not_there(tmp_path: Path) -> None:
    one = tmp_path / "one.yaml"
    stage = {"stage": "distill", "steps": 1, "teacher": str(tmp_path / "nowhere"), "eval_every": 0}
    text = {"name": "d", "model": "tiny", "env": "lookup", "verifiers": ["strict_match"], "stages": [stage]}
    one.write_text(json.dumps(text))
    result = CliRunner().invoke(app, ["run", str(one), "--dry-run"])
    assert result.exit_code == 2 and "nowhere" in result.stderr and result.stderr.count("\n") == 1


def test_weights_that_change_with_the_step_and_gates_make_the_reward(tmp_path: Path) -> None:
    rl = {"steps": 3, "tasks_per_step": 2, "group_size": 4, "eval_every": 0, "algorithm": "gdpo"}
    verifiers = [
        {"name": "env_reward", "gate": True},
        {"name": "length", "weight_from": 0.0, "weight": 2.0, "weight_steps": 2},
        {"name": "constant", "weight": 0.5},
    ]
    (tmp_path / "v.py").write_text(
        "def env_reward(env_reward):\n    return min(1.0, max(0.0, env_reward))\n"
        "def length(answer):\n    return float(len(answer or '') % 2)\n"
        "def constant(answer):\n    return 1.0\n"
    )
    named = [{**one, "name": f"{tmp_path}/v.py:{one['name']}"} for one in verifiers]
    rows = run(recipe_from({**recipe(rl).to_dict(), "verifiers": named}), tmp_path / "run")
    assert ["variance_share_length" in row for row in rows] == [False, True, True]  # at first it weighs nothing
    seen = set()
    for one in TrajectoryStore(tmp_path / "run/trajectories").read("rl"):
        score = one.trajectory.score
        assert score is not None and score.value is not None
        gate, length = score.components["env_reward"], score.components["length"]
        assert gate is not None and length is not None
        assert score.value == pytest.approx(gate * ((one.step - 1) * length + 0.5))
        seen.add((one.step, gate > 0))
    assert {step for step, _ in seen} == {1, 2, 3}


def test_an_interrupt_that_comes_just_before_an_update_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving the engine's cache back is no place to be interrupted at: the step would end half done, and unsaved."""
    plain = TrajectoryStore.append

    def append(self: TrajectoryStore, stage: str, step: int, played: Any) -> Any:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, stage, step, played)

    monkeypatch.setattr(TrajectoryStore, "append", append)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(recipe({"steps": 5, "save_every": 0}), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in (tmp_path / "run/checkpoints/rl").glob("*")] == ["step-000003"]
