"""Agent programs, run as they are: functions and commands, good and broken, and trained until they are better."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from upswing.engine.base import Sampling
from upswing.engine.scripted import ScriptedEngine
from upswing.envs.lookup import Lookup
from upswing.errors import ConfigError
from upswing.models.tiny import tiny_tokenizer
from upswing.monitor.progress import Progress
from upswing.recipe import load_recipe
from upswing.rollout.agent import make_agent
from upswing.rollout.collect import Rollouts
from upswing.rollout.limits import Limits
from upswing.stages.runner import check, run_recipe
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Outcome, StopReason, Trajectory
from upswing.verify import Rubric
from upswing.verify.qa import strict_match

RECIPES = Path(__file__).parents[2] / "recipes"
TASK = next(task for task in Lookup(alias_frac=0.0).tasks("train"))
KEY, [VALUE] = TASK.data["key"], TASK.gold
SCRIPT = [f"<get>{KEY}</get>", f"<answer>{VALUE}</answer>"]


async def play(script: Any = SCRIPT, *, protocol: str = "tags", **options: Any) -> tuple[Trajectory, Rollouts]:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    end = renderer.end_of_turn_id()
    seconds = {"rollout_timeout_s": 20.0} | {k: options.pop(k) for k in list(options) if k.endswith("_timeout_s")}
    parts = Rollouts(
        make_env=Lookup,
        rubric=Rubric([("strict_match", strict_match, 1.0)]),
        renderer=renderer,
        end_tokens=(end,),
        limits=Limits(turn_tokens=32, context_tokens=400, **seconds),
        engine=ScriptedEngine(script, tokenizer=tokenizer, end_token=end),
        max_retries=0,
        agent=make_agent(protocol=protocol, **{"tools_in": "nowhere", **options}),
    )
    try:
        [group] = await parts.groups([TASK], size=1, sampling=Sampling(), seed=0)
    finally:
        await parts.close()
    return group.trajectories[0], parts


def ask_once(base_url: str, api_key: str) -> str | None:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content


async def in_its_own_loop(task: Any, base_url: str, api_key: str) -> str | None:
    time.sleep(0.05)  # blocks its own loop only
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = [{"role": "user", "content": task.messages[0].content}]
        reply = await client.chat.completions.create(model="policy", messages=messages)
    assert task.gold == (), "a program never sees the gold answers"
    return f"{reply.choices[0].message.content}!"


def gives_up(base_url: str, api_key: str) -> None:
    ask_once(base_url, api_key)


def raises(base_url: str, api_key: str) -> None:
    ask_once(base_url, api_key)
    raise OSError("disk is gone")


def leaves(base_url: str, api_key: str) -> None:
    ask_once(base_url, api_key)
    sys.exit(2)


def returns_a_number(base_url: str, api_key: str) -> int:
    ask_once(base_url, api_key)
    return 7


def ask_with_a_tool(base_url: str, api_key: str) -> str | None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[tool])
    return reply.choices[0].message.content


def never_asks() -> str:
    return "7"


def hangs(base_url: str, api_key: str) -> None:
    ask_once(base_url, api_key)
    time.sleep(3)


def asks_for_ever(base_url: str, api_key: str) -> None:
    while True:
        ask_once(base_url, api_key)


@pytest.mark.parametrize("name", ["openai_agent", "langgraph_agent"])
async def test_both_example_agents_play_a_task_in_exact_tokens(name: str) -> None:
    trajectory, parts = await play(function=f"{RECIPES}/agents/{name}.py:run")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert (trajectory.answer, trajectory.reward, trajectory.num_turns) == (VALUE, 1.0, 2)
    [record] = trajectory.tool_records
    assert (record.call.name, record.call.arguments, record.result) == ("get", {"key": KEY}, VALUE)
    [branch] = trajectory.branches
    end = parts.renderer.end_of_turn_text
    assert parts.renderer.decode(branch.tokens[branch.sampled].tolist()) == "".join(f"{line}{end}" for line in SCRIPT)
    # Token by token what the environment's own loop would have shown and trained on, so that SFT on its expert fits.
    parts.agent = None
    parts.engine.calls.clear()  # type: ignore[attr-defined]
    [group] = await parts.groups([TASK], size=1, sampling=Sampling(), seed=0)
    [own] = group.trajectories[0].branches
    assert own.tokens.tolist() == branch.tokens.tolist() and own.sampled.tolist() == branch.sampled.tolist()


async def test_an_async_program_has_a_loop_of_its_own_and_no_gold() -> None:
    trajectory, _ = await play(["hm"], function=f"{__name__}:in_its_own_loop", protocol="hermes")
    assert (trajectory.answer, trajectory.outcome, trajectory.error) == ("hm!", Outcome.COMPLETED, None)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("gives_up", Outcome.COMPLETED, ""),
        ("raises", Outcome.ERRORED, "OSError: disk is gone"),
        ("leaves", Outcome.ERRORED, "raised SystemExit: 2"),
        ("returns_a_number", Outcome.ERRORED, "returned int; return text or None"),
        ("never_asks", Outcome.ERRORED, "never asked the model"),
    ],
)
async def test_a_broken_function_is_an_error_never_a_zero(name: str, outcome: Outcome, words: str) -> None:
    trajectory, _ = await play(["hm"], function=f"{__name__}:{name}", protocol="hermes")
    assert trajectory.outcome is outcome and words in (trajectory.error or "")
    assert (trajectory.reward is None) is (outcome is Outcome.ERRORED)
    assert trajectory.answer == ("hm" if outcome is Outcome.COMPLETED else None)


@pytest.mark.parametrize(
    ("name", "options", "stop"),
    [
        ("hangs", {"rollout_timeout_s": 0.6}, StopReason.TIMEOUT),
        ("asks_for_ever", {"max_turns": 3}, StopReason.MAX_TURNS),
        ("asks_for_ever", {"rollout_timeout_s": 1.0, "max_turns": 10**6}, StopReason.TIMEOUT),
    ],
)
async def test_limits_end_a_program(name: str, options: dict[str, Any], stop: StopReason) -> None:
    started = time.perf_counter()
    trajectory, _ = await play(lambda *_: "hm", function=f"{__name__}:{name}", protocol="hermes", **options)
    assert (trajectory.stop_reason, trajectory.reward) == (stop, 0.0), trajectory.error
    assert time.perf_counter() - started < 2.5


async def test_a_program_that_hangs_by_itself_is_an_error() -> None:
    seconds = {"rollout_timeout_s": 2.0, "env_timeout_s": 0.2}
    hung, _ = await play(["hm"], function=f"{__name__}:hangs", protocol="hermes", **seconds)
    assert hung.outcome is Outcome.ERRORED and "asked the model nothing" in (hung.error or "")
    seconds, function = {"rollout_timeout_s": 1.2, "env_timeout_s": 1.1}, f"{__name__}:asks_for_ever"
    busy, _ = await play(lambda *_: "hm", function=function, protocol="hermes", max_turns=9**9, **seconds)
    assert (busy.stop_reason, busy.error) == (StopReason.TIMEOUT, None)


ASKING = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
def ask():
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}).encode()
    sent = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sent) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


@pytest.mark.parametrize(
    ("code", "outcome", "answer", "words"),
    [
        ("print('log'); print(ask() + '?'); print()", Outcome.COMPLETED, "hm?", ""),
        ("ask()", Outcome.COMPLETED, "hm", ""),
        ("ask(); print('7'); print('no key', file=sys.stderr); sys.exit(3)", Outcome.ERRORED, None, "3: no key"),
        ("assert 'gold' not in task; ask(); print('x' * 5_000_000); print('end')", Outcome.COMPLETED, "end", ""),
        ("ask(); os.kill(os.getpid(), 9)", Outcome.ERRORED, None, "ended with -9"),
        ("ask(); print('a\\u2028b\\x85c')", Outcome.COMPLETED, "a\u2028b\x85c", ""),
    ],
)
async def test_commands(code: str, outcome: Outcome, answer: str | None, words: str) -> None:
    trajectory, _ = await play(["hm"], command=[sys.executable, "-c", ASKING + code], protocol="hermes")
    assert (trajectory.outcome, trajectory.answer) == (outcome, answer), trajectory.error
    assert words in (trajectory.error or "")


@pytest.mark.parametrize("ends", ["", "time.sleep(60)"])
async def test_nothing_of_a_command_is_left_running(ends: str, tmp_path: Path) -> None:
    note = tmp_path / "child"
    code = f"""
import subprocess, time, pathlib
ask()
child = subprocess.Popen(["sleep", "60"])  # holds stdout open
pathlib.Path({str(note)!r}).write_text(str(child.pid))
{ends}
"""
    started = time.perf_counter()
    command = [sys.executable, "-c", ASKING + code]
    trajectory, _ = await play(["hm"], command=command, protocol="hermes", rollout_timeout_s=3.0)
    assert trajectory.stop_reason is (StopReason.TIMEOUT if ends else StopReason.ANSWERED), trajectory.error
    assert time.perf_counter() - started < 6
    await asyncio.sleep(0.05)
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "its child was ended with it"


async def test_a_daemon_that_holds_the_output_costs_neither_the_answer_nor_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upswing.rollout.agent.LAST_WORDS_S", 0.5)
    code = "import subprocess; ask(); print('7')\nd = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    code += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(d.pid))"
    before = len(os.listdir("/proc/self/fd"))
    try:
        trajectory, _ = await play(["hm"], command=[sys.executable, "-c", ASKING + code], protocol="hermes")
        assert (trajectory.outcome, trajectory.answer) == (Outcome.COMPLETED, "7"), trajectory.error
        for _ in range(100):  # a busy machine closes it a little later
            if (left := len(os.listdir("/proc/self/fd"))) <= before:
                break
            await asyncio.sleep(0.05)
        assert left <= before
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


async def test_a_proxy_to_the_internet_does_not_get_what_is_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.2:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    trajectory, _ = await play(["hm"], function=f"{__name__}:ask_once", protocol="hermes")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("agent.command=[python]", "both of function and command"),
        ("agent.tools_in=template", "no chat template explains protocol tags"),
        ("agent.function=agents/openai_agnt.py:run", "did you mean"),
        ("agent.function=agents/openai_agent.py:solve", "asks for 'client'"),
        ("agent.protocol=xml", "agent.protocol"),
        (
            "agent={function: agents/openai_agent.py:run, tools_in: template}",
            r"agent\.tools_in: got 'template', but the chat template.* doesn't show tools; allowed: system, nowhere",
        ),
        ("stages.1={stage: reward_model, labels: process}", "labels: got 'process'"),
    ],
)
def test_what_cannot_work_is_said_before_a_model_loads(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(load_recipe(RECIPES / "agent_openai.yaml", [change]))


async def test_tools_that_the_policy_would_not_see_are_refused_before_the_program_runs() -> None:
    with pytest.raises(ConfigError, match=r"agent\.tools_in: got 'template'"):
        await play(protocol="hermes", function=f"{__name__}:never_asks", tools_in="template")


async def test_left_out_tools_are_told_where_the_template_can_or_else_in_the_system_message() -> None:
    """The tiny template shows no tools; a program without any needs no `tools_in`."""
    plain, _ = await play(["hm"], protocol="hermes", function=f"{__name__}:ask_once", tools_in=None)
    assert plain.outcome is Outcome.COMPLETED, plain.error
    told, _ = await play(["hm"], protocol="hermes", function=f"{__name__}:ask_with_a_tool", tools_in=None)
    [branch] = told.branches
    assert "weather" in tiny_tokenizer().decode(branch.tokens.tolist()), "the model reads of it"


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no program 'no-such-agent'"):
        make_agent(command=["no-such-agent"])


def test_an_unchanged_agent_gets_better(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run_recipe(
        load_recipe(RECIPES / "agent_openai.yaml", ["rl.steps=5", "test.tasks=64"]), out, log=Progress(quiet=True)
    )
    before, after = (one["summary"]["components"]["strict_match"]["mean"] for one in result.results)
    assert after > before + 0.05, (before, after)  # it gains 0.3; the threads ask in another order each time
    stored = [one.trajectory for one in TrajectoryStore(out / "trajectories").read(stage="rl")]
    assert len(stored) == 5 * 64 and not [one.error for one in stored if one.error]
    assert {len(one.branches) for one in stored} == {1}
    assert json.loads((out / "results.json").read_text()) and os.path.getsize(out / "report.html")
