"""What an `rl` stage does with a step's groups: rewards, evidence, credit, update. No sampling, no loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from upswing.algo.advantage import ema_baseline
from upswing.algo.kl import adaptive_kl_coef, kl_clamped, kl_reward
from upswing.algo.regularise import adaptive_entropy_coef
from upswing.engine.torch import TorchEngine
from upswing.learn.critic import Critic
from upswing.learn.metrics import UpdateMetrics
from upswing.learn.options import RLOptions
from upswing.learn.reference import Reference
from upswing.learn.reward_model import score_steps, score_trajectories
from upswing.learn.rows import TrainRow, at_loss, spread
from upswing.learn.schedule import Schedule
from upswing.learn.sharded import make_learner
from upswing.models.heads import scalar_model
from upswing.recipe import RlStage
from upswing.stages.context import RunContext
from upswing.stages.credit import Evidence, assign
from upswing.stages.probe import Probe
from upswing.stages.rl_metrics import effective_frac
from upswing.stages.rows import Batch, make_batch, rewards_of
from upswing.trajectory.types import Group, Trajectory

T = TypeVar("T")


class PolicyMethod:
    """Learns from verified groups. What it adapts from step to step is in `learner.extra`, so a checkpoint keeps it."""

    def __init__(self, context: RunContext, stage: RlStage, index: int) -> None:
        self.context, self.stage = context, stage
        self._source = source = context.recipe.source_of(index, stage.from_)
        head = stage.critic is not None and stage.critic.kind == "head"
        only_critic = 0 if stage.critic is None else stage.critic.warmup_steps
        self.learner = make_learner(
            context.adapted(context.source_model(source), stage),
            ref_model=context.source_model(source) if stage.kl_coef and stage.lora is None else None,
            value_head=head,
            schedule=Schedule(kind=stage.schedule, warmup=stage.warmup_steps, total=stage.steps - only_critic),
            **context.trainer_options(stage),
        )
        start = 0.0 if stage.entropy_target else stage.entropy_coef
        self.learner.extra = {"kl_coef": stage.kl_coef, "entropy_coef": start, "entropy_weight": start}
        self.learner.extra["moving_average"] = None
        self.critic: Critic | None = None
        if stage.critic is not None and not head:
            schedule = Schedule(kind=stage.schedule, warmup=stage.warmup_steps, total=stage.steps)
            options = {**context.trainer_options(stage), "lr": stage.critic.lr}
            model = context.adapted(scalar_model(context.source_model(source)), stage)
            self.critic = Critic(model, schedule=schedule, **options)
        self.reward_model, self.process_model = (
            None if name is None else context.reward_model(name) for name in (stage.reward_model, stage.process_reward)
        )

    def change(self, stage: RlStage) -> None:
        """Go on with other keys; what is adapted from step to step starts anew where theirs differ."""
        before, self.stage, extra = self.stage, stage, self.learner.extra
        self.learner.peak_lr = stage.lr
        if stage.kl_coef != before.kl_coef:
            extra["kl_coef"] = stage.kl_coef
            if stage.lora is None and not (stage.kl_coef and before.kl_coef):
                self.learner.reference = self._reference() if stage.kl_coef else None
        if (stage.entropy_coef, stage.entropy_target) != (before.entropy_coef, before.entropy_target):
            extra["entropy_coef"] = extra["entropy_weight"] = stage.entropy_coef

    def restore(self, policy: Path, critic: Path) -> None:
        """Weights, optimizers and reference as they were saved; schedules and coefficients go on."""
        learner = self.learner
        if learner.reference is not None and self.stage.lora is None:
            learner.reference = self._reference()  # a saved one that was never refreshed isn't in the checkpoint
        extra, updates = learner.extra, learner.updates
        learner.load(policy)
        learner.extra, learner.updates = {**extra, "moving_average": learner.extra["moving_average"]}, updates
        if self.critic is not None:
            updates = self.critic.updates
            self.critic.load(critic)
            self.critic.updates = updates

    def _reference(self) -> Reference:
        return Reference(self.learner.model, self.context.source_model(self._source))

    async def learn(self, groups: Sequence[Group], step: int) -> tuple[Batch, UpdateMetrics | None, dict[str, float]]:
        """One update -> the batch, the policy's metrics (None while only the critic warms up) and further signals."""
        greedy = await self._greedy(groups, step)
        if self.stage.max_staleness:  # sampling goes on meanwhile
            return await to_the_end(asyncio.to_thread(self._learn, groups, step, greedy))
        if isinstance(self.context.engine, TorchEngine) and not self.stage.oversample:
            await to_the_end(self.context.engine.forget_cache())  # the learner's memory now; dropped anyway
        return self._learn(groups, step, greedy)

    def _learn(
        self, groups: Sequence[Group], step: int, greedy: list[Trajectory] | None
    ) -> tuple[Batch, UpdateMetrics | None, dict[str, float]]:
        stage, learner = self.stage, self.learner
        batch = self._batch(groups)
        kl_N, old, signals = self._kl_penalty(batch)
        values = None if stage.critic is None else (self.critic or learner).values(batch.rows)
        credit = assign(stage, batch, self._evidence(batch, kl_N, values, greedy, step))
        rows = list(credit.rows)
        signals |= credit.signals
        returns = None if credit.returns_N is None else spread(rows, credit.returns_N.numpy())
        if self.critic is not None and returns is not None and values is not None:
            signals |= self._train_critic(rows, returns, values)
        if stage.critic is not None and stage.critic.kind == "head" and returns is not None and values is not None:
            rows = [replace(r, returns=a, old_values=b) for r, a, b in zip(rows, returns, values, strict=True)]
        probe = Probe(learner, rows, temperature=stage.temperature, passes=stage.updates_per_batch)
        update = None
        if stage.critic is None or step >= stage.critic.warmup_steps:
            update = learner.rl_update(rows, self._options(), old=old)
        signals |= {"effective_frac": effective_frac(rows), **probe.after(groups, step, update)}
        self._adapt(batch, update, signals, step)
        return batch, update, signals

    def _options(self) -> RLOptions:
        stage, extra = self.stage, self.learner.extra
        in_loss = stage.kl_in == "loss"
        changes: dict[str, Any] = {"kl_coef": extra["kl_coef"] if in_loss else 0.0}
        changes["entropy_coef"] = extra["entropy_weight"]
        if not in_loss:
            changes["kl_estimator"] = "k2"  # of the loss, where there is none
        if stage.critic is not None and stage.critic.coef is not None:
            changes |= {"value_coef": stage.critic.coef, "value_clip": stage.critic.clip}
        return RLOptions.of(stage, **changes)

    def _batch(self, groups: Sequence[Group]) -> Batch:
        stage = self.stage
        judged = self._judged([t for group in groups for t in group.trajectories])
        return make_batch(groups, truncated=stage.truncated, judged=judged, overlong=stage.overlong)

    def _judged(self, trajectories: Sequence[Trajectory]) -> list[float | None] | None:
        """The reward model's scores, if there is one."""
        return None if self.reward_model is None else score_trajectories(self.reward_model, trajectories)

    def _kl_penalty(self, batch: Batch) -> tuple[torch.Tensor | None, list[np.ndarray] | None, dict[str, float]]:
        """With the KL in the reward: each token's penalty, the policy's log-probs, and the mean KL as a signal."""
        if self.stage.kl_in != "reward":
            return None, None, {}
        rows, temperature = batch.rows, self.stage.temperature
        policy, ref = (self.learner.logprobs(rows, temperature, reference=which) for which in (False, True))
        policy_N, ref_N = _wide(rows, policy), _wide(rows, ref)
        kl_N, far_N = kl_reward(policy_N, ref_N), kl_clamped(policy_N, ref_N)
        signals = {"kl": float(kl_N.mean()), "kl_clamped_frac": float(far_N.double().mean())}
        return self.learner.extra["kl_coef"] * kl_N, policy, signals

    async def _greedy(self, groups: Sequence[Group], step: int) -> list[Trajectory] | None:
        """ReMax's baseline: one greedy rollout a task."""
        if self.stage.advantage != "remax":
            return None
        sampling = self.context.sampling(temperature=0.0)
        rollouts = self.context.rollouts_at(step)
        return await rollouts.singles([group.task for group in groups], sampling=sampling, seed=0)

    def _evidence(
        self,
        batch: Batch,
        kl_N: torch.Tensor | None,
        values: list[np.ndarray] | None,
        greedy: list[Trajectory] | None,
        step: int,
    ) -> Evidence:
        greedy_B = None
        if greedy is not None:
            found = rewards_of(greedy, self.stage.truncated, self._judged(greedy))
            greedy_B = torch.tensor(found, dtype=torch.float64)[batch.group_B]
        return Evidence(
            kl_N=kl_N,
            values_N=None if values is None else _wide(batch.rows, values),
            greedy_B=greedy_B,
            moving_average=self.learner.extra["moving_average"],
            chances=None if self.process_model is None else score_steps(self.process_model, batch.trajectories),
            weights=self.context.rubric.at(step).weights,
        )

    def _train_critic(
        self, rows: Sequence[TrainRow], returns: list[np.ndarray], values: list[np.ndarray]
    ) -> dict[str, float]:
        assert self.critic is not None and self.stage.critic is not None
        found = self.critic.value_update(
            rows,
            returns,
            values,
            clip=self.stage.critic.clip,
            updates_per_batch=self.stage.updates_per_batch,
            minibatches=self.stage.minibatches or 1,
        )
        return {f"critic_{name}": found[name] for name in ("loss", "grad_norm", "explained_variance")}

    def _adapt(self, batch: Batch, update: UpdateMetrics | None, signals: Mapping[str, float], step: int) -> None:
        """After the update: moving average, coefficients and reference for the next step."""
        stage, extra = self.stage, self.learner.extra
        if stage.baseline == "ema":
            decay = 0.9 if stage.baseline_decay is None else stage.baseline_decay
            extra["moving_average"] = ema_baseline(extra["moving_average"], batch.rewards_B, decay)
        if stage.kl_target is not None and stage.kl_horizon is not None and update is not None:
            # Not while only the critic trains: the KL of a policy that doesn't move would shrink the coefficient.
            kl = update.kl.value if stage.kl_in == "loss" else signals["kl"]
            extra["kl_coef"] = adaptive_kl_coef(
                extra["kl_coef"], kl, target=stage.kl_target, horizon=stage.kl_horizon, num_samples=len(batch.rewards_B)
            )
        if stage.entropy_target is not None and update is not None:
            extra["entropy_coef"], extra["entropy_weight"] = adaptive_entropy_coef(
                extra["entropy_coef"], update.entropy.value, target=stage.entropy_target, step=stage.entropy_coef
            )
        if stage.ref_refresh_steps and (step + 1) % stage.ref_refresh_steps == 0 and self.learner.reference:
            self.learner.reference.refresh()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """What `work` says. A cancellation comes only after it: half an update is nothing that a run could go on from."""
    task, job, cancelled = asyncio.current_task(), asyncio.ensure_future(work), False
    assert task is not None
    while not job.done():
        try:
            await asyncio.wait({job})
        except asyncio.CancelledError:
            cancelled = True
            task.uncancel()
    if cancelled:
        task.cancel()
    return job.result()


def _wide(rows: Sequence[TrainRow], arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """[T] a row at the loss tokens, float64 [N]."""
    return torch.from_numpy(at_loss(rows, arrays)).double()
