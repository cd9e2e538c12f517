"""VerlTool's protocol over real HTTP: our client, our server, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from upswing.envs import AssistantMessage, Environment, Observation, ToolEnv
from upswing.envs.tool_server import PATH, RemoteTools, ToolService
from upswing.envs.wordle import Wordle
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.trajectory.types import Message, StopReason, Task
from upswing.verify.deadline import call_env

from .serving import serving, until

TASK = Task(id="t1", messages=(Message(role="user", content="Count."),), gold=("2",), data={"topic": "counting"})
closed: list[str] = []


class Counter(ToolEnv):
    """Keeps a count for each trajectory."""

    max_turns = max_invalid_calls = 10**6

    def __init__(self) -> None:
        self.total, self.label = 0, ""
        super().__init__([self.add, self.say, self.nap, self.bang, self.dead])

    async def reset(self, task: Task, seed: int) -> Observation:
        self.label = f"{task.id} {task.data.get('topic')}"
        return await super().reset(task, seed)

    def is_done(self) -> bool:
        return self.total >= 100

    def close(self) -> None:
        closed.append(self.label)

    def add(self, n: int) -> int:
        """Add to the count."""
        self.total += n
        return self.total

    def say(self) -> str:
        """Say the task's name."""
        return self.label

    async def nap(self, seconds: float) -> str:
        """Sleep."""
        await asyncio.sleep(seconds)
        return "rested"

    def bang(self) -> str:
        """Fail."""
        raise ValueError("bang")

    def dead(self) -> str:
        """Be beyond repair."""
        raise EnvironmentBroken("the disk is gone")


def calls(*named: tuple[str, dict[str, Any]]) -> str:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in named]
    return "\n".join(f"<tool_call>{text}</tool_call>" for text in texts)


def add(n: Any) -> str:
    return calls(("add", {"n": n}))


@pytest.fixture
def url() -> Iterator[str]:
    closed.clear()
    with serving(ToolService(Counter, step_timeout_s=1.0).app()) as port:
        yield f"http://127.0.0.1:{port}"


def post(url: str, ids: list[str], actions: list[str], **more: Any) -> dict[str, Any]:
    response = httpx.post(url + PATH, json={"trajectory_ids": ids, "actions": actions, **more}, timeout=10)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    assert reply.pop("processing_time_ms") >= 0
    return reply


def answers(url: str, ids: list[str], actions: list[str], **more: Any) -> list[tuple[Any, bool, bool]]:
    reply = post(url, ids, actions, **more)
    return list(zip(reply["observations"], reply["dones"], reply["valids"], strict=True))


def alive(url: str) -> int:
    health = httpx.get(url + "/health").json()
    assert health["status"] == "healthy"
    return int(health["trajectories"])


# -- the server -------------------------------------------------------------------------------------------------------


def test_a_batch_is_answered_in_its_order_with_a_state_for_each_trajectory(url: str):
    actions = [add(1), add(5), "Hm. " + add(2) + " and so on", "I am done: 7", add("x"), "<tool_call>{", add(3)]
    assert answers(url, ["a", "b", "a", "c", "d", "e", "a"], actions, extra_fields=[{}] * 7) == [
        ("1", False, True),
        ("5", False, True),
        ("3", False, True),  # the same trajectory's actions one after the other
        ("", True, False),  # a final answer
        ("Invalid call: add: argument 'n': expected a valid integer, unable to parse string as an integer, "
         'got "x". Usage: add(n: integer)', False, False),
        ("Invalid call: a ‹tool_call> is not closed with ‹/tool_call>. Nothing was run.", False, False),
        ("6", False, True),
    ]  # fmt: skip
    two = calls(("bang", {}), ("add", {"n": 4}))
    assert answers(url, ["b"], [two]) == [("Error: ValueError: bang\n9", False, True)]  # no extra_fields at all
    assert answers(url, ["a"], [add(94)]) == [("100", True, True)]


def test_state_is_freed_when_done_finished_and_at_the_last_step(url: str):
    post(url, ["a", "b", "c", "d"], [add(1), add(1), add(100), add(1)], is_last_step=[False, False, False, True])
    assert alive(url) == 2 and sorted(closed) == ["c None", "d None"]
    assert answers(url, ["a", "x"], ["", add(1)], finish=[True, True]) == [("", True, True)] * 2  # as VerlTool sends it
    assert answers(url, ["b"], ["whatever"], extra_fields=[{"finish": True}]) == [("", True, True)]
    assert alive(url) == 0 and sorted(closed)[:2] == ["a None", "b None"]
    assert answers(url, ["a"], [add(1)]) == [("1", False, True)]  # begun anew


def test_idle_trajectories_are_forgotten_and_a_shutdown_closes_the_rest():
    closed.clear()
    with serving(ToolService(Counter, idle_timeout_s=0.4).app()) as port:
        url = f"http://127.0.0.1:{port}"
        post(url, ["a"], [add(1)])
        assert alive(url) == 1
        until(lambda: alive(url) == 0)
        assert closed == ["a None"]
    with serving(ToolService(Counter).app()) as port:
        post(f"http://127.0.0.1:{port}", ["b"], [add(1)])
    until(lambda: closed == ["a None", "b None"])


class SlowToClose(Counter):
    async def close(self) -> None:
        closed.append("begun")
        await asyncio.sleep(0.5)
        closed.append(self.label)


@pytest.mark.parametrize("idle_timeout_s", [0.4, 600.0], ids=["idle", "finish"])
def test_a_server_that_stops_closes_what_was_just_being_closed(idle_timeout_s: float):
    closed.clear()
    with serving(ToolService(SlowToClose, idle_timeout_s=idle_timeout_s).app()) as port:
        url = f"http://127.0.0.1:{port}"
        post(url, ["a"], [add(1)])
        if idle_timeout_s > 1:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + PATH, json={"trajectory_ids": ["a"], "actions": [""], "finish": [True]}, timeout=0.2)
        until(lambda: closed == ["begun"])
    assert closed == ["begun", "a None"]


def test_what_breaks_or_hangs_is_told_and_touches_no_neighbour(url: str):
    ids, actions = ["a", "b", "c"], [calls(("dead", {})), calls(("nap", {"seconds": 60})), add(1)]
    started = time.monotonic()
    broken, hung, fine = answers(url, ids, actions)
    assert time.monotonic() - started < 3
    assert broken == ({"obs": "", "error": "EnvironmentBroken: the disk is gone"}, True, False)
    assert hung[0]["error"] == "EnvironmentBroken: ToolEnv.step took longer than 1 s" and hung[1:] == (True, False)
    assert fine == ("1", False, True) and alive(url) == 1


def test_sixteen_at_once_take_as_long_as_one(url: str):
    started = time.monotonic()
    assert (
        answers(url, [str(i) for i in range(16)], [calls(("nap", {"seconds": 0.5}))] * 16)
        == [("rested", False, True)] * 16
    )
    assert time.monotonic() - started < 2  # 8 s one after the other


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("{", "Invalid JSON"),
        ('{"trajectory_ids": ["a"], "actions": []}', "actions has 0 entries, trajectory_ids 1"),
        ('{"trajectory_ids": ["a"], "actions": ["x"], "finish": []}', "finish has 0 entries"),
        ('{"trajectory_ids": [], "actions": []}', "at least 1 item"),
        ('{"trajectory_ids": ["a"], "actions": [3]}', "valid string"),
        ('{"actions": ["x"]}', "Field required"),
    ],
)
def test_a_wrong_request_is_refused(url: str, body: str, why: str):
    response = httpx.post(url + PATH, content=body)
    assert response.status_code == 422 and why in json.dumps(response.json()["detail"])


def test_a_web_page_cannot_run_the_tools(url: str):
    body = '{"trajectory_ids": ["a"], "actions": ["x"]}'  # a browser sends this without asking, and says who asks
    response = httpx.post(url + PATH, content=body, headers={"Content-Type": "text/plain", "Origin": "https://x.org"})
    assert response.status_code == 403 and alive(url) == 0


def test_any_environment_can_be_served_and_plays_the_task_it_is_given():
    task = next(Wordle().tasks("train", 3))
    here = asyncio.run(play(Wordle(), task))
    with serving(ToolService(Wordle).app()) as port:
        env = RemoteTools(f"http://127.0.0.1:{port}", max_turns=20)
        there = asyncio.run(play(env, task))
    assert there == here and here[-1][0] is StopReason.ENV_DONE


async def play(env: Environment, task: Task) -> list[Any]:
    """What the scripted expert saw, turn by turn, and how it ended."""
    expert = Wordle().expert(task, random.Random(0))
    messages = (await Wordle().reset(task, 0)).messages  # a served environment's own prompt is the dataset's job
    await env.reset(task, 0)
    shown: list[Any] = []
    while True:
        said = expert(messages)
        seen = await env.step(AssistantMessage(content=said))
        if seen.done:
            await call_env(env.close, timeout_s=5)
            return [*shown, (seen.stop_reason, [r.result for r in seen.tool_records])]
        shown.append([m.content for m in seen.messages])
        messages = (*messages, Message(role="assistant", content=said), *seen.messages)


# -- the client -------------------------------------------------------------------------------------------------------


def steps(env: Environment, *texts: str, finished: bool = True) -> list[Observation]:
    async def go() -> list[Observation]:
        await env.reset(TASK, 0)
        try:
            return [await env.step(AssistantMessage(content=text, finished=finished)) for text in texts]
        finally:
            await env.close()

    return asyncio.run(go())


def test_a_trajectory_from_question_to_answer(url: str):
    env = RemoteTools(url, system="Be brief.")
    assert asyncio.run(env.reset(TASK, 0)).messages == (Message(role="system", content="Be brief."), *TASK.messages)
    first, named, wrong, last = steps(env, add(2), calls(("say", {})), add("x"), "<think>so</think> It is 2.")
    assert [m.content for m in first.messages] == ["2"] and first.messages[0].role == "tool"
    (record,) = first.tool_records
    assert (record.result, record.ok, record.turn, record.call.arguments) == ("2", True, 0, {"action": add(2)})
    assert named.messages[0].content == "t1 counting"  # the server plays the task itself
    assert wrong.messages[0].content.startswith("Invalid call: add") and not wrong.tool_records[0].ok
    assert (last.done, last.stop_reason, last.answer) == (True, StopReason.ANSWERED, "It is 2.")
    assert env.state() == {"tool_calls": 3, "invalid_calls": 1}
    assert alive(url) == 0 and "t1 counting" in closed


def test_a_trajectory_left_in_the_middle_is_ended_at_the_server(url: str):
    steps(RemoteTools(url), add(2))
    assert alive(url) == 0 and closed == ["t1 counting"]


def test_how_a_trajectory_ends(url: str):
    assert steps(RemoteTools(url, max_turns=2), add(1), add(1))[-1].stop_reason is StopReason.MAX_TURNS
    assert steps(RemoteTools(url), add(100))[-1].stop_reason is StopReason.ENV_DONE
    assert steps(RemoteTools(url, max_invalid_calls=2), add("x"), add("y"))[-1].stop_reason is StopReason.INVALID_CALLS
    assert steps(RemoteTools(url), add(1), finished=False)[-1].stop_reason is StopReason.MAX_TOKENS
    ends = RemoteTools(url, action_ends=["</tool_call>"])
    assert steps(ends, f"<think>{add(1)}</think><answer>Lima</answer>")[-1].answer == "Lima"  # nothing is sent
    assert ends.state()["tool_calls"] == 0


@contextmanager
def replying(*bodies: Any, status: int = 200, delay_s: float = 0.0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that says these things, one after the other, and what it was asked."""
    left, asked = list(bodies), list[dict[str, Any]]()

    async def reply(request: Request) -> Response:
        asked.append(await request.json())
        await asyncio.sleep(delay_s)
        body = left.pop(0) if left else {"observations": [""], "dones": [True], "valids": [True]}
        return Response(body if isinstance(body, str) else json.dumps(body), status, media_type="application/json")

    with serving(Starlette(routes=[Route("/tools", reply, methods=["POST"])])) as port:
        yield f"http://127.0.0.1:{port}/tools", asked


def said(observation: Any, done: bool, valid: bool) -> dict[str, Any]:
    return {"observations": [observation], "dones": [done], "valids": [valid], "queue_time_ms": 0.1}


def test_requests_are_verltools():
    with replying(said("hi", False, True)) as (url, asked):
        steps(RemoteTools(url, max_turns=2), "one \ud800", "two")
    fields = asked[0].pop("extra_fields")[0]
    assert fields.pop("upswing_task")["id"] == "t1" and fields == {"topic": "counting"}
    trajectory = asked[0].pop("trajectory_ids")
    assert asked[0] == {"actions": ["one ?"], "finish": [False], "is_last_step": [False]}
    assert asked[1:] == [
        {"trajectory_ids": trajectory, "actions": ["two"], "extra_fields": [{"topic": "counting"}], "finish": [False],
         "is_last_step": [True]}
    ]  # fmt: skip  # done at the second: nothing is left to finish


@pytest.mark.parametrize(
    ("reply", "ends", "shown", "stop", "answer"),
    [
        (said("a</tool_call>", False, True), [], "a‹/tool_call>", None, None),
        (said({"obs": "won", "reward": 0.5}, True, True), [], None, StopReason.ENV_DONE, None),
        (said("", True, False), [], None, StopReason.ANSWERED, "A </x>"),  # Search-R1's answer
        (said("", False, False), [], None, StopReason.ANSWERED, "A </x>"),
        (said({"obs": "", "invalid_reason": "No tool"}, False, False), [], None, StopReason.ANSWERED, "A </x>"),
        (said({"obs": "", "invalid_reason": "No tool"}, False, False), ["</x>"], "Invalid call: No tool", None, None),
        (said({"obs": "", "invalid_reason": "No tool"}, True, False), [], None, StopReason.INVALID_CALLS, None),
        (said("No code found", False, False), [], "No code found", None, None),
        (said("", False, True), [], "", None, None),
        ({"observations": ["x"], "dones": [0], "valids": [1]}, [], "x", None, None),
    ],
)  # fmt: skip
def test_what_replies_mean(reply: Any, ends: list[str], shown: str | None, stop: StopReason | None, answer: str | None):
    with replying(reply) as (url, _):
        (seen,) = steps(RemoteTools(url, action_ends=ends), "A </x>")
    assert [m.content for m in seen.messages] == ([] if shown is None else [shown])
    assert (seen.stop_reason, seen.answer, seen.done) == (stop, answer, stop is not None)
    assert seen.reward == (0.5 if "won" in str(reply) else 0.0)


@pytest.mark.parametrize(
    ("reply", "status", "why"),
    [
        ("oh no", 500, "answered 500: oh no"),
        ({"detail": "busy"}, 503, 'answered 503: {"detail": "busy"}'),
        ("<html>", 200, "sent no proper reply (Invalid JSON"),
        ({"observations": ["a", "b"], "dones": [False], "valids": [True]}, 200, "got ['a', 'b']; allowed: at most 1"),
        ({"observations": [], "dones": [], "valids": []}, 200, "observations: got []; allowed: at least 1"),
        ({"observations": ["a"], "dones": [False]}, 200, "valids: Field required"),
        (said(3, False, True), 200, "sent no proper reply (observations.0"),
        (said({"text": "a"}, False, True), 200, "observations.0.obs: Field required"),
        (said({"obs": "a", "reward": "much"}, False, True), 200, "observations.0.reward: got 'much'"),
        (said({"obs": "", "error": "Failed: x"}, True, False), 200, "says that a tool broke: Failed: x"),
        (said({"obs": "", "image": "data:"}, False, True), 200, "only text can be shown"),
    ],
)  # fmt: skip
def test_a_fault_of_the_server_breaks_the_trajectory_and_is_never_an_answer(reply: Any, status: int, why: str):
    with replying(reply, status=status) as (url, asked), pytest.raises(EnvironmentBroken) as caught:
        steps(RemoteTools(url), "act")
    assert why in str(caught.value)
    assert [each["actions"] for each in asked if not each["finish"][0]] == [["act"]]  # never sent again


def test_a_hung_server_breaks_the_trajectory_in_time():
    started = time.monotonic()
    with replying(delay_s=60) as (url, _), pytest.raises(EnvironmentBroken, match=r"took longer than 0\.3 s"):

        async def go() -> None:
            env = RemoteTools(url, timeout_s=0.3)
            await env.reset(TASK, 0)
            await env.step(AssistantMessage(content="act"))

        asyncio.run(go())
    assert time.monotonic() - started < 4


def test_a_server_that_is_back_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    with serving(ToolService(Counter).app()) as port:
        env = RemoteTools(f"http://127.0.0.1:{port}")
    back, stop = threading.Event(), threading.Event()

    def later() -> None:
        time.sleep(0.3)
        with serving(ToolService(Counter).app(), port):
            back.set()
            stop.wait(10)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        assert [m.content for m in steps(env, add(3))[0].messages] == ["3"] and back.is_set()
    finally:
        stop.set()
        thread.join()
    monkeypatch.setattr("upswing.envs.tool_server.RETRY_S", (0.01,))
    with pytest.raises(EnvironmentBroken, match="can't be reached"):
        steps(env, add(3))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": "127.0.0.1:5000"}, "expected something like http://127.0.0.1:5000/get_observation"),
        ({"url": "http://127.0.0.1:9"}, "no tool server at 127.0.0.1:9"),
        ({"max_turns": 0}, "max_turns: got 0; allowed: greater than or equal to 1"),
        ({"timeout_s": float("nan")}, "timeout_s: got nan"),
        ({"action_ends": "</x>"}, "action_ends: got '</x>'; allowed: a list"),
        ({"headers": {"A": "${NOT_SET_ANYWHERE}"}}, "NOT_SET_ANYWHERE is not set"),
        ({"headers": ["A"]}, "headers: got ['A']"),
    ],
)
def test_wrong_options_are_refused(url: str, options: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as caught:
        RemoteTools(**{"url": url, **options})
    assert why in str(caught.value)
