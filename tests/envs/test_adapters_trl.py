"""TRL's reward functions and environments: called as TRL calls them, they say the same."""

import asyncio
import math

import pytest

from upswing.envs import AssistantMessage, environment_factory
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.trajectory.types import Message, Outcome, StopReason, Task, ToolCall, ToolRecord
from upswing.verify import Episode, verifier_from

OWN = '''
import asyncio


def text_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def right(prompts, completions, solution, **kwargs):
    """TRL's documentation's shape: conversational completions and a column."""
    said = [completion[-1]["content"] for completion in completions]
    kwargs["log_metric"]("shouting", sum(text.isupper() for text in said) / len(said))
    return [1.0 if text == gold else 0.0 for text, gold in zip(said, solution)]


def only_hard(completions, level, **kwargs):
    return [0.5 if one == "hard" else None for one in level]


async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [len(completion) / 10 for completion in completions]


def tool_uses(completions, **kwargs):
    return [float(sum(len(m.get("tool_calls") or []) for m in c if m["role"] == "assistant")) for c in completions]


def array(completions, **kwargs):
    import numpy

    return numpy.array([len(completion) for completion in completions], numpy.float32)


def batch(completions, **kwargs):
    return [1.0] * (len(completions) + 1)


def breaks(completions, **kwargs):
    raise ValueError("boom")


def by_tokens(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_state(environments, **kwargs):
    return [float(environment.total) for environment in environments]


class Adder:
    """TRL's documentation's shape of an environment."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.total = None

    def reset(self, start, **kwargs) -> str | None:
        self.total = start
        return f" The counter is {start}."

    def add(self, number: int) -> int:
        """Add to the counter.

        Args:
            number: What to add.
        """
        if number == 13:
            raise ValueError("unlucky")
        self.total += number
        return self.total

    def _hidden(self):
        return None


class Scored(Adder):
    def get_reward(self) -> float:
        return self.total / 100


class Judged(Scored):
    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.75


class Silly(Adder):
    def reset(self, **kwargs):
        return ["a picture"]


class NoReset:
    def add(self, number: int) -> int:
        """Add."""
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_trl.py"
    path.write_text(OWN)
    return path


def episode(said, gold="7", records=(), **data):
    prompt = Message(role="user", content="How many?")
    messages = (prompt, *(m if isinstance(m, Message) else Message(role="assistant", content=m) for m in said))
    task = Task(id="t", messages=(prompt,), gold=(gold,), data=data)
    return Episode(
        task=task, messages=messages, answer=messages[-1].content, gold=task.gold, data=data, tool_records=records,
        state={}, outcome=Outcome.COMPLETED, stop_reason=StopReason.ANSWERED,
        num_turns=sum(m.role == "assistant" for m in messages),
    )  # fmt: skip


def verifier(own, function, **args):
    path = [f"{own}:{one}" for one in function] if isinstance(function, list) else f"{own}:{function}"
    return verifier_from("upswing.envs.adapters.trl:Reward", {"function": path, **args})


def as_trl_calls(own, name, completions, **columns):
    """GRPOTrainer._calculate_rewards: the whole batch in lists, None as NaN."""
    from upswing.plugins import load_object

    function, count = load_object(f"{own}:{name}", "function", {}), len(completions)
    prompts = [[{"role": "user", "content": "How many?"}]] * count
    logs = {"log_metric": lambda *_: None, "log_extra": lambda *_: None, "trainer_state": None}
    found = function(prompts=prompts, completions=completions, completion_ids=[[0]] * count, **columns, **logs)
    found = asyncio.run(found) if asyncio.iscoroutine(found) else found
    return [math.nan if value is None else value for value in found]


@pytest.mark.parametrize("name", ["right", "only_hard", "slow", "tool_uses", "array"])
def test_one_by_one_they_say_what_trl_s_batch_says(own, name):
    said, levels = ["7", "8", "SEVEN"], ["easy", "hard", "hard"]
    batch = [[{"role": "assistant", "content": text}] for text in said]
    expected = as_trl_calls(own, name, batch, solution=["7"] * 3, level=levels)
    judge = verifier(own, name, gold="solution")
    scores = [asyncio.run(judge(episode([text], level=level))).value for text, level in zip(said, levels, strict=True)]
    assert [math.nan if value is None else value for value in scores] == pytest.approx(expected, nan_ok=True)


def test_standard_format_is_plain_text(own):
    assert asyncio.run(verifier(own, "text_length", format="standard")(episode(["four"]))).value == 4.0
    assert asyncio.run(verifier(own, "text_length")(episode(["four"]))).value == 1.0  # a list of one message


async def test_several_functions_add_up_and_none_is_left_out(own):
    judge = verifier(own, ["right", "only_hard"], weights=[2, 4], gold="solution")
    hard, easy = await judge(episode(["7"], level="hard")), await judge(episode(["7"], level="easy"))
    assert (hard.value, easy.value) == (4.0, 2.0)
    assert hard.components == {"right": 1.0, "only_hard": 0.5, "shouting": 0.0}
    assert easy.components["only_hard"] is None
    nobody = await verifier(own, "only_hard")(episode(["7"], level="easy"))
    assert nobody.value is None and "no function" in nobody.reason


async def test_tool_calls_are_in_the_completion(own):
    call = ToolCall(name="get", arguments={"key": "a"}, id="1")
    said = ["<get>a</get>", Message(role="tool", content="5", name="get"), "5"]
    found = await verifier(own, "tool_uses")(
        episode(said, records=(ToolRecord(call=call, result="5", ok=True, turn=0),))
    )
    assert found.value == 1.0


@pytest.mark.parametrize(
    ("name", "words"), [("breaks", "ValueError: boom"), ("batch", "one reward"), ("right", "solution")]
)
async def test_what_goes_wrong_is_unscored_with_its_reason(own, name, words):
    found = await verifier(own, name)(episode(["7"]))
    assert found.value is None and words in found.reason


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("by_tokens", {}, "completion_ids"),
        ("rigt", {}, "did you mean 'right'"),
        ("right", {"format": "chat"}, "conversational, standard"),
        ("right", {"weights": [1, 2]}, "weights"),
        ("right", {"weights": [math.inf]}, "finite"),
        ("right", {"wieghts": [1]}, "did you mean 'weights'"),
    ],
)
def test_what_can_not_work_is_said_at_once(own, name, args, words):
    with pytest.raises(ConfigError, match=words):
        verifier(own, name, **args)


def environment(own, factory, **args):
    return environment_factory("trl", {"factory": f"{own}:{factory}", "protocol": "python", **args})()


TASK = Task(id="t", messages=(Message(role="user", content="Reach 42."),), data={"start": 40}, gold=("42",))


async def played(env, *said):
    seen = [await env.reset(TASK, 0)]
    for text in said:
        seen.append(await env.step(AssistantMessage(content=text)))
    return seen


async def test_an_environment_plays_and_owns_its_reward(own):
    env = environment(own, "Scored")
    opening, heard, end = await played(env, "add(number=2)", "Done.")
    assert opening.messages[-1].content == "Reach 42. The counter is 40."
    assert "add(number: integer)" in opening.messages[0].content and "hidden" not in opening.messages[0].content
    assert heard.messages[0].content == "42" and not heard.done and heard.reward == 0.0
    assert end.stop_reason is StopReason.ANSWERED and end.reward == 0.42
    assert env.state()["rewards"] == {"Scored": 0.42} and env.state()["scored"]


async def test_reward_functions_read_the_environment(own):
    env = environment(own, "Scored", rewards=[f"{own}:by_state", f"{own}:tool_uses"], weights=[0.5, 10])
    end = (await played(env, "add(number=1)", "add(number=x)", "Done."))[-1]
    assert end.reward == pytest.approx(0.5 * 41 + 10 * 1 + 0.41)  # the call that can't be read is none
    assert env.state()["rewards"] == {"by_state": 41.0, "tool_uses": 1.0, "Scored": 0.41}
    assert (await played(environment(own, "Judged"), "Done."))[-1].reward == 0.75


async def test_a_cut_is_scored_and_an_unfinished_episode_is_not(own):
    env = environment(own, "Scored", max_turns=2)
    end = (await played(env, "add(number=1)", "add(number=13)"))[-1]
    assert end.stop_reason is StopReason.MAX_TURNS and end.reward == 0.41
    assert "unlucky" in end.tool_records[0].result
    env = environment(own, "Scored")
    await played(env, "add(number=1)")
    assert env.state()["scored"] is False  # env_reward then has no score, which is never 0
    await env.reset(TASK, 0)
    cut = await env.step(AssistantMessage(content="add(", finished=False))
    assert cut.stop_reason is StopReason.MAX_TOKENS and cut.reward == 0.4


async def test_what_breaks_is_no_zero(own):
    with pytest.raises(ValueError, match="boom"):
        await played(environment(own, "Adder", rewards=[f"{own}:breaks"]), "Done.")
    with pytest.raises(EnvironmentBroken, match="list"):
        await played(environment(own, "Silly", rewards=[f"{own}:by_state"]))


async def test_an_environment_is_made_once_and_reset_often(own):
    make = environment_factory("trl", {"factory": f"{own}:Scored", "protocol": "python"})
    first = make()
    await played(first, "Done.")
    first.close()
    second, third = make(), make()
    assert second.instance is first.instance is not third.instance
    third.close()  # it has played nothing
    assert make().instance is not third.instance


@pytest.mark.parametrize(
    ("factory", "args", "words"),
    [
        ("NoReset", {}, "no method reset"),
        ("Adder", {}, "no get_reward"),
        ("Scord", {}, "did you mean 'Scored'"),
        ("Scored", {"max_turn": 3}, "did you mean 'max_turns'"),
    ],
)
def test_a_factory_that_can_not_work_is_said_at_once(own, factory, args, words):
    with pytest.raises(ConfigError, match=words):
        environment(own, factory, **args)
