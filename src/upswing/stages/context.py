"""What the stages of one run share: models, rollouts, the run folder, and which stages are done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from upswing.cluster.engines import RayEngines
from upswing.engine.base import Sampling
from upswing.engine.http import HttpEngine
from upswing.engine.openai import OpenAIEngine
from upswing.engine.torch import TorchEngine
from upswing.engine.weights import share_memory
from upswing.envs.base import Environment
from upswing.learn.learner import Learner
from upswing.learn.lora import add_lora
from upswing.learn.precision import learner_device
from upswing.learn.reward_model import RewardModel, load_reward_model
from upswing.learn.sharded import on_several_ranks
from upswing.models.load import load_model
from upswing.monitor.findings import Finding
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe
from upswing.rollout.collect import Rollouts
from upswing.seeding import derive_seed
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Task, Trajectory
from upswing.verify import Rubric
from upswing.view.health import overrides
from upswing.view.run_folder import read_json, replace_file

STATE = "state.json"
FINAL = "final"


AnyEngine = TorchEngine | HttpEngine | OpenAIEngine | RayEngines


class TaskSource:
    """The tasks of each split: the environment's own stream, or the rows of a dataset."""

    def __init__(self, stream: Callable[[str, int], Iterator[Task]]) -> None:
        self._stream = stream

    def take(self, split: str, seed: int, count: int) -> list[Task]:
        """The first `count` tasks of a split's stream; fewer when it ends."""
        return list(islice(self._stream(split, seed), count))

    def stream(self, split: str, seed: int) -> Iterator[Task]:
        return self._stream(split, seed)


@dataclass(kw_only=True)
class RunState:
    """`state.json`: what each finished stage left behind. Rewritten atomically, so a kill leaves the old or the new."""

    path: Path
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    next_version: int = 1
    """Policy versions go up over the whole run, resumed or not, so that no two sets of weights share one."""

    @classmethod
    def open(cls, out: Path) -> RunState:
        path = out / STATE
        stored = read_json(path) or {}
        return cls(path=path, stages=stored.get("stages", {}), next_version=stored.get("next_version", 1))

    def begin(self, name: str, last_sign_of_life: float) -> None:
        """Note when a stage starts; if it was started before, add how long it was at it until it stopped."""
        before = self.stages.get(name, {})
        earlier = before.get("earlier_s", 0.0)
        if "began" in before:
            earlier += max(0.0, last_sign_of_life - before["began"])
        self.stages[name] = {"done": False, "began": time.time(), "earlier_s": round(earlier, 1)}
        self._write()

    def finish(self, name: str, **facts: Any) -> None:
        """`wall_s` of a stage counts every process that worked on it."""
        stage = self.stages[name]
        wall_s = stage["earlier_s"] + time.time() - stage["began"]
        self.stages[name] = {"done": True, "wall_s": round(wall_s, 1), **facts}
        self._write()

    def take_version(self) -> int:
        """A policy version that was never used."""
        version, self.next_version = self.next_version, self.next_version + 1
        self._write()
        return version

    def _write(self) -> None:
        replace_file(self.path, json.dumps({"stages": self.stages, "next_version": self.next_version}, indent=1))

    def is_done(self, name: str) -> bool:
        return bool(self.stages.get(name, {}).get("done"))


@dataclass(kw_only=True)
class RunContext:
    """Everything a stage needs. Stages run one after the other and leave their weights as checkpoints."""

    recipe: Recipe
    out: Path
    progress: Progress
    tokenizer: PreTrainedTokenizerBase
    engine: AnyEngine
    rollouts: Rollouts
    rubric: Rubric
    make_env: Callable[[], Environment]
    tasks: TaskSource
    store: TrajectoryStore
    metrics: MetricsLog
    state: RunState
    recovered: Callable[[Trajectory], bool | None] | None = None
    """Whether a trajectory got past a failed first attempt; None when the environment can't tell."""
    compute_dtype: torch.dtype = torch.float32
    """Of the learner's forward and backward; its master weights are fp32."""

    def checkpoint(self, source: str) -> Path | None:
        """Folder of a stage's final weights; None for the base model."""
        return None if source == "base" else self.out / "checkpoints" / source / FINAL

    def source_model(self, source: str) -> PreTrainedModel:
        """A fresh copy of a stage's final weights (or the base model's) in fp32, where the learner computes."""
        model = self._load(source)
        if not on_several_ranks():
            cast(torch.nn.Module, model).to(learner_device())
        return model

    def source_weights(self, source: str) -> Mapping[str, torch.Tensor]:
        """Those of `source_model`, for an engine: in main memory, since the GPU may be the engine's."""
        return self._load(source).state_dict()

    def _load(self, source: str) -> PreTrainedModel:
        folder = self.checkpoint(source)
        return load_model(self.recipe.model if folder is None else str(folder)).model

    def reward_model(self, name: str) -> RewardModel:
        """The one that a stage has trained, for scoring."""
        return load_reward_model(str(self.checkpoint(name)), compute_dtype=self.compute_dtype)

    def trainer_options(self, stage: Any) -> dict[str, Any]:
        """What a training stage's keys say to its Trainer; the schedule, which counts its own updates, comes on top."""
        names = ("lr", "weight_decay", "grad_clip", "max_tokens_per_pack", "gradient_checkpointing")
        return {**{name: getattr(stage, name) for name in names}, "compute_dtype": self.compute_dtype}

    def adapted(self, model: PreTrainedModel, stage: Any) -> PreTrainedModel:
        """`model` with a fresh adapter if the stage has `lora`, the same one however often the stage is started.

        A stage starts from merged weights and a fresh adapter is zero: the policy without it is the start policy.
        """
        torch.manual_seed(derive_seed(self.recipe.seed, stage.name, "lora"))
        return model if stage.lora is None else add_lora(model, **stage.lora.model_dump())

    async def push_weights(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Load weights into the engine under the next policy version -> that version."""
        version = self.state.take_version()
        await self.engine.update_weights(weights, version)
        return version

    def share_memory(self, learner: Learner) -> None:
        """One copy of the weights for the learner and the engine, where they hold them alike. For stages that don't
        sample while they update; the learner's weights are still to be pushed, which is then quick."""
        if type(learner) is Learner and isinstance(self.engine, TorchEngine):
            share_memory(self.engine.model, learner.model)

    def rollouts_at(self, step: int) -> Rollouts:
        """Rollouts scored with the weights that the rubric has at a training step."""
        return replace(self.rollouts, rubric=self.rubric.at(step))

    def sampling(self, *, temperature: float) -> Sampling:
        return Sampling(max_tokens=self.recipe.limits.turn_tokens, temperature=temperature)

    def note(self, text: str) -> None:
        """Say it to the person and keep it in the run's log."""
        self.progress.note(text)
        self.metrics.event(text)

    def warn(self, title: str, *, evidence: str, remedy: str, stage: str, step: int) -> None:
        """Say it loudly and keep it as a finding."""
        self.progress.warn(f"{title}: {evidence}. {remedy}")
        self.metrics.finding(title, evidence=evidence, remedy=remedy, stage=stage, step=step)

    def found(self, finding: Finding) -> None:
        """Say what the watch has found, with the first remedy, and keep it."""
        first = finding.remedies[0] if finding.remedies else None
        remedy = "" if first is None else f" {first.text} {overrides(first.change, finding.stage)}".rstrip()
        since = f"{finding.stage}, since step {finding.since}"
        say = self.progress.note if finding.severity == "info" else self.progress.warn
        say(f"{finding.title} ({since}): {'; '.join(finding.evidence)}.{remedy}")
        self.metrics.finding(**finding.row())
