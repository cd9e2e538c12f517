"""The README's example: a tool, an environment and a verifier of the user's own in under 30 lines."""

import json
import re
from itertools import islice
from pathlib import Path

from upswing.audit import audit
from upswing.envs import AssistantMessage, environment_factory
from upswing.trajectory.types import Outcome, StopReason
from upswing.verify import Episode, Rubric, verifier_from
from upswing.world import World

OWN = Path(__file__).with_name("own_example.py")


def test_it_is_short():
    lines = [line for line in OWN.read_text().splitlines() if line.strip()]
    assert len(lines) < 30


async def play(split="train", off_by=0):
    env = environment_factory(f"{OWN}:Dice", {})()
    task = next(iter(env.tasks(split)))
    opening = await env.reset(task, seed=0)
    assert opening.tools[0]["function"]["parameters"]["required"] == ["numbers"]
    dice = json.loads(re.search(r"\[.*\]", task.messages[0].content).group())
    call = {"name": "total", "arguments": {"numbers": dice}}
    seen = await env.step(AssistantMessage(content=f"<tool_call>{json.dumps(call)}</tool_call>"))
    answer = str(int(seen.messages[0].content) + off_by)
    end = await env.step(AssistantMessage(content=answer))
    return Episode(
        task=task,
        messages=task.messages,
        answer=end.answer,
        gold=task.gold,
        data=task.data,
        tool_records=seen.tool_records,
        state=env.state(),
        outcome=Outcome.COMPLETED,
        stop_reason=end.stop_reason or StopReason.ENV_DONE,
        num_turns=2,
    )


async def test_it_plays_and_scores():
    exact = verifier_from(f"{OWN}:close_enough")
    loose = verifier_from(f"{OWN}:close_enough", {"within": 1})
    assert [(await exact(await play(off_by=off))).value for off in (0, 1)] == [1.0, 0.0]
    assert [(await loose(await play(off_by=off))).value for off in (1, 2)] == [1.0, 0.0]


async def test_it_can_not_be_fooled():
    make = environment_factory(f"{OWN}:Dice", {})
    rubric = Rubric([("close", verifier_from(f"{OWN}:close_enough"), 1.0)])
    report = await audit(World(make_env=make, rubric=rubric, tasks=make().tasks), list(islice(make().tasks("test"), 5)))
    assert report.false_accept == 0 and not report.untested, report.by_attack()
