"""Process rewards: labels against an exact value function, replays, step rewards, best of n, and a whole run."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.errors import ConfigError, UpswingError
from upswing.learn.reward_model import load_reward_model, score_steps, score_trajectories
from upswing.models.tiny import tiny_tokenizer
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, RewardModelStage, RlStage, recipe_from
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.stages.context import RunContext, RunState, TaskSource
from upswing.stages.credit import Evidence, assign
from upswing.stages.process_reward import Labelled, collect_labelled
from upswing.stages.runner import run_recipe
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Outcome, StopReason, Task, Trajectory
from upswing.verify import rubric_from
from upswing.view.run_folder import FINDINGS, read_json, read_json_lines

from .test_algorithms import advantages, four
from .test_algorithms import recipe as two_turns

TURNS, NEEDED, YES = 3, 2, 0.6


class Coins(Environment):
    """Say yes or no three times; two yes are a success: the value of every prefix is a binomial tail."""

    name = "coins"
    played: ClassVar[Iterator[int]] = itertools.count()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(id=f"{split}{number}", messages=(Message(role="user", content=f"toss {number % 5}"),))

    async def reset(self, task: Task, seed: int) -> Observation:
        self.said: list[str] = []
        self.number = next(Coins.played)
        return Observation(messages=task.messages)

    async def step(self, message: AssistantMessage) -> Observation:
        self.said.append(message.content)
        if len(self.said) == TURNS:
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer=" ".join(self.said))
        return Observation(messages=(Message(role="tool", content=self.answer()),))

    def answer(self) -> str:
        return "again"

    def expert(self, task: Task, rng: random.Random) -> Callable[[tuple[Message, ...]], str]:
        return lambda messages: rng.choice(["yes", "no"])


class Summed(Coins):
    """Shows how many yes there were in place of the conversation: each turn has a branch of its own."""

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        told = Message(role="user", content=f"{self.said.count('yes')} yes of {len(self.said)}")
        return seen if seen.done else Observation(messages=(told,), rewrite=True)


class Forgetful(Coins):
    """Never answers twice alike."""

    def answer(self) -> str:
        return f"again, {self.number}"


class Moody(Coins):
    """Every fifth episode answers otherwise."""

    def answer(self) -> str:
        return "again" if self.number % 5 else "what?"


class Hasty(Coins):
    """Every fifth episode ends after its first turn."""

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        hasty = self.number % 5 == 0 and self.number > 10
        return Observation(done=True, stop_reason=StopReason.ENV_DONE, answer="yes yes") if hasty else seen


def most(answer: str | None) -> float:
    return float((answer or "").split().count("yes") >= NEEDED)


def value(said: Sequence[str]) -> float:
    """The exact chance of success from a prefix, when every turn is yes with chance YES."""
    left, need = TURNS - len(said), NEEDED - said.count("yes")
    return sum(math.comb(left, k) * YES**k * (1 - YES) ** (left - k) for k in range(max(0, need), left + 1))


def toss(prompt: Sequence[int], sampling: Sampling, session: str | None) -> str:
    return "yes" if random.Random(sampling.seed).random() < YES else "no"


def recipe(*stages: dict[str, Any], env: str = "Coins") -> Recipe:
    here = "tests.stages.test_process_reward"
    return recipe_from(
        {
            "name": "coins",
            "model": "tiny",
            "env": f"{here}:{env}",
            "verifiers": [f"{here}:most"],
            "engine": {"max_slots": 64, "max_context": 128},
            "limits": {"turn_tokens": 4, "context_tokens": 128},
            "stages": list(stages),
        }
    )


PRM = {"stage": "reward_model", "name": "prm", "labels": "process", "tasks": 2, "samples": 4, "rollouts_per_step": 32}


def scripted(out: Path, script: Any, *, env: type[Coins] = Coins, **keys: Any) -> tuple[RunContext, RewardModelStage]:
    """A run over a scripted engine."""
    made, tokenizer = recipe({**PRM, **keys}, env=env.__name__), tiny_tokenizer()
    Coins.played = itertools.count()
    renderer, rubric = ChatRenderer(tokenizer), rubric_from(made.verifiers)
    end = renderer.end_of_turn_id()
    engine: Any = ScriptedEngine(script, tokenizer=tokenizer, end_token=end)
    limits = Limits(turn_tokens=4, context_tokens=128)
    rollouts = Rollouts(
        make_env=env, rubric=rubric, renderer=renderer, end_tokens=(end,), limits=limits, engine=engine, max_retries=0
    )
    context = RunContext(
        recipe=made, out=out, progress=Progress(quiet=True), tokenizer=tokenizer, engine=engine, rollouts=rollouts,
        rubric=rubric, make_env=env, tasks=TaskSource(env().tasks), store=TrajectoryStore(out / "trajectories"),
        metrics=MetricsLog(out), state=RunState.open(out),
    )  # fmt: skip
    stage = made.stages[0]
    assert isinstance(stage, RewardModelStage)
    return context, stage


def labels_of(context: RunContext, found: list[Labelled]) -> list[tuple[Trajectory, dict[int, float]]]:
    """The stage's trajectories and their labels by step, after checking at which tokens they are read."""
    sources = [one.trajectory for one in context.store.read("prm", 0) if one.trajectory.outcome is Outcome.COMPLETED]
    out = []
    for source, labelled in zip(sources, found, strict=True):
        [row], [branch] = labelled.rows, source.branches
        assert row.tokens[:-1].tolist() == branch.tokens.tolist()
        steps = {int(row.turn[at]): int(at) for at in row.loss_positions}
        for step, at in steps.items():
            before = np.flatnonzero(branch.sampled & (branch.turn == max(0, step - 1)))
            assert at - 1 == (before[-1] if step else before[0] - 1)
            assert not step or branch.tokens[at - 1] == context.rollouts.end_tokens[0]
        out.append((source, {step: float(row.returns[at]) for step, at in steps.items()}))
    return out


def said(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "assistant"]


# -- labels -----------------------------------------------------------------------------------------------------------


async def test_labels_are_the_exact_values_up_to_sampling_and_are_not_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upswing.stages.process_reward.CHUNK", 2)
    context, stage = scripted(tmp_path, toss, samples=3)
    found = labels_of(context, await collect_labelled(context, stage, {}))
    assert len(found) == 6
    errors = []
    for source, labels in found:
        assert sorted(labels) == [0, 1, 2, 3]
        assert labels[3] == most(source.answer) == value(said(source))
        for step in (1, 2):
            exact = value(said(source)[:step])
            spread = math.sqrt(exact * (1 - exact) / 32)
            assert abs(labels[step] - exact) <= 4 * spread + 1e-9
            errors += [(labels[step] - exact) / spread] if spread else []
    assert abs(np.mean(errors)) * math.sqrt(len(errors)) < 3.5, "no bias"
    for task in ("train0", "train1"):  # before the first turn: the share of the task's own samples
        group = [(t, labels) for t, labels in found if t.task.id == task]
        if group:
            assert {labels[0] for _, labels in group} == {np.float32(np.mean([most(t.answer) for t, _ in group]))}
    calls = len(context.engine.calls)  # type: ignore[attr-defined]
    again = labels_of(context, await collect_labelled(context, stage, {}))
    assert len(context.engine.calls) == calls  # type: ignore[attr-defined]
    *_, (_, last, path) = context.store.shards("prm")
    path.unlink()  # killed while the last ones were played
    once_more = labels_of(context, await collect_labelled(context, stage, {}))
    assert last == 3 and len(context.engine.calls) - calls <= calls // 2  # type: ignore[attr-defined]
    assert [labels for _, labels in again] == [labels for _, labels in once_more] == [labels for _, labels in found]


async def test_a_rewritten_conversation_is_brought_back_too(tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, toss, env=Summed, samples=2, rollouts_per_step=4)
    found = await collect_labelled(context, stage, {})
    assert all(one.trajectory.outcome is Outcome.COMPLETED for one in context.store.read("prm"))
    for labelled in found:
        assert [row.turn[row.loss_positions].tolist() for row in labelled.rows] == [[0, 1], [2], [3]]


async def test_outcome_labels_are_of_the_last_turn_alone(tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, toss, labels="outcome", rollouts_per_step=None)
    for source, labels in labels_of(context, await collect_labelled(context, stage, {})):
        assert labels == {3: most(source.answer)}


def half_broken(prompt: Sequence[int], sampling: Sampling, session: str | None) -> Any:
    """Samples 1 and 3 never say yes; roll-outs always do, but every other one breaks."""
    assert session is not None
    name, _, rollout = session.partition("@")
    if rollout:
        return RuntimeError("engine fell over") if int(session[-1]) % 2 else "yes"
    late = list(prompt).count(1) > 2  # <|im_start|>: there was a turn before
    return "yes" if late and name[-1] in "02" else "no"


@pytest.mark.parametrize("hard", [False, True])
async def test_a_broken_roll_out_is_no_failure(hard: bool, tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, half_broken, rollouts_per_step=4, hard_labels=hard)
    found = labels_of(context, await collect_labelled(context, stage, {}))
    for source, labels in found:
        lost = said(source)[1] == "no"
        assert labels == {0: 1.0 if hard else 0.5, 1: 1.0, 2: 0.0 if lost else 1.0, 3: 0.0 if lost else 1.0}
    assert {said(source)[1] for source, _ in found} == {"yes", "no"}


async def test_hard_labels_ask_whether_any_roll_out_succeeds(tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, toss, hard_labels=True, rollouts_per_step=16)
    for source, labels in labels_of(context, await collect_labelled(context, stage, {})):
        assert [labels[step] for step in (1, 2)] == [float(value(said(source)[:step]) > 0) for step in (1, 2)]


async def test_an_environment_that_forgets_is_refused(tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, toss, env=Forgetful, rollouts_per_step=2)
    with pytest.raises(
        UpswingError, match=r"32 of 32 couldn't be brought back .* ReplayDiffers: before turn 1 the env"
    ):
        await collect_labelled(context, stage, {})


@pytest.mark.parametrize("env", [Moody, Hasty])
async def test_replays_that_differ_are_counted_and_left_out(env: type[Coins], tmp_path: Path) -> None:
    """Not one of them may enter a label: of what did, all begin as their source does."""
    context, stage = scripted(tmp_path, toss, env=env, rollouts_per_step=8)
    await collect_labelled(context, stage, {})
    sources = {one.trajectory.id: one.trajectory for one in context.store.read("prm", 0)}
    counted = 0
    for played in (one.trajectory for one in context.store.read("prm") if one.step):
        source = sources[played.id.rpartition("@")[0]]
        step = int(played.id.rpartition("@")[2].split("-")[0])
        if played.outcome is Outcome.ERRORED:
            assert "ReplayDiffers" in (played.error or "") and played.score is None
            counted += 1
        else:
            [branch], [again] = source.branches, played.branches
            start = np.flatnonzero(branch.sampled & (branch.turn == step))[0]
            assert again.tokens[:start].tolist() == branch.tokens[:start].tolist() and played.num_turns == TURNS
            assert played.seed == source.seed
    [finding] = read_json_lines(tmp_path / FINDINGS)
    assert counted > 0 and finding["evidence"].startswith(f"{counted} of ")


async def test_labels_that_are_all_alike_teach_nothing(tmp_path: Path) -> None:
    context, stage = scripted(tmp_path, lambda *_: "yes", rollouts_per_step=1)
    with pytest.raises(UpswingError, match="nothing to learn: all 32 labels are alike"):
        await collect_labelled(context, stage, {})


# -- step rewards -----------------------------------------------------------------------------------------------------

CHANCES = [np.array(c, np.float32) for c in ([0.5, 0.9, 1.0], [0.5, 0.4, 0.0], [0.5, 0.2, 0.1], [0.5, 0.7, 0.8])]
BEFORE = {"stage": "reward_model", "name": "prm", "labels": "process"}


def credit(chances: Sequence[np.ndarray] | None, **rl: Any) -> np.ndarray:
    """[trajectory, turn] advantages beyond those without step scores."""
    found = []
    for weight in (1.0, 0.0):
        stage = two_turns({**rl, "step_weight": weight, "process_reward": "prm"}, BEFORE).stages[-1]
        assert isinstance(stage, RlStage)
        found.append(np.array(advantages(assign(stage, four(), Evidence(chances=chances)).rows))[:, [0, 2]])
    return found[0] - found[1]


def test_a_turns_reward_is_what_it_adds_to_the_chance() -> None:
    """They sum to the last chance less the first, so a trajectory gains nothing by length or detours."""
    gains = np.stack([np.diff(c) for c in CHANCES])
    np.testing.assert_allclose(gains.sum(1), [c[-1] - c[0] for c in CHANCES], atol=1e-6)
    normal = (gains - gains.mean()) / (gains.std(ddof=1) + 1e-6)
    want = np.cumsum(normal[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(credit(CHANCES, algorithm="process"), want, atol=1e-5)
    first = (gains[:, 0] - gains[:, 0].mean()) / (gains[:, 0].std(ddof=1) + 1e-6)
    added = credit(CHANCES, algorithm="mt_grpo")
    np.testing.assert_allclose(added[:, 0], first, atol=1e-4)
    assert np.abs(added[:, 1]).max() < 1e-6, "only the first turn called a tool"


def test_as_potentials_chances_are_a_baseline_with_the_starts_own() -> None:
    before = np.stack([c[:2] for c in CHANCES])
    want = before.mean() - before
    np.testing.assert_allclose(credit(CHANCES, algorithm="process", process_form="potential"), want, atol=1e-5)


def test_a_trajectory_without_chances_has_no_step_rewards_and_changes_none() -> None:
    broken = [*CHANCES[:3], np.full(3, np.nan, np.float32)]
    found = credit(broken, algorithm="process")
    assert np.isfinite(found).all() and np.abs(found[3]).max() == 0.0 and np.abs(found[:3]).min() > 0.0


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({**PRM, "labels": "proces"}, "labels: got 'proces'; did you mean 'process'?"),
        ({**PRM, "labels": "outcome"}, "rollouts_per_step: got 32 without effect, as labels is 'outcome' (for: proc"),
        ({**PRM, "margin": 1.0}, "margin: got 1.0 without effect, as labels is 'process' (for: pairs)"),
        ({**PRM, "file": __file__, "tasks": None, "samples": None}, "without effect, as labels is 'process' (for: pa"),
        ({**PRM, "pairs_per_task": 2}, "pairs_per_task: got 2 without effect, as labels is 'process'"),
        ({"stage": "rl", "steps": 1, "algorithm": "process", "process_reward": "pairs"}, "with labels: process"),
        (
            {"stage": "rl", "steps": 1, "process_reward": "good"},
            "without effect, as advantage is group; it is for gigpo",
        ),
        ({"stage": "eval", "best_of": 4, "reward_model": "good"}, "best_of: got 4; allowed: 2 to samples (1"),
        ({"stage": "eval", "greedy": False, "samples": 4, "best_of": 4}, "reward_model: got nothing, but best_of"),
        ({"stage": "eval", "reward_model": "good"}, "best_of: got nothing, but reward_model needs it"),
        ({"stage": "eval", "choose_by": "min"}, "choose_by: got 'min' without effect, as best_of is null"),
        (
            {"stage": "eval", "greedy": False, "samples": 4, "best_of": 4, "reward_model": "pairs", "choose_by": "min"},
            "choose_by: got 'min', but 'pairs' scores no steps; allowed: last",
        ),
    ],
)
def test_what_would_be_ignored_or_has_no_steps_is_refused(stage: dict[str, Any], words: str) -> None:
    earlier = [{"stage": "reward_model", "name": "pairs"}, {**PRM, "name": "good"}]
    with pytest.raises(ConfigError) as caught:
        recipe(*earlier, stage)
    assert words in str(caught.value) and "stages.2." in str(caught.value)


def test_a_resolved_recipe_reads_back_equal() -> None:
    chosen = {"stage": "eval", "greedy": False, "samples": 4, "best_of": 2, "reward_model": "prm"}
    rl = {"stage": "rl", "steps": 1, "algorithm": "gigpo", "process_reward": "prm"}
    made = recipe({**PRM, "rollouts_per_step": None}, {**PRM, "name": "orm", "labels": "outcome",
                  "rollouts_per_step": None}, rl, chosen)  # fmt: skip
    assert recipe_from(made.to_dict()) == made
    prm, orm, _, measured = made.stages
    assert (prm.rollouts_per_step, prm.hard_labels, prm.margin, prm.pairs_per_task) == (8, False, None, None)
    assert (orm.rollouts_per_step, orm.samples, measured.choose_by) == (None, 4, "last")


# -- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_learns_the_value_of_a_prefix_and_uses_it(tmp_path: Path) -> None:
    sft = {
        "stage": "sft", "demonstrations": 96, "validation_demonstrations": 0, "epochs": 2, "batch_size": 16,
        "lr": 5e-3, "min_reward": 0.0, "eval_every": 0, "graduation": {"enabled": False},
    }  # fmt: skip
    prm = {
        **PRM,
        "validation_pairs": 10,
        "tasks": 9,
        "samples": 5,
        "rollouts_per_step": 3,
        "lr": 5e-3,
        "epochs": 14,
        "batch_size": 4,
    }
    rl = {
        "stage": "rl", "algorithm": "process", "process_reward": "prm", "steps": 1, "tasks_per_step": 4,
        "group_size": 4, "eval_every": 0,
    }  # fmt: skip
    test = {
        "stage": "eval", "name": "test", "of": ["sft"], "split": "dev", "tasks": 12, "greedy": False, "samples": 6,
        "best_of": 3, "reward_model": "prm", "choose_by": "min",
    }  # fmt: skip
    orm = {**prm, "name": "orm", "labels": "outcome", "rollouts_per_step": None, "epochs": 1}
    rl |= {"from": "sft", "reward_model": "orm"}
    run_recipe(recipe(sft, prm, orm, rl, test), tmp_path / "run", log=Progress(quiet=True))
    facts = read_json(tmp_path / "run/state.json")["stages"]["orm"]
    assert facts["trajectories"] + 10 <= 45 and 0 <= facts["held_out"]["after"]["validation_brier"] < 0.3
    after = read_json(tmp_path / "run/state.json")["stages"]["prm"]["held_out"]["after"]
    assert after["validation_brier"] < 0.8 * after["validation_base_brier"] and after["validation_auc"] > 0.7
    stored = [one.trajectory for one in TrajectoryStore(tmp_path / "run/trajectories").read("test")]
    model = load_reward_model(tmp_path / "run/checkpoints/prm/final")
    steps = zip(stored, score_steps(model, stored), strict=True)
    chances = {tuple(said(t)[:2]): float(c[2]) for t, c in steps if t.num_turns == TURNS}
    assert max(0.8, chances["yes", "no"]) < chances["yes", "yes"]
    assert min(0.3, chances["yes", "no"]) > chances["no", "no"]
    ends = zip(score_trajectories(model, stored), score_steps(model, stored), strict=True)
    assert all(1 / (1 + math.exp(-score)) == pytest.approx(c[-1], abs=1e-5) for score, c in ends if score is not None)
    [row] = [row for row in MetricsLog(tmp_path / "run").read("rl") if "reward" in row]
    assert math.isfinite(row["step_score"]) and row["num_steps"] == 1 and row["reward"] != row["score_most"]
    [entry] = read_json(tmp_path / "run/results.json")
    found = entry["best_of"]
    assert found["pass_1"] < found["best"]["mean"] <= found["pass_n"] and found["tasks"] == 12
    assert found["best"]["mean"] > 0.5 * (found["pass_1"] + found["pass_n"])
