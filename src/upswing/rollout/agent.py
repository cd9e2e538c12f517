"""Plays tasks with an agent program: it runs as it is, its model calls come to the training proxy -> Trajectory.

The program is a Python function or a command. Its environment, its tools and its loop are its own; what reaches the
policy, and only that, is trained on. What the program answers at the end is the trajectory's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from upswing.engine.base import Engine, Sampling
from upswing.envs.parsing import storable
from upswing.errors import ConfigError, EnvironmentBroken, did_you_mean
from upswing.plugins import load_object
from upswing.rollout.limits import Limits
from upswing.rollout.sessions import Session, tools_place
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import StopReason, Task, Trajectory
from upswing.trajectory.validate import STOP_REASONS, validate
from upswing.verify.deadline import call_env, to_its_end

if TYPE_CHECKING:
    from upswing.rollout.proxy import Proxy

PARAMETERS = ("task", "base_url", "api_key", "model")
MODEL = "policy"
MAX_OUTPUT = 1 << 20
"""Bytes kept of the end of what a command prints."""
LAST_WORDS_S = 5.0
"""What a command printed is read for so long after its end, when a daemon that it left holds its output open."""


class Program(Protocol):
    async def run(self, task: Task, base_url: str, api_key: str, timeout_s: float) -> Any:
        """The answer, or None. Whatever it raises is what broke."""
        ...


class FunctionProgram:
    """`def run(task, base_url, api_key) -> str | None`, plain or async, in a thread of its own."""

    def __init__(self, spec: str) -> None:
        """Raises ConfigError when it isn't there or asks for what there isn't."""
        self._function: Callable[..., Any] = load_object(spec, "agent", {})
        if not callable(self._function):
            raise ConfigError(f"agent '{spec}' must be a function, got {type(self._function).__name__}")
        parameters = inspect.signature(self._function).parameters.values()
        self._takes = [p.name for p in parameters if p.name in PARAMETERS]
        for p in parameters:
            required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            if p.name not in PARAMETERS and required:
                raise ConfigError(
                    f"agent '{spec}' asks for '{p.name}'{did_you_mean(p.name, PARAMETERS)} "
                    f"(allowed: {', '.join(PARAMETERS)})"
                )

    async def run(self, task: Task, base_url: str, api_key: str, timeout_s: float) -> Any:
        given = {"task": task, "base_url": base_url, "api_key": api_key, "model": MODEL}

        def agent() -> Any:
            # An async program has an event loop of its own: one that blocks must not hold up all the others.
            result = self._function(**{name: given[name] for name in self._takes})
            return asyncio.run(result) if inspect.iscoroutine(result) else result

        return await call_env(agent, timeout_s=timeout_s)


class CommandProgram:
    """A command: the task as JSON on stdin, the proxy in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL; the last
    line that isn't blank on stdout is the answer. Its process group is gone afterwards."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises ConfigError when there is no such program."""
        if shutil.which(command[0]) is None:
            raise ConfigError(f"agent.command: no program '{command[0]}'; give a path, or put it on PATH")
        self._command = tuple(command)

    async def run(self, task: Task, base_url: str, api_key: str, timeout_s: float) -> str | None:
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, env={**os.environ, **own}
        )
        assert process.stdin and process.stdout and process.stderr
        said, complained = bytearray(), bytearray()
        readers = [_keep_end(process.stdout, said), _keep_end(process.stderr, complained)]
        ends = [asyncio.ensure_future(each) for each in (process.wait(), *readers)]
        try:
            process.stdin.write(task_json(task).encode())
            process.stdin.close()
            while process.returncode is None:  # `wait` would also wait for children that hold its output open
                await asyncio.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait(ends, timeout=LAST_WORDS_S)
            for end in ends:
                end.cancel()
            process._transport.close()  # type: ignore[attr-defined]  # else a daemon would keep our ends open too
        if process.returncode:
            raise EnvironmentBroken(f"the agent program ended with {process.returncode}: {_last(complained) or '?'}")
        return _last(said)


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while chunk := await stream.read(1 << 16):
        kept += chunk
        del kept[:-MAX_OUTPUT]


def _last(output: bytearray) -> str | None:
    """The last line that isn't blank. Only a line feed ends one: an answer may hold what Unicode calls line ends."""
    lines = output.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def task_json(task: Task) -> str:
    """What a command reads: `id`, `messages`, `data`, `tags`, `split`."""
    messages = [{"role": message.role, "content": message.content} for message in task.messages]
    fields = {"id": task.id, "messages": messages, "data": task.data, "tags": task.tags, "split": task.split}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def make_agent(
    *,
    function: str | None = None,
    command: Sequence[str] | None = None,
    protocol: str = "hermes",
    tools_in: str | None = None,
    max_turns: int = 50,
) -> Agent:
    """An agent of a recipe's `agent` section. Raises ConfigError for what can't work."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("agent needs starlette and uvicorn; install with: pip install 'upswing[serve]'")
    from upswing.rollout.proxy import Proxy

    for name in ("NO_PROXY", "no_proxy"):  # a proxy to the internet must not get what is for this one
        others = os.environ.get(name, "")
        if "127.0.0.1" not in others:
            os.environ[name] = f"{others},127.0.0.1".lstrip(",")
    assert (function is None) != (command is None), "the recipe has exactly one"
    program: Program = FunctionProgram(function) if function is not None else CommandProgram(command or ())
    return Agent(program=program, protocol=protocol, tools_in=tools_in, max_turns=max_turns, proxy=Proxy())


@dataclass(kw_only=True)
class Agent:
    """An agent program, and the proxy that its trajectories share."""

    program: Program
    proxy: Proxy
    protocol: str
    """How the policy writes calls (see `envs.parsers`)."""
    tools_in: str | None
    """See `sessions.tools_place`."""
    max_turns: int

    async def play(
        self,
        task: Task,
        *,
        trajectory_id: str,
        engine: Engine,
        sampling: Sampling,
        renderer: ChatRenderer,
        end_tokens: tuple[int, ...],
        limits: Limits,
        seed: int,
    ) -> Trajectory:
        """Let the program play one task -> an unscored, validated Trajectory; a broken program never raises.

        The program doesn't see the task's gold answers. Raises ConfigError when the chat template would drop its tools.
        """
        tools_in = tools_place(renderer, self.tools_in, self.protocol, "agent.tools_in")
        session = Session(
            name=trajectory_id,
            engine=engine,
            sampling=sampling,
            renderer=renderer,
            end_tokens=end_tokens,
            limits=limits,
            seed=seed,
            protocol=self.protocol,
            tools_in=tools_in,
            max_turns=self.max_turns,
        )
        started, answer, problem = time.perf_counter(), None, None
        base_url, api_key = self.proxy.open(session)
        deadline = asyncio.timeout(limits.rollout_timeout_s)
        try:
            async with deadline:
                given = replace(task, gold=())
                answer = await self.program.run(given, base_url, api_key, limits.rollout_timeout_s + 60)
            if not isinstance(answer, str | None):
                raise EnvironmentBroken(f"the agent program returned {type(answer).__name__}; return text or None")
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            self.proxy.drop(api_key)
            await to_its_end(session.close())
        reason, words = _ending(session, problem, deadline.expired())
        trajectory = _trajectory(session, task, reason, words, answer, time.perf_counter() - started)
        validate(trajectory)
        return trajectory


def _ending(session: Session, problem: str | None, expired: bool) -> tuple[StopReason, str | None]:
    """(why it ended, what broke). A program that raises because it ran into a limit was truncated by that limit."""
    if session.fault is not None:
        return StopReason.ERROR, session.fault
    if not session.turns:
        refused = session.refusal[1] if session.refusal else None
        return StopReason.ERROR, refused or problem or "the agent program never asked the model that base_url serves"
    if session.refusal is not None:
        return session.refusal[0], None
    if expired and session.idle_s > session.limits.env_timeout_s:
        return StopReason.ERROR, f"the agent program hung: it has asked the model nothing for {session.idle_s:.0f} s"
    if expired:
        return StopReason.TIMEOUT, None
    if problem is not None:
        return StopReason.ERROR, problem
    return (StopReason.MAX_TOKENS if session.turns[-1].cut else StopReason.ANSWERED), None


def _trajectory(
    session: Session, task: Task, reason: StopReason, error: str | None, answer: Any, total_s: float
) -> Trajectory:
    branches, drift = session.branches()
    last = session.turns[-1] if session.turns else None
    if answer is None and last is not None and last.finish_reason == "stop" and reason is StopReason.ANSWERED:
        answer = last.reply.content
    counts = ("abandoned_requests", "invalid_calls")
    return Trajectory(
        id=session.name,
        task=task,
        branches=branches,
        messages=session.messages or task.messages,
        outcome=next(outcome for outcome, reasons in STOP_REASONS.items() if reason in reasons),
        stop_reason=reason,
        answer=storable(answer) if isinstance(answer, str) and error is None else None,
        tool_records=tuple(session.records),
        num_turns=len(session.turns),
        error=error,
        state={
            "env_reward": 0.0,
            "turn_rewards": [0.0] * len(session.turns),
            "tool_calls": len(session.records),
            "tool_errors": sum(not record.ok for record in session.records),
            **{name: session.counts[name] for name in counts},
            "ignored_parameters": sorted(session.ignored),
        },
        drift=drift,
        seed=session.seed,
        timing={"engine_s": session.engine_s, "env_s": max(0.0, total_s - session.engine_s), "total_s": total_s},
    )
