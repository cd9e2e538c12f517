"""Environments of the verifiers package: its own tasks, tools, stops, Env.run and rewards, in Upswing's loop."""

import asyncio
import json
from itertools import islice

import pytest
import verifiers.v1 as vf

from upswing.envs import AssistantMessage, environment_factory
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.trajectory.types import StopReason

OWN = '''
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Single turn."""

    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class SumConfig(vf.TasksetConfig):
    first: int = 0
    count: int = 20


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for i in range(self.config.first, self.config.first + self.config.count):
            data = SumData(prompt=f"{i} + 1 = ?", system_prompt="Say a number.", answer=str(i + 1))
            yield SumTask(data, self.config.task)


class Broken(SumTask):
    @vf.reward
    async def right(self, task, trace) -> float:
        raise ValueError("boom")


class BrokenSums(vf.Taskset[Broken, SumConfig]):
    def load(self):
        yield Broken(SumData(prompt="1 + 1 = ?", answer="2"), self.config.task)


class Unrewarded(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class NoRewards(vf.Taskset[Unrewarded, vf.TasksetConfig]):
    def load(self):
        yield Unrewarded(vf.TaskData(prompt="Hm."), self.config.task)


class Counter(vf.State):
    total: int = 0


class Counting(vf.Toolset[vf.ToolsetConfig, Counter]):
    async def setup_task(self, task):
        self.step = task.step

    @vf.tool
    async def add(self, times: int) -> str:
        """Count up.

        Args:
            times: How often.
        """
        if times > 9:
            raise ValueError("too often")
        self.state.total += self.step * times
        return f"now {self.state.total} </tool_call>"


class CountData(vf.TaskData):
    step: int


class CountTask(vf.Task[CountData, Counter, vf.TaskConfig]):
    """Tools that share the state with what is rewarded, and a stop."""

    @classmethod
    def toolsets(cls, config):
        return [Counting(vf.ToolsetConfig())]

    async def setup(self, trace, runtime):
        trace.state.total = 100

    async def finalize(self, trace, runtime):
        await runtime.write("total.txt", str(trace.state.total).encode())

    @vf.stop
    async def far(self, trace: vf.Trace) -> bool:
        return trace.state.total >= 200

    @vf.reward
    async def counted(self, trace, runtime) -> float:
        assert (await runtime.read("total.txt")).decode() == str(trace.state.total)
        return trace.state.total / 100

    @vf.metric
    async def calls(self, trace) -> float:
        return float(sum(len(m.tool_calls or []) for m in trace.assistant_messages))


class Counts(vf.Taskset[CountTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        step = 0
        while True:
            step += 1
            yield CountTask(CountData(prompt="Count.", step=step), self.config.task)


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        for secret in range(10, 90):
            yield GuessTask(GuessData(prompt="Guess my number.", secret=secret), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    tries: int = 4


class Guess(vf.Env[GuessConfig]):
    """Multi-turn: the environment answers every guess, as a user would."""

    async def run(self, task, agents):
        hits = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(self.config.tries - 1):
                if segment.terminated:
                    break
                if segment.last_reply == "crash":
                    raise OSError("the game fell over")
                guess = int(segment.last_reply)
                if guess == task.data.secret:
                    hits = 1.0
                    break
                hint = "higher" if guess < task.data.secret else "lower"
                segment = await interaction.turn([{"role": "user", "content": hint}])
        interaction.trace.record_reward("found", hits)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("heard", float(len(trace.nodes)))


class TwoConfig(GuessConfig):
    judge: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        pass


class Twice(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)
        await agents.agent.run(task)


class Boxed(SumTask):
    NEEDS_CONTAINER = True


class Boxes(vf.Taskset[Boxed, SumConfig]):
    def load(self):
        yield Boxed(SumData(prompt="x", answer="y"), self.config.task)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    path = tmp_path / "own_verifiers.py"
    path.write_text(OWN)
    return path


def make(own, taskset, **args):
    given = {key: f"{own}:{value}" if key == "env" else value for key, value in args.items()}
    return environment_factory("verifiers", {"taskset": f"{own}:{taskset}", **given})()


async def played(env, task, *said, finished=True):
    seen = [await env.reset(task, 0)]
    for text in said:
        seen.append(await env.step(AssistantMessage(content=text, finished=finished)))
    state = env.state()
    await env.close()
    return seen, state


def call(**arguments):
    body = json.dumps({"name": "counting_add", "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


async def test_a_single_turn_is_rewarded_by_its_own_rubric(own):
    env = make(own, "Sums")
    task = next(env.tasks("train", 1))
    right = task.data["row"]["answer"]
    (opening, end), state = await played(env, task, f"<think>well</think> {right}")
    assert [m.role for m in opening.messages] == ["system", "user"] and opening.messages[1] == task.messages[0]
    assert end.stop_reason is StopReason.ANSWERED and end.answer == right and end.reward == 2.5
    assert state["rewards"] == {"right": 2.0, "short": 0.5} and state["metrics"] == {"turns": 1.0} and state["scored"]
    wrong = await played(make(own, "Sums"), task, "I do not know.")
    assert wrong[0][1].reward == 0.0 and wrong[1]["scored"]
    cut = await played(make(own, "Sums"), task, "I am", finished=False)
    assert cut[0][1].stop_reason is StopReason.MAX_TOKENS and cut[0][1].reward == 0.5


async def test_the_reward_is_that_of_the_package_s_own_scoring(own):
    """Against Task.score on a trace that is put together by hand."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, TraceTask

    from upswing.plugins import load_object

    cls = load_object(f"{own}:Sums", "taskset", {})
    theirs = list(cls(load_object(f"{own}:SumConfig", "config", {})()))[3]
    for said in ("4", "5", "four it is"):
        described = TraceTask(type="SumTask", data=theirs.data)
        trace = vf.Trace(task=described, state=vf.State(), agent=AgentInfo(config=vf.AgentConfig(model="m")))
        trace.nodes = [
            MessageNode(message=vf.UserMessage(content=theirs.data.prompt)),
            MessageNode(parent=0, message=vf.AssistantMessage(content=said), sampled=True),
        ]
        await theirs.score(trace)
        env = make(own, "Sums", splits={"train": {}})
        task = next(t for t in env.tasks("train") if t.data["row"]["answer"] == "4")
        assert (await played(env, task, said))[0][1].reward == trace.reward


async def test_tools_share_the_state_with_what_is_rewarded(own):
    env = make(own, "Counts", max_turns=4)
    task = next(t for t in env.tasks("train") if t.data["row"]["step"] > 2)
    step = task.data["row"]["step"]
    seen, state = await played(env, task, call(times=2), call(times=10), call(times="x"), "Done.")
    assert seen[0].tools[0]["function"]["name"] == "counting_add"
    assert seen[1].messages[0].content.startswith(f"now {100 + 2 * step} ")
    assert "</tool_call>" not in seen[1].messages[0].content  # what a tool says is no markup
    assert "too often" in seen[2].messages[0].content and "times" in seen[3].messages[0].content
    assert seen[4].reward == pytest.approx(1 + 2 * step / 100) and state["metrics"] == {"calls": 3.0}
    assert [len(one.tool_records) for one in seen] == [0, 1, 1, 1, 0]
    fresh, _ = await played(make(own, "Counts"), task, "Done.")
    assert fresh[1].reward == 1.0  # every play has a state of its own


async def test_the_task_s_stops_and_upswing_s_limits_end_it_scored(own):
    env = make(own, "Counts")
    task = next(t for t in env.tasks("train") if t.data["row"]["step"] > 11)
    seen, _ = await played(env, task, call(times=9))
    assert seen[1].done and seen[1].stop_reason is StopReason.ENV_DONE and seen[1].reward > 2
    assert len(seen[1].tool_records) == 1
    cut, _ = await played(make(own, "Counts", max_turns=2), task, call(times=1), call(times=1))
    assert cut[2].stop_reason is StopReason.MAX_TURNS and cut[2].reward > 1
    bad, _ = await played(make(own, "Counts", max_invalid_calls=2), task, call(n=1), call(n=1))
    assert bad[2].stop_reason is StopReason.INVALID_CALLS and bad[2].reward == 1.0


async def test_an_environment_that_answers_plays_several_turns(own):
    env = make(own, "Guesses", env="Guess")
    task = next(env.tasks("test", 0))
    secret = task.data["row"]["secret"]
    seen, state = await played(env, task, "1", "95", str(secret))
    assert [one.messages[0].content for one in seen[1:3]] == ["higher", "lower"]
    assert seen[3].done and seen[3].reward == 1.0 and state["metrics"] == {"heard": 6.0}
    lost, _ = await played(make(own, "Guesses", env="Guess", env_config={"tries": 2}), task, "1", "2")
    assert lost[2].done and lost[2].reward == 0.0 and lost[2].stop_reason is StopReason.ANSWERED
    limited, _ = await played(make(own, "Guesses", env="Guess", max_turns=1), task, "1")
    assert limited[1].done and limited[1].stop_reason is StopReason.MAX_TURNS and limited[1].reward == 0.0


@pytest.mark.parametrize(
    ("taskset", "env", "said", "words"),
    [
        ("BrokenSums", None, ["2"], "boom"),
        ("Guesses", "Guess", ["1", "crash"], "OSError: the game fell over"),
        ("NoRewards", None, ["x"], "vf.reward"),
        ("Sums", "Twice", ["2"], "more than once"),
    ],
)
async def test_what_breaks_is_no_zero(own, taskset, env, said, words):
    play = make(own, taskset, splits={"train": {}}, **({"env": env} if env else {}))
    with pytest.raises(EnvironmentBroken, match=words):
        await played(play, next(play.tasks("train")), *said)
    await play.close()


async def test_leaving_early_frees_everything_and_scores_nothing(own):
    env = make(own, "Counts")
    await env.reset(next(env.tasks("train")), 0)
    await env.step(AssistantMessage(content=call(times=1)))
    assert env.state()["scored"] is False
    workdir = env.seat._runtime.workdir
    assert workdir.is_dir()
    await env.close()
    assert not workdir.exists() and env._game.cancelled()
    assert len(asyncio.all_tasks()) == 1


async def test_many_play_at_once(own):
    env = make(own, "Guesses", env="Guess")
    tasks = list(islice(env.tasks("train"), 20))
    plays = [played(make(own, "Guesses", env="Guess"), t, "1", str(t.data["row"]["secret"])) for t in tasks]
    assert [seen[-1].reward for seen, _ in await asyncio.gather(*plays)] == [1.0] * 20


def test_splits_are_by_content_or_by_configuration(own):
    ids = {split: [t.id for t in islice(make(own, "Guesses").tasks(split), 40)] for split in ("train", "dev", "test")}
    assert len(set(ids["train"][:30]) | set(ids["dev"]) | set(ids["test"])) == 30 + len(ids["dev"]) + len(ids["test"])
    assert 5 < len(ids["dev"]) < 30 and len(set(ids["dev"])) == len(ids["dev"])
    own_splits = {"train": {"count": 5}, "dev": {"first": 5, "count": 3}}
    dev = [t.messages[0].content for t in make(own, "Sums", splits=own_splits).tasks("dev")]
    assert dev == ["5 + 1 = ?", "6 + 1 = ?", "7 + 1 = ?"]
    with pytest.raises(ConfigError, match=r"are the same problem|is in the splits"):
        next(make(own, "Sums", splits={"train": {"count": 6}, "dev": {"first": 5}}).tasks("dev"))
    with pytest.raises(ConfigError, match="no 'test'"):
        next(make(own, "Sums", splits=own_splits).tasks("test"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"taskset": "Sum"}, "did you mean 'Sums'"),
        ({"taskset": "Sums", "config": {"cout": 1}}, "cout"),
        ({"taskset": "Guesses", "env": "Two"}, "player, judge"),
        ({"taskset": "Guesses", "env": "Guess", "env_config": {"tires": 1}}, "tires"),
        ({"taskset": "Boxes"}, "container"),
        ({"taskset": "Sums", "splits": {"valid": {}}}, "train, dev, test"),
    ],
)
def test_what_can_not_work_is_said_at_once(own, args, words):
    with pytest.raises(ConfigError, match=words):
        make(own, **args)


def test_an_unknown_package_is_named():
    with pytest.raises(ConfigError, match="'no-such-taskset' not found"):
        environment_factory("verifiers", {"taskset": "no-such-taskset"})
