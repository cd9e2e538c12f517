"""One trajectory, one outcome, whatever breaks; and only what the agent said is marked as sampled."""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.base import AssistantMessage, Environment, Observation
from upswing.models.tiny import tiny_tokenizer
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, ToolCall, ToolRecord, Trajectory
from upswing.verify.base import Episode

TASK = Task(id="t", messages=(Message(role="user", content="How many?"),), gold=("3",))


class Echo(Environment):
    """Answers each turn with its text until the agent says `done`; breaks on request."""

    closed: ClassVar[list[str]] = []

    def reset(self, task: Task, seed: int) -> Observation:
        self.turns = 0
        return Observation(messages=task.messages)

    def step(self, message: AssistantMessage) -> Observation:
        self.turns += 1
        if "raise" in message.content:
            raise OSError("disk is gone")
        if "hang" in message.content:
            time.sleep(2)
        if "done" in message.content:
            return Observation(done=True, stop_reason=StopReason.ANSWERED, answer="3", reward=0.5)
        record = ToolRecord(call=ToolCall(name="echo"), result="heard", ok=True, turn=self.turns - 1)
        return Observation(messages=(Message(role="tool", content="heard"),), tool_records=(record,))

    def close(self) -> None:
        self.closed.append("closed")


class Exact:
    async def score(self, episode: Episode) -> Score:
        return Score(value=float(episode.answer in episode.gold))


def rollouts(script: Any, *, env: type[Environment] = Echo, rubric: Any = None, **limits: Any) -> Rollouts:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    Echo.closed = []
    return Rollouts(
        make_env=env,
        rubric=rubric or Exact(),
        renderer=renderer,
        end_tokens=(end,),
        limits=Limits(**{"turn_tokens": 32, "context_tokens": 512, "env_timeout_s": 0.5, **limits}),
        engine=ScriptedEngine(script, tokenizer=tokenizer, end_token=end),
        max_retries=0,
    )


async def play_one(parts: Rollouts) -> Trajectory:
    [group] = await parts.groups([TASK], size=1, sampling=Sampling(), seed=0)
    return group.trajectories[-1]


async def test_a_finished_conversation_is_completed_scored_and_exact() -> None:
    parts = rollouts(["one", "two", "done"])
    trajectory = await play_one(parts)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.ANSWERED)
    assert (trajectory.num_turns, trajectory.answer, trajectory.reward) == (3, "3", 1.0)
    assert trajectory.state["env_reward"] == 0.5
    [branch] = trajectory.branches
    said = parts.renderer.decode(branch.tokens[branch.sampled].tolist())
    end = parts.renderer.end_of_turn_text
    assert said == f"one{end}two{end}done{end}"
    assert np.isnan(branch.engine_logprobs[~branch.sampled]).all()
    assert set(branch.turn[branch.sampled].tolist()) == {0, 1, 2}
    assert "heard" in parts.renderer.decode(branch.tokens[~branch.sampled].tolist())


async def test_every_prompt_extends_what_the_model_saw() -> None:
    parts = rollouts(["one", "two", "done"])
    await play_one(parts)
    prompts = [call.prompt for call in parts.engine.calls]  # type: ignore[attr-defined]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier


@pytest.mark.parametrize("word", ["raise", "hang"])
async def test_a_broken_or_hung_environment_is_an_error_never_a_zero(word: str) -> None:
    trajectory = await play_one(rollouts(["one", word]))
    assert trajectory.outcome is Outcome.ERRORED
    assert trajectory.reward is None and trajectory.score is None
    assert trajectory.error and ("disk is gone" in trajectory.error or "longer than 0.5 s" in trajectory.error)
    assert Echo.closed == ["closed"]
    assert trajectory.num_turns == 2, "what had happened before the error is kept"


async def test_a_broken_engine_is_an_error_and_its_session_is_released() -> None:
    parts = rollouts(["one", RuntimeError("engine fell over")])
    trajectory = await play_one(parts)
    assert trajectory.outcome is Outcome.ERRORED and "engine fell over" in (trajectory.error or "")
    assert len(parts.engine.released) == 1  # type: ignore[attr-defined]


async def test_errored_attempts_are_retried_with_another_seed_and_kept() -> None:
    calls = 0

    def script(prompt: Any, sampling: Sampling, session: str | None) -> str:
        nonlocal calls
        calls += 1
        return "raise" if calls == 1 else "done"

    parts = rollouts(script)
    parts.max_retries = 1
    [group] = await parts.groups([TASK], size=1, sampling=Sampling(), seed=0)
    assert [t.outcome for t in group.trajectories] == [Outcome.ERRORED, Outcome.COMPLETED]
    assert group.trajectories[0].seed != group.trajectories[1].seed
    assert len({t.id for t in group.trajectories}) == 2


async def test_a_turn_cut_by_its_limit_is_truncated_and_still_scored() -> None:
    trajectory = await play_one(rollouts(["a very long turn " * 20]))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.MAX_TOKENS)
    assert trajectory.reward == 0.0


async def test_an_end_token_exactly_at_the_limit_ends_the_turn() -> None:
    parts = rollouts(["done"])
    length = len(parts.engine.tokenizer("done").input_ids) + 1  # type: ignore[attr-defined]
    parts.limits = Limits(turn_tokens=length, context_tokens=512)
    assert (await play_one(parts)).outcome is Outcome.COMPLETED


async def test_a_full_context_truncates() -> None:
    trajectory = await play_one(rollouts(["one"] * 50, context_tokens=60))
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.CONTEXT_OVERFLOW)
    assert all(len(branch) <= 100 for branch in trajectory.branches)


async def test_a_prompt_that_does_not_fit_is_an_error_that_names_the_limit_and_is_never_cut() -> None:
    parts = rollouts(["one"], context_tokens=5, turn_tokens=4)
    trajectory = await play_one(parts)
    assert trajectory.outcome is Outcome.ERRORED and trajectory.reward is None
    assert "limits.context_tokens is 5" in (trajectory.error or "")
    assert not parts.engine.calls  # type: ignore[attr-defined]


async def test_the_rollout_deadline_truncates() -> None:
    parts = rollouts(["one"] * 50, rollout_timeout_s=0.3)
    parts.engine.delay_s = 0.1  # type: ignore[attr-defined]
    trajectory = await play_one(parts)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.TRUNCATED, StopReason.TIMEOUT)


async def test_a_crashing_or_hanging_verifier_gives_no_score() -> None:
    class Broken:
        async def score(self, episode: Episode) -> Score:
            raise ZeroDivisionError("no")

    class Hung:
        async def score(self, episode: Episode) -> Score:
            await asyncio.sleep(5)
            return Score(value=1.0)

    for rubric, words in ((Broken(), "ZeroDivisionError"), (Hung(), "longer than")):
        trajectory = await play_one(rollouts(["done"], rubric=rubric, scoring_timeout_s=0.2))
        assert trajectory.outcome is Outcome.COMPLETED
        assert trajectory.score is not None and trajectory.score.value is None and words in trajectory.score.reason


async def test_a_slow_environment_holds_up_only_its_own_trajectory() -> None:
    def script(prompt: Any, sampling: Sampling, session: str | None) -> str:
        assert session is not None
        return "hang done" if session.endswith("/0-0") else "done"

    parts = rollouts(script, env_timeout_s=5.0)
    finished: list[tuple[str, float]] = []
    started = time.perf_counter()
    await parts.groups(
        [TASK],
        size=4,
        sampling=Sampling(),
        seed=0,
        on_done=lambda t: finished.append((t.id, time.perf_counter() - started)),
    )
    assert [name for name, _ in finished][-1].endswith("/0-0")
    assert all(seconds < 1.5 for _, seconds in finished[:-1])


async def test_cancelling_a_batch_cancels_its_trajectories() -> None:
    parts = rollouts(["one"] * 1000)
    parts.engine.delay_s = 0.05  # type: ignore[attr-defined]
    job = asyncio.ensure_future(parts.groups([TASK], size=4, sampling=Sampling(), seed=0))
    await asyncio.sleep(0.2)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    await asyncio.sleep(0.2)
    before = len(parts.engine.calls)  # type: ignore[attr-defined]
    await asyncio.sleep(0.2)
    assert len(parts.engine.calls) == before  # type: ignore[attr-defined]
    assert len(Echo.closed) == 4


async def test_an_environment_closes_however_often_its_trajectory_is_cancelled() -> None:
    class Slow(Echo):
        def close(self) -> None:
            time.sleep(0.1)
            super().close()

    parts = rollouts(["one"] * 1000, env=Slow)
    parts.engine.delay_s = 0.05  # type: ignore[attr-defined]
    job = asyncio.ensure_future(play_one(parts))
    await asyncio.sleep(0.2)
    for _ in range(3):
        job.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await job
    await asyncio.sleep(0.3)
    assert len(Echo.closed) == 1


async def test_the_same_task_twice_in_a_batch_is_played_apart() -> None:
    parts = rollouts(["one", "done"])
    groups = await parts.groups([TASK, TASK], size=2, sampling=Sampling(), seed=0)
    played = [t for group in groups for t in group.trajectories]
    assert len({t.id for t in played}) == 4 and len({t.seed for t in played}) == 4


async def test_a_hung_engine_is_an_error_and_not_a_truncation() -> None:
    parts = rollouts(["one"], turn_timeout_s=0.1)
    parts.engine.delay_s = 1.0  # type: ignore[attr-defined]
    trajectory = await play_one(parts)
    assert trajectory.outcome is Outcome.ERRORED and trajectory.reward is None
    assert "longer than 0.1 s" in (trajectory.error or "")


async def test_an_environment_that_cannot_be_made_is_an_error() -> None:
    class Unmakeable(Echo):
        def __init__(self) -> None:
            raise ConnectionError("no database")

    trajectory = await play_one(rollouts(["done"], env=Unmakeable))
    assert trajectory.outcome is Outcome.ERRORED and "no database" in (trajectory.error or "")


async def test_a_score_that_is_not_a_number_is_no_score() -> None:
    class Nan:
        async def score(self, episode: Episode) -> Score:
            return Score(value=float("nan"), components={"x": float("inf"), "y": 1.0})

    score = (await play_one(rollouts(["done"], rubric=Nan()))).score
    assert score is not None and score.value is None and score.components == {"x": None, "y": 1.0}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "Echo.step returned NoneType; return an Observation"),
        (Observation(done=True, reward=None), "returned the reward None; it must be a number"),  # type: ignore[arg-type]
        (Observation(done=True, reward="1"), "returned the reward '1'"),  # type: ignore[arg-type]
        (Observation(done=True, answer=3), "returned the answer 3; it must be text"),  # type: ignore[arg-type]
        (Observation(done=True, stop_reason=StopReason.ERROR), "the stop_reason 'error'; allowed: answered, env_done"),
        (Observation(done=True, stop_reason=StopReason.CANCELLED), "the stop_reason 'cancelled'"),
        (Observation(done=True, stop_reason="finished"), "the stop_reason 'finished'"),  # type: ignore[arg-type]
        (Observation(messages=({"role": "tool"},)), "{'role': 'tool'} where a Message belongs"),  # type: ignore[arg-type]
        (Observation(tool_records=("x",)), "'x' where a ToolRecord belongs"),  # type: ignore[arg-type]
        (Observation(messages=(Message(role="toll", content="x"),)), "unknown message role 'toll'"),
        (SystemExit(3), "Echo.step raised SystemExit: 3"),
        (GeneratorExit(), "Echo.step raised GeneratorExit"),
        (asyncio.CancelledError(), "it cancelled itself"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_what_an_environment_gives_back_wrongly_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, kind: str, returned: Any, words: str
) -> None:
    """Whatever it was, it is this trajectory's end, and never the end of the run or a score of 0."""

    def step(self: Echo, message: AssistantMessage) -> Any:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    async def async_step(self: Echo, message: AssistantMessage) -> Any:
        return step(self, message)

    step.__qualname__ = async_step.__qualname__ = "Echo.step"
    monkeypatch.setattr(Echo, "step", async_step if kind == "async" else step)
    trajectory = await asyncio.wait_for(play_one(rollouts(["one", "done"])), 5)
    assert trajectory.outcome is Outcome.ERRORED and trajectory.score is None
    assert words in (trajectory.error or "")
    assert Echo.closed == ["closed"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"rows": [[b"x"]]}, "state.rows[0][0] is a bytes"),
        ({1: 2}, "state has the key 1"),
        ({"s": {3}}, "state.s is a set"),
    ],
)
async def test_a_state_that_can_not_be_stored_ends_its_trajectory_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, state: dict[Any, Any], words: str
) -> None:
    monkeypatch.setattr(Echo, "state", lambda self: state)
    trajectory = await play_one(rollouts(["done"]))
    assert trajectory.outcome is Outcome.ERRORED and trajectory.score is None and words in (trajectory.error or "")


@pytest.mark.parametrize(
    ("observation", "outcome"),
    [
        (Observation(done=True, stop_reason="answered", answer="3"), Outcome.COMPLETED),  # type: ignore[arg-type]
        (Observation(done=True, reward=np.float32(0.5)), Outcome.COMPLETED),  # type: ignore[arg-type]
        (Observation(done=True, stop_reason=StopReason.MAX_TURNS), Outcome.TRUNCATED),
    ],
)
async def test_how_an_environment_may_end(
    monkeypatch: pytest.MonkeyPatch, observation: Observation, outcome: Outcome
) -> None:
    monkeypatch.setattr(Echo, "step", lambda self, message: observation)
    trajectory = await play_one(rollouts(["done"]))
    assert trajectory.outcome is outcome and type(trajectory.stop_reason) is StopReason
    assert type(trajectory.state["env_reward"]) in (int, float)


async def test_more_trajectories_than_threads_wait_without_using_up_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An environment is hung when its own call takes too long, not when it had to wait for other calls."""
    monkeypatch.setattr("upswing.verify.deadline.MAX_PER_FUNCTION", 2)

    def slow(self: Echo, message: AssistantMessage) -> Observation:
        time.sleep(0.2)
        return Observation(done=True, answer="3", stop_reason=StopReason.ANSWERED)

    monkeypatch.setattr(Echo, "step", slow)
    [group] = await rollouts(["done"] * 8).groups([TASK], size=8, sampling=Sampling(), seed=0)
    assert [t.error for t in group.trajectories] == [None] * 8


async def test_garbage_collection_is_as_before_once_nothing_is_in_play() -> None:
    """Also when two batches overlap and one of them fails."""
    usual, seen = gc.get_threshold(), []

    class Watching(Echo):
        def step(self, message: AssistantMessage) -> Observation:
            seen.append(gc.get_threshold())
            return super().step(message)

    async def batch(delay_s: float) -> None:
        parts = rollouts(["done"], env=Watching)
        parts.engine.delay_s = delay_s  # type: ignore[attr-defined]
        await parts.groups([TASK], size=2, sampling=Sampling(), seed=0)

    failing = asyncio.ensure_future(batch(5.0))
    await asyncio.gather(batch(0.0), batch(0.02))
    failing.cancel()
    await asyncio.gather(failing, return_exceptions=True)
    assert seen and all(one != usual for one in seen)
    assert gc.get_threshold() == usual
