"""Preference pairs: a better and a worse row for one prompt, from scored trajectories or from a file's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

import numpy as np
import torch

from upswing.envs.pairs import PairRow, read_pairs
from upswing.errors import ConfigError, UpswingError
from upswing.learn.rows import TrainRow
from upswing.recipe.offline import PairStage
from upswing.seeding import derive_seed
from upswing.stages.context import RunContext
from upswing.stages.rows import reward_of
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.masks import loss_mask
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Trajectory
from upswing.trajectory.validate import validate_group


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One preference; only KTO may lack a side."""

    chosen: TrainRow | None
    rejected: TrainRow | None

    @property
    def prompt(self) -> bytes:
        """What comes before the first loss token: pairs of one prompt are held out together."""
        row = self.chosen or self.rejected
        assert row is not None
        return row.tokens[: row.loss_positions[0]].tobytes()


async def collect_pairs(
    context: RunContext, stage: PairStage, weights: Mapping[str, torch.Tensor], *, paired: bool = True
) -> list[Pair]:
    """Pairs from the file, or from trajectories sampled with `weights`, which a resumed stage finds in the store.

    `paired`: both sides are needed. Raises UpswingError when all samples of every task have the same reward.
    """
    if stage.file is not None:
        rows = read_pairs(stage.file, paired=paired)
        limit = context.recipe.limits.context_tokens
        return pairs_from_rows(rows, context.rollouts.renderer, context.rollouts.end_tokens, max_tokens=limit)
    assert stage.pairs_per_task is not None
    stored = await samples(context, stage, weights)
    groups = [list(members) for _, members in groupby(stored, key=lambda one: one.id.rpartition("-")[0])]
    pairs = [pair for members in groups for pair in pairs_from_group(members, most=stage.pairs_per_task)]
    forked = sum(len(one.branches) > 1 for one in stored)
    left = f"; {forked} with more than one branch left out" if forked else ""
    context.note(f"{stage.name}: {len(pairs)} pairs from {len(groups)} tasks of {len(stored)} trajectories{left}")
    if not pairs:
        why = f"in each of the {len(groups)} tasks all samples that count have the same reward"
        how = "raise temperature or samples, or start from a model that solves some tasks"
        raise UpswingError(f"{stage.name}: no pairs: {why}; {how}")
    return pairs


async def samples(context: RunContext, stage: PairStage, weights: Mapping[str, torch.Tensor]) -> list[Trajectory]:
    """The stage's own samples, task after task: those in the store, or played with `weights` and stored."""
    stored = [one.trajectory for one in context.store.read(stage.name, 0)]
    return stored or await _sampled(context, stage, weights)


async def _sampled(context: RunContext, stage: PairStage, weights: Mapping[str, torch.Tensor]) -> list[Trajectory]:
    assert stage.tasks is not None and stage.samples is not None and stage.temperature is not None
    seed = derive_seed(context.recipe.seed, stage.name, "tasks")
    tasks = context.tasks.take("train", seed, stage.tasks)
    await context.push_weights(weights)
    with context.progress.task(f"{stage.name}: samples", total=len(tasks) * stage.samples, unit="trajectory") as shown:
        groups = await context.rollouts.groups(
            tasks,
            size=stage.samples,
            sampling=context.sampling(temperature=stage.temperature),
            seed=seed,
            on_done=lambda trajectory: shown.advance(1),
        )
    for group in groups:
        validate_group(group)
    found = [trajectory for group in groups for trajectory in group.trajectories]
    context.store.append(stage.name, 0, found)
    return found


def pairs_from_group(trajectories: Iterable[Trajectory], *, most: int) -> list[Pair]:
    """Best with worst, second best with second worst, and so on while rewards differ; no trajectory is used twice.

    Only trajectories with a reward that counts (not errored, cancelled, unscored or out of time) and with exactly one
    branch enter: the log-prob of several is no single sequence's. Equal rewards keep the order of sampling.
    """
    scored = [(reward_of(t, "as_is"), t) for t in trajectories if len(t.branches) == 1 and t.num_sampled_tokens]
    ranked = sorted(((reward, t) for reward, t in scored if not np.isnan(reward)), key=lambda one: -one[0])
    couples = zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
    different = [(best, worst) for best, worst in couples if best[0] > worst[0]]
    return [Pair(chosen=row_of(best[1]), rejected=row_of(worst[1])) for best, worst in different[:most]]


def row_of(trajectory: Trajectory) -> TrainRow:
    """The stored tokens of a trajectory with one branch, as they were sampled."""
    (branch,) = trajectory.branches
    return TrainRow(tokens=branch.tokens, loss_mask=loss_mask(branch))


def pairs_from_rows(
    rows: Sequence[PairRow], renderer: ChatRenderer, end_tokens: tuple[int, ...], *, max_tokens: int
) -> list[Pair]:
    """A file's rows as tokens. Raises ConfigError naming the line for one that is too long or has no exact tokens."""
    found = []
    for row in rows:
        sides = {}
        for side in ("chosen", "rejected"):
            answer = getattr(row, side)
            where = f"{row.where}: '{side}'"
            sides[side] = _rendered(row, answer, renderer, end_tokens, max_tokens, where) if answer else None
        found.append(Pair(**sides))
    return found


def _rendered(
    row: PairRow,
    answer: Sequence[Message],
    renderer: ChatRenderer,
    end_tokens: tuple[int, ...],
    max_tokens: int,
    where: str,
) -> TrainRow:
    """The conversation played message by message, as an expert's demonstration is."""
    conversation = Conversation(renderer, row.prompt, row.tools, end_tokens=end_tokens)
    answered: list[Message] = []
    for message in answer:
        if message.role != "assistant":
            answered.append(message)
            continue
        if answered:
            conversation.add_messages(answered)
            answered = []
        conversation.add_expert(message.content)
    branches = conversation.branches()
    if len(branches) > 1:
        detail = next(event.detail for event in conversation.drift if event.forked)
        raise ConfigError(f"{where} isn't one exact token sequence with this chat template ({detail}); split the row")
    if len(branches[0]) > max_tokens:
        raise ConfigError(f"{where} has {len(branches[0])} tokens; allowed: up to limits.context_tokens ({max_tokens})")
    return TrainRow(tokens=branches[0].tokens, loss_mask=loss_mask(branches[0]))


class Prompted(Protocol):
    """What can be held out by its prompt."""

    @property
    def prompt(self) -> bytes: ...


Item = TypeVar("Item", bound=Prompted)


def hold_out(items: Sequence[Item], count: int) -> tuple[list[Item], list[Item]]:
    """(training, held out): whole prompts from the end until at least `count` items are held out."""
    prompts = [item.prompt for item in items]
    sizes, held, size = Counter(prompts), set[bytes](), 0
    for prompt in reversed(prompts):
        if size < count and prompt not in held:
            held.add(prompt)
            size += sizes[prompt]
    parts: tuple[list[Item], list[Item]] = [], []
    for item, prompt in zip(items, prompts, strict=True):
        parts[prompt in held].append(item)
    return parts
