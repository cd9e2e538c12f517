"""Every algorithm of the table through the loop: two-turn tool use on a tiny model."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from upswing.algo import advantage, credit
from upswing.algo.correction import CORRECTIONS
from upswing.algo.loss import LOSSES
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.errors import ConfigError, UpswingError
from upswing.learn.options import RLOptions
from upswing.models.load import load_model
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, RlStage, recipe_from
from upswing.recipe.presets import EFFECTS, PRESETS
from upswing.stages import credit as credit_of_stage
from upswing.stages.credit import Evidence, assign
from upswing.stages.rows import make_batch
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import (
    Branch,
    Group,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolRecord,
    Trajectory,
)


class TwoTurns(Environment):
    """A tool turn with a reward of its own, then an answer."""

    name = "two-turns"

    def tasks(self, split: str, seed: int):
        for number in range(10_000):
            yield Task(id=f"{split}{number}", messages=(Message(role="user", content=f"say {number % 7}"),))

    def reset(self, task: Task, seed: int) -> Observation:
        self.turn = 0
        return Observation(messages=task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        self.turn += 1
        if self.turn == 1:
            record = ToolRecord(call=ToolCall(name="count"), result="ok", ok=True, turn=0)
            reward = odd(message.content)
            seen = Message(role="tool", content=str(reward))
            return Observation(messages=(seen,), reward=reward, tool_records=(record,))
        return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=message.content)


def odd(text: str) -> float:
    """0 or 1, about as often: a reward that even a random model gets some of."""
    return float(sum(map(ord, text)) % 2)


def even(messages: tuple[Message, ...]) -> float:
    return 1.0 - odd(messages[-1].content)


def length(messages: tuple[Message, ...]) -> float:
    return len(messages[-1].content) / 100


def recipe(
    rl: dict[str, Any], *before: dict[str, Any], verifiers: Any = ("tests.stages.test_algorithms:even",)
) -> Recipe:
    stage = {"stage": "rl", "steps": 2, "tasks_per_step": 4, "group_size": 4, "lr": 1e-3, "eval_every": 0, **rl}
    return recipe_from(
        {
            "name": "two",
            "model": "tiny",
            "env": "tests.stages.test_algorithms:TwoTurns",
            "verifiers": list(verifiers),
            "engine": {"max_slots": 16, "max_context": 128},
            "limits": {"turn_tokens": 32, "context_tokens": 128},
            "stages": [*before, stage],
        }
    )


def run(one: Recipe, out: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    run_recipe(one, out, log=Progress(quiet=True), resume=resume)
    return [row for row in MetricsLog(out).read(one.stages[-1].name) if "reward" in row]


def weights(out: Path, stage: str = "rl") -> dict[str, torch.Tensor]:
    model = load_model(str(out / "checkpoints" / stage / "final")).model
    return {name: p.detach().clone() for name, p in model.named_parameters()}


MORE: dict[str, dict[str, Any]] = {
    "ppo": {"kl_coef": 0.01, "critic": {"warmup_steps": 1}},
    "rloo": {"kl_coef": 0.05, "kl_target": 0.1},
    "reinforce": {"baseline": "ema"},
    "reinforce++": {"kl_coef": 0.01},
    "grpo": {"kl_coef": 0.01, "ref_refresh_steps": 1, "entropy_coef": 0.01, "entropy_target": 9.0},
    "gspo": {"ratio_level": "turn", "correction": "seq_tis"},
    "process": {"process_form": "min"},
    "pass_at_k": {"pass_k": 2},
    "clip_cov": {"cov_fraction": 0.05},
    "kl_cov": {"cov_fraction": 0.05},
    "cispo": {"opsm_delta": 0.5, "correction": "icepop"},
    "dapo": {"overlong_length": 40, "overlong_cache": 20},
    "llds": {"llds_answer_weight": 0.5, "kl_stop": 5.0},
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_trains(name: str, tmp_path: Path) -> None:
    verifiers = ["tests.stages.test_algorithms:even"]
    if name == "gdpo":
        verifiers.append("tests.stages.test_algorithms:length")
    rows = run(recipe({"algorithm": name, **MORE.get(name, {})}, verifiers=verifiers), tmp_path / "run")
    assert len(rows) == 2
    trained = [row for row in rows if row.get("num_steps")]
    assert trained and all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in trained)
    start = dict(load_model("tiny").model.named_parameters())
    assert any(not torch.equal(p, start[n]) for n, p in weights(tmp_path / "run").items())
    if name == "ppo":
        assert "num_steps" not in rows[0] and math.isfinite(rows[0]["critic_loss"])
    if "kl_coef" in MORE.get(name, {}):
        assert math.isfinite(trained[-1]["kl"])


def test_ppo_with_a_value_head_trains_it(tmp_path: Path) -> None:
    one = recipe({"algorithm": "ppo", "critic": {"kind": "head", "coef": 1.0}, "updates_per_batch": 4, "steps": 3})
    rows = run(one, tmp_path / "run")
    assert all(math.isfinite(row["value_loss"]) for row in rows)
    state = torch.load(tmp_path / "run/checkpoints/rl/final/learner_state.pt", weights_only=True)
    assert float(state["value_head"]["weight"].abs().sum()) > 0


@pytest.mark.parametrize(
    "rl",
    [
        {"algorithm": "ppo", "kl_coef": 0.05, "kl_target": 0.01, "kl_horizon": 10},
        {"algorithm": "ppo", "critic": {"kind": "head"}},
        {"algorithm": "reinforce", "baseline": "ema"},
        {"algorithm": "grpo", "kl_coef": 0.5, "ref_refresh_steps": 1, "entropy_coef": 0.01, "entropy_target": 9.0},
        {"algorithm": "clip_cov", "cov_fraction": 0.1, "minibatches": 2},
    ],
    ids=["critic", "head", "ema", "refreshed", "random"],
)
def test_a_killed_run_goes_on_exactly(rl: dict[str, Any], tmp_path: Path) -> None:
    one = recipe({**rl, "steps": 3, "save_every": 1, "keep_checkpoints": 3})
    rows = run(one, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for late in ("final", "step-000003", "step-000002", "critic-step-000003"):
        shutil.rmtree(tmp_path / "killed/checkpoints/rl" / late, ignore_errors=True)
    (tmp_path / "killed/state.json").write_text('{"stages": {}, "next_version": 9}')
    again = run(one, tmp_path / "killed", resume=True)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "killed")[name], tensor), name
    assert [row["reward"] for row in again] == [row["reward"] for row in rows]


def test_dynamic_sampling_keeps_whole_informative_groups_and_stops(tmp_path: Path) -> None:
    one = recipe({"algorithm": "dapo", "dynamic_sampling": 3, "steps": 1, "group_size": 2, "tasks_per_step": 2})
    rows = run(one, tmp_path / "run")
    played = [stored.trajectory for stored in TrajectoryStore(tmp_path / "run/trajectories").read("rl")]
    assert len({t.id for t in played}) == len(played) and len(played) % 4 == 0
    rewards = {t.task.id: {other.reward for other in played if other.task.id == t.task.id} for t in played}
    flat = np.mean([len(found) == 1 for found in rewards.values()])
    # Signals of what was played are also over the groups that the update leaves out; the update has the others only.
    assert rows[0]["zero_variance_frac"] == flat > 0.0 and rows[0]["num_trajectories"] == len(played) > 4
    assert rows[0]["reward"] == pytest.approx(np.mean([t.reward for t in played])) and rows[0]["effective_frac"] == 1.0
    constant = recipe(
        {"algorithm": "dapo", "dynamic_sampling": 3, "steps": 1}, verifiers=["tests.stages.test_algorithms:one"]
    )
    rows = run(constant, tmp_path / "constant")
    assert rows[0]["zero_variance_frac"] == 1.0 and rows[0]["num_steps"] == 0


def one(messages: tuple[Message, ...]) -> float:
    return 1.0


def test_rewards_that_an_estimator_cannot_take_end_the_run_with_its_name(tmp_path: Path) -> None:
    wrong = recipe({"algorithm": "pass_at_k", "pass_k": 2}, verifiers=["tests.stages.test_algorithms:length"])
    with pytest.raises(UpswingError, match="algorithm 'pass_at_k' can't take these rewards: pass@k needs"):
        run(wrong, tmp_path / "run")


# -- rlhf and distillation ------------------------------------------------------------


def test_rl_on_a_reward_model_takes_its_score_and_keeps_the_verifiers_as_metrics(tmp_path: Path) -> None:
    pairs = {"stage": "reward_model", "name": "rm", "tasks": 12, "samples": 6, "validation_pairs": 4, "lr": 1e-3}
    rows = run(recipe({"reward_model": "rm", "algorithm": "rloo", "kl_coef": 0.01}, pairs), tmp_path / "run")
    for row in rows:
        assert row["reward"] not in (0.0, 1.0) and 0 <= row["score_even"] <= 1
    with pytest.raises(ConfigError, match="reward_model: got 'rn', no earlier reward_model stage; did you mean 'rm'"):
        recipe({"reward_model": "rn"}, pairs)


@pytest.mark.parametrize("kl", ["sampled", "full"])
def test_distillation_brings_the_student_to_its_teacher(kl: str, tmp_path: Path) -> None:
    teacher = {"stage": "rl", "name": "teacher", "steps": 3, "tasks_per_step": 4, "lr": 1e-2, "eval_every": 0}
    student = {"stage": "distill", "from": "base", "teacher": "teacher", "kl": kl, "tasks_per_step": 8}
    merged = {**student, "steps": 12, "lr": 2e-3, "eval_every": 0, "group_size": 2}
    base = recipe({}, teacher)
    whole = recipe_from({**base.to_dict(), "stages": [base.to_dict()["stages"][0], merged]})
    rows = run(whole, tmp_path / "run")
    found = [row["kl"] for row in rows]
    assert np.mean(found[-3:]) < 0.5 * np.mean(found[:3])


# -- the table ------------------------------------------------------------


def test_the_table_names_what_algo_has() -> None:
    """Every choice exists, and the recipe's defaults and keys are those of the functions."""
    assert set(EFFECTS["loss"]) == set(LOSSES) and set(EFFECTS["correction"]) == set(CORRECTIONS)
    assert set(EFFECTS["advantage"]) == set(credit_of_stage._TRAJECTORIES) | set(credit_of_stage._TOKENS)
    for name, spec in LOSSES.items():
        own = {"ratio_level"} | {"cov_" + option for option in spec.select_options} | set(spec.options)
        assert set(EFFECTS["loss"][name]) <= own and set(spec.options) <= set(EFFECTS["loss"][name])
    for name, kind in CORRECTIONS.items():
        keys = EFFECTS["correction"][name]
        assert keys["correction_high"] == kind.high and keys.get("correction_low", 0.0) == kind.low
    for name, preset in PRESETS.items():
        stage = recipe(
            {"algorithm": name, "group_size": 8, "minibatches": 1 if preset.choices["loss"] == "policy_gradient" else 2}
        ).stages[-1]
        options = RLOptions.of(stage)
        required = LOSSES[options.loss].aggregation
        assert required is None or options.aggregation == required


@pytest.mark.parametrize(
    ("rl", "words"),
    [
        ({"clip_low": 0.1}, "clip_low: got 0.1 without effect, as a batch has one update"),
        ({"algorithm": "gspo", "tau_pos": 2.0}, "tau_pos: got 2.0 without effect, as loss is gspo; it is for sapo"),
        ({"algorithm": "gspo", "aggregation": "token-mean"}, "aggregation: got 'token-mean', but loss 'gspo'"),
        ({"algorithm": "ppo", "critic": {"kind": "head", "lr": 1e-3}}, "critic.lr: got 0.001 without effect"),
        ({"algorithm": "grpo", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in: got 'reward', but advantage 'group'"),
        ({"algorithm": "ppo", "kl_coef": 0.1, "kl_estimator": "k3"}, "kl_estimator: got 'k3'; in the reward only k1"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "as a loss its gradient is zero"),
        ({"algorithm": "custom"}, "advantage: got nothing, but algorithm 'custom' needs it"),
        ({"algorithm": "grpo", "advantage": "rloo"}, "advantage: got 'rloo', but grpo means 'group'"),
        ({"algorithm": "rloo", "minibatches": 2}, "minibatches: got 2, but loss 'policy_gradient' has no ratio"),
        ({"algorithm": "grp"}, "did you mean 'grpo'"),
        ({"llds_coef": 0.1}, "llds_coef: got 0.1 without effect, as a batch has one update"),
        ({"algorithm": "llds", "old_logprobs": "engine"}, "old_logprobs: got 'engine', but mismatch"),
        ({"minibatches": 2, "old_logprobs": "engine", "correction": "tis"}, "correction: got 'tis' with old_logprobs"),
        ({"correction": "mis", "correction_low": 4.0}, "correction_low: got 4; allowed: below correction_high"),
        ({"algorithm": "pass_at_k", "pass_k": 9}, "pass_k: got 9; allowed: 1 to 3, below group_size"),
        ({"baseline": "ema"}, "baseline: got 'ema' without effect, as advantage is group; it is for reinforce"),
        ({"overlong_cache": 4}, "overlong_cache: got 4 without effect, as overlong_length is null"),
        ({"entropy_target": 1.0}, "entropy_target: got a target without effect"),
        ({"critic": {}}, "critic: got "),
        ({"algorithm": "gdpo", "truncated": "zero"}, "truncated: got 'zero', but each verifier's own score is read"),
        (
            {"algorithm": "pass_at_k", "pass_k": 2, "overlong_length": 9, "overlong_cache": 2},
            "overlong_length: got 9, but",
        ),
        ({"algorithm": "ppo", "critic": {"warmup_steps": 2}}, "critic.warmup_steps: got 2; allowed: fewer than the 2"),
        (
            {"algorithm": "reinforce", "dynamic_sampling": 2, "group_size": 1},
            "dynamic_sampling: got 2, but a group of 1",
        ),
        ({"lora": {"dropout": 0.1}}, "lora.dropout: got 0.1; allowed: 0"),
    ],
)
def test_options_without_effect_are_refused(rl: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(rl)
    assert words in str(caught.value) and "stages.0." in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_recipe_reads_back_equal(name: str) -> None:
    one = recipe({"algorithm": name, **MORE.get(name, {})})
    assert recipe_from(one.to_dict()) == one


# -- credit ------------------------------------------------------------


def trajectory(
    index: int, reward: float | None, turn_rewards: tuple[float, ...] = (0.0, 0.0), seen: str = "x", **more: Any
) -> Trajectory:
    """Prompt, a turn of two tokens, a tool result of two, a turn of one token."""
    sampled = np.array([0, 0, 1, 1, 0, 0, 1], bool)
    branch = Branch(
        tokens=np.arange(3, 10, dtype=np.int32),
        sampled=sampled,
        engine_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_version=np.where(sampled, 1, -1).astype(np.int32),
        turn=np.array([0, 0, 0, 0, 1, 1, 1], np.int16),
    )
    task = Task(id="t", messages=(Message(role="user", content="q"),))
    says = Message(role="assistant", content="s")
    merged = {
        "score": None if reward is None else Score(value=reward, components={"a": reward, "b": 1.0 - reward}),
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.ANSWERED,
        "state": {"turn_rewards": list(turn_rewards)},
        "tool_records": (ToolRecord(call=ToolCall(name="f"), result="r", ok=True, turn=0),),
        "num_turns": 2,
        **more,
    }
    messages = (*task.messages, says, Message(role="tool", content=seen), says)
    return Trajectory(id=f"t{index}", task=task, branches=(branch,), messages=messages, **merged)


def stage(**rl: Any) -> RlStage:
    found = recipe(rl).stages[-1]
    assert isinstance(found, RlStage)
    return found


def batch_of(*trajectories: Trajectory, **options: Any):
    return make_batch(
        [Group(task=trajectories[0].task, trajectories=trajectories)], **{"truncated": "as_is", **options}
    )


REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
GROUP = torch.zeros(4, dtype=torch.long)


def four(turns: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.0, 0.0), (1.0, 0.0), (0.0, 0.0))):
    return batch_of(*[trajectory(i, float(r), t) for i, (r, t) in enumerate(zip(REWARDS, turns, strict=True))])


def advantages(credit_rows: Any) -> list[list[float]]:
    """Each row's advantages at its three loss tokens."""
    return [
        (
            row.advantage[row.loss_positions] if isinstance(row.advantage, np.ndarray) else np.full(3, row.advantage)
        ).tolist()
        for row in credit_rows
    ]


def test_kl_in_the_reward_is_summed_for_estimators_of_whole_trajectories() -> None:
    kl_N = torch.arange(12, dtype=torch.float64) / 10
    found = assign(stage(algorithm="rloo", kl_coef=0.1), four(), Evidence(kl_N=kl_N))
    expected = advantage.rloo(REWARDS - kl_N.view(4, 3).sum(1), GROUP)
    assert [row.advantage for row in found.rows] == pytest.approx(expected.tolist())


def test_token_estimators_see_loss_tokens_only() -> None:
    """GAE over 3 loss tokens a trajectory, with two tool tokens between, and the KL as a cost of each token."""
    kl_N, values_N = torch.rand(12, dtype=torch.float64), torch.rand(12, dtype=torch.float64)
    found = assign(stage(algorithm="ppo", kl_coef=0.1, lam=0.9), four(), Evidence(kl_N=kl_N, values_N=values_N))
    sequence_N = torch.arange(4).repeat_interleave(3)
    rewards_N = torch.zeros(12, dtype=torch.float64)
    rewards_N[2::3] = REWARDS
    expected, returns = credit.gae(rewards_N - kl_N, values_N, sequence_N, lam=0.9, whiten_advantages=True)
    np.testing.assert_allclose(np.ravel(advantages(found.rows)), expected, rtol=1e-5)
    assert torch.equal(found.returns_N, returns)
    masked = found.rows[0].advantage[~found.rows[0].loss_mask]
    assert np.isnan(masked).all()  # nothing reads them


def test_turn_rewards_move_the_tool_turn_only() -> None:
    found = advantages(assign(stage(algorithm="mt_grpo"), four(), Evidence()).rows)
    plain = advantages(assign(stage(algorithm="grpo"), four(), Evidence()).rows)
    assert [row[2] for row in found] == pytest.approx([row[2] for row in plain])
    assert found[0][0] > plain[0][0] and found[3][0] < plain[3][0]


def test_gigpo_compares_steps_that_start_from_the_same_observation() -> None:
    """The last turns of 0 and 1 start alike; 2 and 3 each saw something else, so they have no step advantage."""
    batch = batch_of(*[trajectory(i, float(r), seen=s) for i, (r, s) in enumerate(zip(REWARDS, "xxyz", strict=True))])
    found = assign(stage(algorithm="gigpo"), batch, Evidence())
    rows = advantages(found.rows)
    assert rows[0][2] == pytest.approx(0.5 + 0.5) and rows[1][2] == pytest.approx(-0.5 - 0.5)
    assert rows[2][2] == pytest.approx(-0.5) and rows[3][2] == pytest.approx(0.5)
    assert found.signals["step_group_size"] == pytest.approx(8 / 4)


def test_process_scores_add_to_the_outcome() -> None:
    rows = advantages(assign(stage(algorithm="process", step_weight=1.0), four(), Evidence()).rows)
    plain = advantages(assign(stage(algorithm="process", step_weight=0.0), four(), Evidence()).rows)
    np.testing.assert_allclose(plain, advantages(assign(stage(algorithm="grpo"), four(), Evidence()).rows), rtol=1e-6)
    assert rows[0][0] > plain[0][0] and rows[1][0] < plain[1][0]


def test_scores_as_potentials_are_a_baseline_of_each_turns_start() -> None:
    """Credit of a turn falls by the potential of the state that it starts from, whatever it does there: 0 for the first
    turn, and for the second what the first was given."""
    potential = advantages(
        assign(stage(algorithm="process", process_form="potential", step_weight=1.0), four(), Evidence()).rows
    )
    plain = advantages(assign(stage(algorithm="grpo"), four(), Evidence()).rows)
    added = np.array(potential)[:, [0, 2]] - np.array(plain)[:, [0, 2]]
    assert np.ptp(added[:, 0]) == pytest.approx(0.0, abs=1e-6)
    assert added[:, 1] - added[:, 0] == pytest.approx([-1.0, 0.0, -1.0, 0.0])


def test_scaled_rewards_keep_their_zeros_and_lose_their_scale() -> None:
    batches = [batch_of(*[trajectory(i, size * float(r)) for i, r in enumerate(REWARDS)]) for size in (1.0, 100.0)]
    returns = [
        assign(stage(algorithm="ppo", scale_rewards=True), batch, Evidence(values_N=torch.zeros(12))).returns_N
        for batch in batches
    ]
    torch.testing.assert_close(returns[0], returns[1], rtol=1e-5, atol=1e-6)
    assert (returns[0].view(4, 3)[[0, 3]] > 0).all() and (returns[0].view(4, 3)[[1, 2]] == 0).all()


def test_gdpo_reads_each_weighted_verifier_and_leaves_the_unscored_out() -> None:
    unscored = trajectory(4, None, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="OSError: gone")
    batch = batch_of(*[trajectory(i, float(r)) for i, r in enumerate(REWARDS)], unscored)
    found = assign(stage(algorithm="gdpo"), batch, Evidence(weights={"a": 1.0, "b": 0.5}))
    scores = torch.stack([REWARDS, 1 - REWARDS], 1)
    assert [row.advantage for row in found.rows] == pytest.approx(advantage.gdpo(scores, GROUP, [1.0, 0.5]).tolist())


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("ppo", "remax")])
def test_an_errored_trajectory_changes_nothing_for_the_others(name: str) -> None:
    """ADV-05, ADV-06 for the whole table: no row, no part in any baseline."""
    members = [
        trajectory(i, float(r), t) for i, (r, t) in enumerate(zip(REWARDS, [(1.0, 0.0), (0.0, 0.0)] * 2, strict=True))
    ]
    broken = [
        trajectory(7, None, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error="OSError: gone"),
        trajectory(8, None, score=Score(value=None, reason="judge is down")),
        replace(trajectory(9, 0.0), outcome=Outcome.TRUNCATED, stop_reason=StopReason.TIMEOUT),
    ]
    rules = stage(algorithm=name, **({"pass_k": 2} if name == "pass_at_k" else {}))
    evidence = Evidence(weights={"a": 1.0})
    alone = assign(rules, batch_of(*members), evidence)
    mixed = assign(rules, batch_of(members[0], *broken, *members[1:]), evidence)
    np.testing.assert_allclose(advantages(mixed.rows), advantages(alone.rows), atol=1e-6)
    assert len(mixed.rows) == 4


def test_a_length_penalty_counts_what_the_agent_said_and_spares_the_unscored() -> None:
    batch = batch_of(trajectory(0, 1.0), trajectory(1, None, score=None), overlong=(4, 2, 1.0))
    assert batch.rewards_B[0] == pytest.approx(0.5) and math.isnan(batch.rewards_B[1])
