"""Going on from where a stored trajectory stood: its turns are said again, token by token, to a fresh environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from upswing.engine.base import Completion, FinishReason, Sampling
from upswing.envs.base import AssistantMessage
from upswing.errors import EnvironmentBroken
from upswing.rollout.agent_loop import PolicySpeaker
from upswing.rollout.collect import Rollouts
from upswing.trajectory.conversation import Conversation
from upswing.trajectory.types import Outcome, StopReason, Trajectory

RecordedTurn = tuple[list[int], Completion]
"""(the prompt that the model saw, what it said)."""


class ReplayDiffers(EnvironmentBroken):
    """An environment that got the same seed and turns again answered otherwise."""


def recorded_turns(trajectory: Trajectory) -> list[RecordedTurn]:
    """Every turn of a trajectory, each from the branch that sampled it."""
    found: list[RecordedTurn] = []
    for branch in trajectory.branches:
        for turn in np.unique(branch.turn[branch.sampled]):
            said = branch.sampled & (branch.turn == turn)
            columns = (branch.tokens, branch.engine_logprobs, branch.policy_version)
            tokens, logprobs, versions = (tuple(column[said].tolist()) for column in columns)
            prompt = branch.tokens[: np.flatnonzero(said)[0]].tolist()
            found.append((prompt, Completion(
                tokens=tokens, engine_logprobs=logprobs, policy_version=versions, finish_reason=FinishReason.STOP
            )))  # fmt: skip
    return found


@dataclass(kw_only=True)
class ReplaySpeaker:
    """Says all but the last of `recorded`, then lets `policy` speak in place of the last one."""

    recorded: Sequence[RecordedTurn]
    policy: PolicySpeaker
    source: str = "policy"
    through: bool = False
    """Whether the policy's turn came: up to there everything was as recorded."""

    async def speak(self, conversation: Conversation, turn: int) -> AssistantMessage | None:
        """Raises ReplayDiffers when the prompt isn't the recorded one."""
        if not self.through:
            prompt, completion = self.recorded[turn]
            if conversation.prompt_ids() != prompt:
                raise ReplayDiffers(f"before turn {turn} the environment didn't say what it said before")
            if turn < len(self.recorded) - 1:
                return AssistantMessage(content=conversation.add_completion(completion))
            self.through = True
        return await self.policy.speak(conversation, turn)

    def release(self) -> None:
        self.policy.release()


async def go_on(
    rollouts: Rollouts, source: Trajectory, turns: int, *, trajectory_id: str, sampling: Sampling, seed: int
) -> Trajectory:
    """Play on from after the first `turns` turns of `source`, of which it has more -> a scored Trajectory.

    The environment gets the seed that it had, the policy `seed`. The engine finds the prefix in its cache. The
    trajectory is errored, ReplayDiffers, where the environment says or ends anything that it didn't.
    """
    sampling = replace(sampling, stop_tokens=tuple(sorted({*sampling.stop_tokens, *rollouts.end_tokens})))
    policy = PolicySpeaker(
        engine=rollouts.engine, sampling=sampling, limits=rollouts.limits, session=trajectory_id, seed=seed
    )
    speaker = ReplaySpeaker(recorded=recorded_turns(source)[: turns + 1], policy=policy)
    played = await rollouts._played(source.task, trajectory_id, rollouts.make_env, speaker, source.seed)
    if speaker.through or played.outcome is Outcome.ERRORED or played.stop_reason is StopReason.TIMEOUT:
        return played
    error = (
        f"{ReplayDiffers.__name__}: the environment ended it after turn {played.num_turns - 1} ({played.stop_reason})"
    )
    return replace(played, outcome=Outcome.ERRORED, stop_reason=StopReason.ERROR, error=error, score=None)
