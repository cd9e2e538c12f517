"""Servers that only know text: what is refused, how conversations are told, and what is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.engine.servers import served_recipe, serving

from upswing.engine import http
from upswing.engine.base import Sampling
from upswing.engine.openai import OpenAIEngine
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.tool_env import ToolEnv
from upswing.errors import ConfigError, InvalidTrajectory
from upswing.models.load import load_model
from upswing.monitor.progress import Progress
from upswing.recipe import recipe_from
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.stages.rows import make_batch
from upswing.stages.runner import run_recipe
from upswing.stages.servers import server_of
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Group, Message, Outcome, Score, StopReason, Task, Trajectory
from upswing.trajectory.validate import validate

URL, KEY = "http://127.0.0.1:1/v1", "a-key"


class Server:
    """Plays `script`: message, or (message, finish reason). Says who asked for what in `seen`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.script: list[Any] = []
        self.seen: list[dict[str, Any]] = []
        self.strict = self.ids = False
        self.modern = False
        self.temperatures: list[float] = []
        """The only ones that it takes; empty: all."""

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "no key"}, status_code=401)
        refused = (self.strict and "return_token_ids" in body) or (self.modern and "max_tokens" in body)
        if self.temperatures and body.get("temperature", 1.0) not in self.temperatures:
            return JSONResponse({"error": "temperature does not support this value"}, status_code=400)
        if refused or body["model"] != "wise":
            return JSONResponse({"error": "not known"}, status_code=400)
        said = self.script.pop(0) if self.script else {"role": "assistant", "content": "4"}
        if isinstance(said, int):
            return JSONResponse(
                {"error": "down"}, status_code=said, headers={"Retry-After": "1"} if said == 429 else {}
            )
        if said == "hang":
            await asyncio.sleep(30)
        self.seen.append(body)
        message, reason = said if isinstance(said, tuple) else (said, "stop")
        choice = {"message": message, "finish_reason": reason, **({"token_ids": [1]} if self.ids else {})}
        return JSONResponse({"choices": [choice], "usage": {"completion_tokens": 3}})

    def app(self) -> Starlette:
        models = JSONResponse({"data": [{"id": "wise"}, {"id": "quick"}]})
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", lambda request: models),
            ]
        )


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serving(server) as url:
        yield server, f"{url}/v1"


@pytest.fixture
def server(address: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(http, "BACKOFF_S", 0.001)
    monkeypatch.setenv("WISE_KEY", KEY)
    address[0].reset()
    return address[0]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "stages.0.stage: got 'rl', but engine.kind openai can only evaluate .* use kind vllm, sglang or torch"),
        ({"engine": {"kind": "openai", "url": URL}}, "engine.model: got nothing, but kind openai needs it"),
        ({"engine": {"kind": "openai", "model": "wise"}}, "engine.url: got nothing"),
        (
            {"engine": {"kind": "sglang", "url": URL, "model": "m"}},
            "engine.model: .*with kind sglang it is for kind openai",
        ),
        ({"engine": {"api_key_env": "K"}}, "engine.api_key_env: .*for kind vllm or sglang or openai"),
        (
            {"agent": "tests.engine.test_openai:served_recipe", "stages": [{"stage": "eval", "of": ["base"]}]},
            "agent: got a program, but engine.kind openai has no tokens",
        ),
    ],
)
def test_the_recipe_alone_tells(changes: dict[str, Any], message: str) -> None:
    data = served_recipe({"kind": "openai", "url": URL, "model": "wise"})
    with pytest.raises(ConfigError, match=message):
        recipe_from({**data, **changes})


@pytest.mark.parametrize(
    ("model", "key", "message"),
    [
        ("wisse", KEY, r"status 400.*models there: wise, quick; did you mean 'wise'\?"),
        ("wise", None, "status 401.*engine.api_key_env"),
    ],
)
def test_a_server_that_does_not_answer(
    address: tuple[Server, str], server: Server, model: str, key: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIEngine.connect(address[1], model=model, api_key=key)


def test_how_it_is_asked_is_found_out(address: tuple[Server, str], server: Server) -> None:
    def found() -> OpenAIEngine:
        return OpenAIEngine.connect(address[1], model="wise", api_key=KEY)

    server.ids = True
    assert found().capabilities.token_out, "by asking, not by name"
    server.ids, server.strict = False, True
    assert not found().capabilities.token_out
    server.modern = True
    assert found() and "max_completion_tokens" in server.seen[-1]
    assert set(OpenAIEngine.best.missing()) == {"token_in", "token_out", "exact_logprobs", "weight_updates", "versions"}


@pytest.mark.parametrize(("greedy", "refused"), [(True, True), (False, False)])
def test_a_temperature_that_the_model_refuses_is_found_out_before_anything_is_played(
    address: tuple[Server, str], server: Server, greedy: bool, refused: bool
) -> None:
    server.temperatures, server.modern = [1.0], True
    engine = {"kind": "openai", "url": address[1], "model": "wise", "api_key_env": "WISE_KEY", "outage_s": 7.0}
    one = recipe_from(served_recipe(engine, stage="eval", of=["base"], tasks=1, split="train", greedy=greedy))
    said = r"refuses temperature 0 .*greedy: false \(upswing eval: --sampled\)"
    with pytest.raises(ConfigError, match=said) if refused else nullcontext():
        assert server_of(one, Progress(quiet=True)).server.outage_s == 7.0


async def test_it_is_asked_again_when_it_says(address: tuple[Server, str], server: Server) -> None:
    began = time.monotonic()
    found = await played(address, [429, {"content": "5"}], server)
    assert found.reward == 1.0 and time.monotonic() - began > 1


def test_a_key_that_is_not_there(server: Server, address: tuple[Server, str], tmp_path: Path) -> None:
    engine = {"kind": "openai", "url": address[1], "model": "wise", "api_key_env": "NO_SUCH"}
    one = recipe_from(served_recipe(engine, stage="eval", of=["base"], tasks=1, split="train"))
    with pytest.raises(ConfigError, match=r"engine\.api_key_env: no 'NO_SUCH' in the environment"):
        run_recipe(one, tmp_path / "run", log=Progress(quiet=True))


# -- how it plays -----------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Right:
    async def score(self, episode: Any) -> Score:
        return Score(value=float(episode.answer == "5"))


def rollouts_of(engine: Any, *, limits: Limits | None = None, **env: Any) -> Rollouts:
    loaded = load_model("tiny")
    return Rollouts(
        make_env=lambda: ToolEnv([add], **env),
        rubric=Right(),
        renderer=ChatRenderer(loaded.tokenizer),
        end_tokens=loaded.stop_tokens,
        limits=limits or Limits(turn_tokens=64, context_tokens=1500),
        engine=engine,
        max_retries=0,
    )


TASK = Task(id="t", messages=(Message(role="user", content="2 and 3?"),))


async def played(
    address: tuple[Server, str], script: list[Any], server: Server, *, outage_s: float = 900.0, **options: Any
) -> Trajectory:
    engine = OpenAIEngine(address[1], model="wise", api_key=KEY, outage_s=outage_s)
    server.script = script
    (found,) = await rollouts_of(engine, **options).singles([TASK], sampling=Sampling(temperature=0.7), seed=1)
    await engine.close()
    return found


def calls(*arguments: str) -> tuple[dict[str, Any], str]:
    asked = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": each}}
        for n, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": asked}, "tool_calls"


async def test_calls_and_results_are_told_in_the_servers_own_words(address: tuple[Server, str], server: Server) -> None:
    found = await played(address, [calls('{"a": 2, "b": 3}', "{no"), {"content": "5"}], server)
    assert found.outcome is Outcome.COMPLETED and found.answer == "5" and found.reward == 1.0
    assert [record.ok for record in found.tool_records] == [True, False], "bad arguments are the agent's mistake"
    assert [tool["function"]["name"] for tool in server.seen[0]["tools"]] == ["add"]
    told = server.seen[1]["messages"]
    assert [one["role"] for one in told] == ["user", "assistant", "tool", "tool"]
    assert [one["tool_call_id"] for one in told[2:]] == ["c0", "c1"] and told[2]["content"] == "5"
    assert server.seen[0]["temperature"] == 0.7
    assert "<tool_call>" in found.messages[1].content, "the trajectory has the environment's format"


async def test_calls_that_the_prompt_explains_are_text_on_both_sides(
    address: tuple[Server, str], server: Server
) -> None:
    said = [{"content": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 4}}</tool_call>'}, {"content": "5"}]
    found = await played(address, said, server, tools_in_system=True)
    assert found.reward == 1.0 and "tools" not in server.seen[0]
    assert [one["role"] for one in server.seen[1]["messages"]] == ["system", "user", "assistant", "user"]


async def test_what_it_says_is_marked_and_never_learned_from(address: tuple[Server, str], server: Server) -> None:
    found = await played(address, [{"content": "5"}], server)
    validate(found)
    (branch,) = found.branches
    assert found.source == "text" and branch.sampled.any() and (branch.policy_version == -1).all()
    with pytest.raises(InvalidTrajectory, match="is text of a server"):
        make_batch([Group(task=TASK, trajectories=(found,))], truncated="as_is")


@pytest.mark.parametrize(
    ("script", "reason", "error"),
    [
        ([503, {"content": "5"}], StopReason.ANSWERED, None),
        ([500] * 999, StopReason.ERROR, "failed for 0.3 s; the last: /chat/completions: status 500"),
        ([400], StopReason.ERROR, "refused /chat/completions: status 400"),
        ([({"content": "5"}, "content_filter")], StopReason.ERROR, "no whole turn"),
        ([({"content": ""}, "stop")], StopReason.ERROR, "said nothing"),
        ([({}, "stop")], StopReason.ERROR, "said nothing"),
        ([({"content": "5 and"}, "length")], StopReason.MAX_TOKENS, None),
        (["hang"], StopReason.ERROR, "longer than 0.2 s"),
    ],
)
async def test_faults_are_named_and_never_an_answer(
    address: tuple[Server, str],
    server: Server,
    script: list[Any],
    reason: StopReason,
    error: str | None,
) -> None:
    limits = Limits(turn_tokens=64, context_tokens=1500, turn_timeout_s=0.2 if script == ["hang"] else 60.0)
    found = await played(address, script, server, limits=limits, outage_s=0.3)
    assert found.stop_reason is reason and (error or "") in (found.error or "")
    assert found.score is None or reason is not StopReason.ERROR


@pytest.mark.parametrize(
    ("turn_timeout_s", "words"),
    [
        (60.0, "is well, but failed 4 times at one request; the last: /chat/completions: status 500"),
        (2.0, "sampling a turn took longer than 2 s (/chat/completions: status 500"),
    ],
)
async def test_a_server_that_fails_at_one_request_is_not_waited_for_as_for_an_outage(
    address: tuple[Server, str], server: Server, turn_timeout_s: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.01 if turn_timeout_s > 2 else 5.0)
    monkeypatch.setattr(http, "WARN_S", 0.0)
    limits = Limits(turn_tokens=64, context_tokens=1500, turn_timeout_s=turn_timeout_s)
    found = await played(address, [500] * 999, server, limits=limits)
    assert found.stop_reason is StopReason.ERROR and words in (found.error or "")


def test_a_recipe_evaluates_and_keeps_what_was_said(
    address: tuple[Server, str], server: Server, tmp_path: Path
) -> None:
    engine = {"kind": "openai", "url": address[1], "model": "wise", "api_key_env": "WISE_KEY"}
    one = recipe_from(served_recipe(engine, stage="eval", of=["base"], tasks=2, split="train"))
    result = run_recipe(one, tmp_path / "run", log=Progress(quiet=True))
    assert len(result.results) == 1
    stored = [s.trajectory for s in TrajectoryStore(tmp_path / "run/trajectories").read("eval")]
    assert len(stored) == 2 and {t.source for t in stored} == {"text"}
    assert KEY not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.yaml")), "the key is kept nowhere"


# -- the group's deadline ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", [None, 0.25])
async def test_late_trajectories_are_cancelled_and_the_group_shrinks(deadline: float | None) -> None:
    class Slow(ScriptedEngine):
        async def generate(self, prompt: Any, sampling: Any, *, session: str | None = None) -> Any:
            if session and session.endswith("0-1"):
                await asyncio.sleep(0.6)
            return await super().generate(prompt, sampling, session=session)

    loaded = load_model("tiny")
    engine = Slow(["5"], tokenizer=loaded.tokenizer, end_token=loaded.stop_tokens[0])
    rollouts = rollouts_of(engine, limits=Limits(context_tokens=1500, group_timeout_s=deadline))
    ended: list[Trajectory] = []
    (group,) = await rollouts.groups([TASK], size=3, sampling=Sampling(), seed=1, on_done=ended.append)
    late = [t for t in group.trajectories if t.outcome is Outcome.CANCELLED]
    assert len(group.trajectories) == len(ended) == 3
    assert [t.id for t in late] == ([] if deadline is None else ["t/1/0-1"])
    assert all(t.reward is None and t.score is None for t in late), "late is never 0"
    assert [t.reward for t in group.trajectories if t not in late] == [1.0] * (3 - len(late))
    assert sorted(engine.released) == ["t/1/0-0", "t/1/0-1", "t/1/0-2"], "its cache and its environment are closed"
    batch = make_batch([group], truncated="as_is")
    assert len(batch.rows) == 3 - len(late)
    for t in group.trajectories:
        validate(t)


def test_deadlines_that_do_not_nest_are_refused() -> None:
    data = served_recipe({})
    data["limits"] = {**data["limits"], "group_timeout_s": 600.0}
    with pytest.raises(ConfigError, match=r"limits.group_timeout_s: got 600; allowed: rollout_timeout_s \+ scoring"):
        recipe_from(data)
