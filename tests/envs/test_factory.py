"""What a recipe's `env:` section may say."""

import subprocess
import sys

import pytest

from upswing.envs import ToolEnv, environment_factory
from upswing.envs.base import Environment, Observation
from upswing.errors import ConfigError

OWN = '''
from upswing.envs.base import Environment, Observation
class Maze(Environment):
    def __init__(self, size: int, *, walls: float = 0.5):
        self.size = size
    def reset(self, task, seed):
        return Observation()
    def step(self, message):
        return Observation(done=True)
def ping(host: str) -> str:
    """Ping."""
    return host
def bad(host) -> str:
    """Ping."""
    return host
class Half(Environment):
    def reset(self, task, seed):
        return Observation()
class Other: ...
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_envs.py"
    path.write_text(OWN)
    return path


def test_each_call_makes_a_new_environment(own):
    make = environment_factory(f"{own}:Maze", {"size": 3})
    first, second = make(), make()
    assert isinstance(first, Environment) and first is not second and first.size == 3


def test_the_builtin_takes_tools_by_path(own):
    env = environment_factory("tool", {"tools": [f"{own}:ping"], "max_turns": 2})()
    assert isinstance(env, ToolEnv) and env.max_turns == 2


@pytest.mark.parametrize(
    ("what", "args", "words"),
    [
        ("Maze", {"size": 3, "wals": 1}, ["'wals'", "size, walls", "did you mean 'walls'"]),
        ("Maze", {}, ["'size'"]),
        ("Half", {}, ["step"]),
        ("Other", {}, ["Environment"]),
        ("ping", {}, ["Environment"]),
        ("Maz", {}, ["did you mean 'Maze'"]),
    ],
)
def test_what_can_not_work_is_said_at_once(own, what, args, words):
    with pytest.raises(ConfigError) as caught:
        environment_factory(f"{own}:{what}", args)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_bad_tools_are_said_before_the_first_trajectory(own):
    with pytest.raises(ConfigError, match="tool 'bad': parameter 'host' has no type hint"):
        environment_factory("tool", {"tools": [f"{own}:bad"]})
    with pytest.raises(ConfigError, match="did you mean 'max_turns'"):
        environment_factory("tool", {"max_turn": 3})


def test_unknown_names(own):
    with pytest.raises(ConfigError, match="did you mean 'geo_search'"):
        environment_factory("geo_serch", {})


def test_importing_environments_and_verifiers_is_light():
    code = "import sys, upswing.envs, upswing.verify; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_observations_have_defaults():
    assert Observation().messages == () and not Observation().done
