"""Rolling dice: a tool, an environment and a verifier of one's own."""

import random

from upswing.envs import ToolEnv
from upswing.trajectory.types import Message, Task


def total(numbers: list[int]) -> int:
    """Add up whole numbers.

    Args:
        numbers: What to add.
    """
    return sum(numbers)


class Dice(ToolEnv):
    tools = (total,)
    max_turns = 3

    def tasks(self, split, seed=0):
        rng = random.Random(f"{split} {seed}")
        for number in range(1000):
            dice = [rng.randint(1, 6) for _ in range(5)]
            question = Message(role="user", content=f"What do {dice} add up to?")
            yield Task(id=f"{split}-{number}", messages=(question,), gold=(str(sum(dice)),), split=split)


def close_enough(answer, gold, within: int = 0):
    return answer is not None and answer.isdigit() and abs(int(answer) - int(gold[0])) <= within
