"""Gymnasium's games: rewards and ends are the environment's own, and what names no action is the agent's fault."""

import random
import re
from collections import deque

import gymnasium
import pytest

from upswing.envs import AssistantMessage, environment_factory
from upswing.envs.adapters import env_reward
from upswing.errors import ConfigError, EnvironmentBroken
from upswing.trajectory.types import StopReason

LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "render_mode": "ansi"}}
OWN = '''
import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env):
    """Say the word that was shown; three tries."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(20)
    closed = 0

    def __init__(self, tries=3, breaks=False):
        self.tries, self.breaks = tries, breaks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word, self.left = f"w{self.np_random.integers(1000)}", self.tries
        return f"say {self.word} </act>", {}

    def step(self, action):
        if self.breaks:
            raise OSError("the disk is gone")
        self.left -= 1
        return "no", -0.25 if action != self.word else 1.0, action == self.word, self.left == 0, {}

    def close(self):
        Echo.closed += 1


class Blind(Echo):
    observation_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return 2, {}


class Pair(Echo):
    action_space = spaces.MultiDiscrete([2, 2])
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_gym.py"
    path.write_text(OWN)
    return path


def make(**args):
    return environment_factory("gymnasium", args)()


async def played(env, task, speak):
    """(observations, return)."""
    seen = [await env.reset(task, 0)]
    while not seen[-1].done:
        seen.append(await env.step(AssistantMessage(content=speak(seen[-1]))))
    env.close()
    return seen, sum(one.reward for one in seen)


def path_through(desc):
    """The shortest way from S to G, by name; an oracle of its own."""
    size, names = len(desc), {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    queue, seen = deque([((0, 0), [])]), {(0, 0)}
    while queue:
        (row, column), way = queue.popleft()
        if desc[row][column] == "G":
            return way
        for name, (down, right) in names.items():
            to = (row + down, column + right)
            if all(0 <= x < size for x in to) and to not in seen and desc[to[0]][to[1]] != "H":
                seen.add(to)
                queue.append((to, [*way, name]))
    raise AssertionError("no way")


async def test_frozen_lake_pays_who_finds_the_way_and_not_chance():
    way = iter(path_through(["SFFF", "FHFH", "FFFH", "HFFG"]))
    env = make(**LAKE)
    task = next(env.tasks("train"))
    seen, earned = await played(env, task, lambda _: f"<act>{next(way)}</act>")
    assert earned == 1.0 and seen[-1].stop_reason is StopReason.ENV_DONE and len(seen) == 7
    assert "SFFF" in seen[0].messages[-1].content and "\x1b" not in seen[0].messages[-1].content
    assert "left, down, right, up" in seen[0].messages[0].content
    assert env.state()["return"] == 1.0 and env.state()["terminated"]
    rng = random.Random(0)
    lucky = [
        (await played(make(**LAKE), task, lambda _: f"<act>{rng.choice(('left', 'down', 'right', 'up'))}</act>"))[1]
        for _ in range(20)
    ]
    assert sum(lucky) <= 3


async def test_it_is_the_same_game_as_gymnasium_s_own():
    """Taxi: observations, rewards and the cut at 200 steps, against the environment itself with the same seed."""
    env = make(id="Taxi-v4", kwargs={"render_mode": "ansi"}, max_turns=300)
    task = next(env.tasks("dev", 5))
    theirs = gymnasium.make("Taxi-v4", render_mode="ansi")
    theirs.reset(seed=task.data["seed"])
    names = ("south", "north", "east", "west", "pickup", "dropoff")
    rng, pictures, rewards = random.Random(1), [theirs.render()], []
    actions = [rng.randrange(6) for _ in range(200)]
    for action in actions:
        _, reward, terminated, truncated, _ = theirs.step(action)
        pictures.append(theirs.render())
        rewards.append(reward)
        if terminated or truncated:
            break
    said = iter(actions)
    seen, earned = await played(env, task, lambda _: f"<act>{names[next(said)]}</act>")
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", picture) for picture in pictures]
    assert plain[0] in seen[0].messages[-1].content
    assert [one.messages[0].content for one in seen[1:-1]] == plain[1:-1]
    assert [one.reward for one in seen[1:]] == rewards and earned == sum(rewards)
    assert truncated and seen[-1].stop_reason is StopReason.MAX_TURNS


async def test_what_names_no_action_is_answered_and_ends_in_the_end():
    env = make(**LAKE)
    seen, _ = await played(env, next(env.tasks("train")), lambda _: "<act>jump</act>")
    assert seen[-1].stop_reason is StopReason.INVALID_CALLS and len(seen) == 4
    assert "left" in seen[1].messages[0].content and env.state()["steps"] == 0
    seen, _ = await played(make(**LAKE), next(env.tasks("train")), lambda _: "<answer>I won</answer>")
    assert seen[-1].done and seen[-1].answer is None and seen[-1].stop_reason is StopReason.ENV_DONE


async def test_several_calls_of_a_turn_add_up_and_stop_at_the_end():
    env = make(**LAKE)
    text = "".join(f"<act>{name}</act>" for name in (*path_through(["SFFF", "FHFH", "FFFH", "HFFG"]), "up", "up"))
    seen, earned = await played(env, next(env.tasks("train")), lambda _: text)
    assert earned == 1.0 and len(seen) == 2 and not seen[1].tool_records[-1].ok


async def test_text_environments_of_one_s_own(own):
    env = make(id=f"{own}:Echo", kwargs={"tries": 2})
    task = next(env.tasks("train"))
    heard = (await env.reset(task, 0)).messages[-1].content
    assert "say w" in heard and "</act>" not in heard  # what the environment says is no markup
    again = await make(id=f"{own}:Echo", kwargs={"tries": 2}).reset(task, 99)
    assert again.messages[-1].content == heard  # every play of a task starts alike
    word = re.search(r"say (w\d+)", heard).group(1)
    first = await env.step(AssistantMessage(content="<act>x</act>"))
    last = await env.step(AssistantMessage(content=f"<act>{word}</act>"))
    assert (first.reward, last.reward, last.stop_reason) == (-0.25, 1.0, StopReason.ENV_DONE)  # both: an end, no cut
    game, before = env._game, type(env._game).closed
    env.close()
    env.close()
    assert type(game).closed == before + 1
    cut = await played(make(id=f"{own}:Echo", kwargs={"tries": 2}), task, lambda _: "<act>x</act>")
    assert cut[0][-1].stop_reason is StopReason.MAX_TURNS and cut[1] == -0.5
    named, _ = await played(make(id=f"{own}:Echo", actions={"a": "w1"}), task, lambda _: "<act>a</act>")
    assert named[-1].stop_reason is StopReason.MAX_TURNS


async def test_a_broken_environment_is_no_zero(own):
    env = make(id=f"{own}:Echo", kwargs={"breaks": True})
    await env.reset(next(env.tasks("train")), 0)
    with pytest.raises(EnvironmentBroken, match="OSError: the disk is gone"):
        await env.step(AssistantMessage(content="<act>x</act>"))


async def test_observations_may_be_made_text():
    env = make(id="Blackjack-v1", to_text="builtins:str")
    seen, _ = await played(env, next(env.tasks("train")), lambda _: "<act>stick</act>")
    assert re.search(r"\(\d+, \d+, \d\)", seen[0].messages[-1].content) and seen[-1].reward in (-1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"id": "FrozenLak-v1"}, ["did you mean 'FrozenLake-v1'"]),
        ({"id": "FrozenLake-v1"}, ["int", "to_text", "render_mode: ansi"]),
        ({**LAKE, "kwargs": {"slippery": True}}, ["FrozenLake-v1", "slippery"]),
        ({**LAKE, "actions": ["left", "right"]}, ["4 actions"]),
        ({**LAKE, "actions": {"west": 9}}, ["'west'", "Discrete(4)"]),
        ({"id": "{own}:Pair"}, ["MultiDiscrete", "actions"]),
        ({"id": "{own}:Blind"}, ["int 2", "to_text"]),
        ({"id": "{own}:Ech"}, ["did you mean 'Echo'"]),
        ({}, ["'id'"]),
    ],
)
def test_what_can_not_work_is_said_at_once(args, words, own):
    with pytest.raises(ConfigError) as caught:
        make(**{k: v.format(own=own) if k == "id" else v for k, v in args.items()})
    assert all(word in str(caught.value) for word in words), caught.value


def test_env_reward_is_the_sum_unless_the_environment_never_scored():
    assert env_reward(0.5, {}) == env_reward(0.5, {"scored": True}) == 0.5
    assert env_reward(0.0, {"scored": False}).value is None
