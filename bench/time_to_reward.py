"""Wall time for the same tiny agent to reach 90 % success, Upswing against TRL.

    python bench/time_to_reward.py [--quick] [--seeds 0 1 2 3 4]

The task is that of `bench/algorithms.py`: two turns, a tool call and an answer. Once a seed, the tiny model learns from
demonstrations of a wasteful expert; both sides start from those weights and see the same tasks in the same order with
the same GRPO: 8 tasks x 8 samples a step, one update, learning rate, AdamW, clipping, no KL. TRL plays the task by its
own `environment_factory`, with the same prompts and the same syntax of calls (a response template), and the reward is
read by the same parser. Sampling noise differs, so the curves do, within the spread of the seeds.

Success is the mean of the rewards of the last 3 steps (192 samples), of the same samples that are trained on; a side is
done when that is at least 0.9. The two sides take steps in turn, each in its own process; the time is the sum of a
side's own steps. Loading, imports and the start weights aren't counted. `vs_trl`: median over seeds of ours / of TRL's;
its spread is that of the seeds' own ratios. A seed that isn't there after 50 steps counts with the time of 50.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from algorithms import LR, TwoTurns, cold_start, recipe
from arms import ArmFailed
from common import Figure, cannot_run, describe_machine, finish
from trl_peer import MISSING, Gate, Side, has_trl, run_trl, run_upswing, trl_config
from upswing.envs.lookup import UNKNOWN
from upswing.seeding import derive_seed

GOAL, WINDOW = 0.9, 3
MAX_STEPS = 50
PROMPTS, SAMPLES, TURN_TOKENS = 8, 8, 16

# The tiny model's own template, with calls as it writes them: `<get>c</get>`. TRL only trusts a template that shows
# an argument's name too, so any other name is written out.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '<' + call.function.name + '>' }}"
    "{% for name, value in call.function.arguments.items() %}{{ value if name == 'key' else name + '=' + value }}"
    "{% endfor %}{{ '</' + call.function.name + '>' }}{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<(?P<name>get)>(?=[^<]+</get>)",
            "close": "</get>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"key": "{content}"}}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


class TrlTwoTurns:
    """`TwoTurns` as TRL wants an environment: a row of the data set to start with, and a method for each tool."""

    def reset(self, facts: str, **row: Any) -> None:
        self._facts: dict[str, str] = json.loads(facts)

    def get(self, key: str) -> str:
        """Say what a key stands for.

        Args:
            key: The key.
        """
        return self._facts.get(key, UNKNOWN)


# -- workers ------------------------------------------------------------


def work(job: Mapping[str, Any]) -> None:
    gate = Gate()
    if job["arm"] == "trl":
        work_trl(gate, job)
        return
    stage = {"stage": "rl", "steps": MAX_STEPS + 1, "tasks_per_step": PROMPTS, "group_size": SAMPLES}
    stage |= {"lr": LR, "eval_every": 0, "save_every": 0}
    run_upswing(gate, recipe(job["model"], job["seed"], stage), job["out"])


def work_trl(gate: Gate, job: Mapping[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
    parser = TwoTurns().parser

    def rewards(completions: Any, completion_ids: Any, gold: Sequence[str], **_: Any) -> list[float]:
        answers = [parser.parse(messages[-1]["content"]).answer for messages in completions]
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [float(e and a == g) for e, a, g in zip(ended, answers, gold, strict=True)]

    config = trl_config(
        batch=PROMPTS * SAMPLES,
        micro_batch=PROMPTS * SAMPLES,
        turn_tokens=TURN_TOKENS,
        output_dir=job["out"],
        num_generations=SAMPLES,
        max_steps=MAX_STEPS + 1,
        learning_rate=LR,
        seed=job["seed"],
        max_completion_length=128,
        max_tool_calling_iterations=1,
    )
    tasks = TwoTurns().tasks("train", derive_seed(job["seed"], "rl", "tasks"))
    rows = [
        {
            "prompt": [{"role": message.role, "content": message.content} for message in task.messages],
            "facts": json.dumps(task.data["facts"]),
            "gold": task.gold[0],
        }
        for task in itertools.islice(tasks, (MAX_STEPS + 1) * PROMPTS)
    ]
    run_trl(
        gate,
        config,
        model=job["model"],
        tokenizer=tokenizer,
        rows=rows,
        rewards=rewards,
        environment_factory=TrlTwoTurns,
    )


# -- the comparison ------------------------------------------------------------


@dataclass
class Race:
    """One side's steps on one seed."""

    side: Side
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def there(self) -> bool:
        return len(self.rewards) >= WINDOW and statistics.fmean(self.rewards[-WINDOW:]) >= GOAL

    @property
    def over(self) -> bool:
        return self.there or len(self.rewards) == MAX_STEPS

    def step(self) -> None:
        seen = self.side.step()
        self.rewards.append(seen["reward"])
        self.seconds += seen["seconds"]

    def __str__(self) -> str:
        end = "" if self.there else f" (not there: {statistics.fmean(self.rewards[-WINDOW:]):.2f})"
        return f"{self.side.name} {len(self.rewards)} steps, {self.seconds:.1f} s{end}"


def race(seed: int, folder: Path) -> dict[str, Race]:
    """Both sides from the same weights, in turn, until each is there."""
    model = cold_start(seed, folder / "start")
    races = {name: Race(Side(__file__, name, folder, model=model, seed=seed)) for name in ("trl", "upswing")}
    while not all(each.over for each in races.values()):
        for each in races.values():
            if not each.over:
                each.step()
    for each in races.values():
        each.side.close()
    first = ", ".join(f"{name} {each.rewards[0]:.2f}" for name, each in races.items())
    print(
        f"seed {seed}: success of the first step {first}; 90 % after: {'; '.join(map(str, races.values()))}", flush=True
    )
    return races


def figures_of(races: Sequence[Mapping[str, Race]]) -> dict[str, Figure]:
    seconds = {name: [race[name].seconds for race in races] for name in races[0]}
    ratios = [ours / theirs for ours, theirs in zip(seconds["upswing"], seconds["trl"], strict=True)]
    value = statistics.median(seconds["upswing"]) / statistics.median(seconds["trl"])
    figures = {"vs_trl": Figure(value, 0.33, "lower", (min(ratios), max(ratios)))}
    for name, own in seconds.items():
        steps = [len(race[name].rewards) for race in races]
        never = sum(not race[name].there for race in races)
        figures[f"seconds.{name}"] = Figure(statistics.median(own), None, "lower", (min(own), max(own)))
        figures[f"steps.{name}"] = Figure(statistics.median(steps), None, "lower", (min(steps), max(steps)))
        figures[f"seeds_not_there.{name}"] = Figure(never, None, "lower")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return 0
    if not has_trl():
        return cannot_run(MISSING)
    print(describe_machine(("upswing", "trl", "torch", "transformers")))
    with tempfile.TemporaryDirectory() as folder:
        try:
            seeds = args.seeds[:3] if args.quick else args.seeds
            races = [race(seed, Path(folder) / str(seed)) for seed in seeds]
        except ArmFailed as error:
            return cannot_run(str(error))
    return finish("time_to_reward", args.quick, figures_of(races))


if __name__ == "__main__":
    sys.exit(main())
