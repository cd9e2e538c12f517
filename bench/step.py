"""One whole GRPO step against TRL's trainer on equal work: seconds and peak memory, single-turn and with tools.

    python bench/step.py [--quick] [--model tiny] [--trl-micro-batch 8]

A step is sampling, tools, rewards, advantages, one AdamW update and the new weights in place: the `rl` stage of a
recipe against `GRPOTrainer.train`, both with the gate of `bench/trl_peer.py` around each step. SmolLM2-135M, 8 prompts
x 8 samples (`--quick`: 1 x 2), the same prompts, chat template (Qwen2.5's, which TRL can parse calls of), number
format, learning rate and gradient clipping, no KL. `single_vs_trl`: 64 new tokens a sample. `multiturn_vs_trl`: three
calls of a tool whose results have about 60 tokens, then an answer; TRL calls it by its own `tools=`.

An untrained model calls no tools, so both sides are made to say the same kind of thing: 8 tokens a turn (15 in the
last, 63 in a single turn) are sampled freely, the call and the end of the turn are forced by setting logits, with all
of the computing still done. The free tokens differ between samples, so nothing beyond the prompt can be shared, and the
reward is a hash of the answer, so every sample has an advantage. Both sides count tokens; unequal counts end the bench.

`memory_vs_trl` is the larger ratio of the two kinds: peak resident memory of each side's process, all of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arms import ArmFailed
from common import Figure, cannot_run, describe_machine, finish
from trl_peer import MISSING, Gate, Side, has_trl, run_trl, run_upswing, trl_config
from upswing.envs.tool_env import ToolEnv
from upswing.errors import UpswingError
from upswing.trajectory.types import Message, Task

CALLS = {"single": 0, "multiturn": 3}
TARGETS = {"single": 3.0, "multiturn": 5.0}
FREE_IN_CALL, FREE_LAST = 8, {"single": 63, "multiturn": 15}
CALL = '\n<tool_call>\n{{"name": "read_page", "arguments": {{"title": "{title}"}}}}\n</tool_call>'
TITLES = ("rivers", "cities", "borders")
LR = 1e-6
MAX_TOKENS = 2048
OUT = -1e4
"""A logit whose probability is 0, without the NaNs of an infinite one."""


def read_page(title: str):  # type: ignore[no-untyped-def]  # a return type would be in TRL's schema and not in ours
    """Read a page of the atlas.

    Args:
        title: Title of the page.
    """
    return (
        f"The page on {title} says that the longest one of them begins in the mountains of the north, that two of the "
        "five largest ones were first described in a report of the year before the war, and that a list of all of them "
        "is kept by the office in the capital, where everyone may read it on any day of the week."
    )


def spread(answer: str | None) -> float:
    """A reward from 0 to 1 that tells samples apart and says nothing about them."""
    return zlib.crc32((answer or "").encode()) / 2**32


def prompt(number: int) -> list[dict[str, str]]:
    question = f"Question {number}: which of the places that the atlas describes should be visited first, and why?"
    return [{"role": "system", "content": "Answer the question."}, {"role": "user", "content": question}]


class Atlas(ToolEnv):
    """Questions without end; the reward is that of `spread`."""

    name = "atlas"

    def __init__(self, *, calls: int) -> None:
        super().__init__(tools=[read_page] if calls else [], max_turns=calls + 1)

    def tasks(self, split: str, seed: int = 0) -> Iterator[Task]:
        for number in itertools.count():
            yield Task(id=str(number), messages=tuple(Message(**message) for message in prompt(number)), split=split)


class Script:
    """What every sample says, turn by turn, as ids; None is a token that the model samples freely."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        end = tokenizer.eos_token_id
        calls = [tokenizer.encode(CALL.format(title=title), add_special_tokens=False) for title in TITLES]
        self.turns: list[list[int | None]] = [[None] * FREE_IN_CALL + call + [end] for call in calls[: CALLS[kind]]]
        self.turns.append([None] * FREE_LAST[kind] + [end])
        # Neither a tag nor a control token may be sampled: it would end the turn, or be a call.
        self._banned = [token for text, token in tokenizer.get_vocab().items() if "<" in text]
        self._start = tokenizer.convert_tokens_to_ids("<|im_start|>")

    @property
    def longest(self) -> int:
        return max(map(len, self.turns))

    def turn(self, prompt_ids: Any) -> int:
        """The turn that comes after a prompt (an array or tensor): system, user, assistant, then two headers a call."""
        return (int((prompt_ids == self._start).sum()) - 3) // 2

    def force(self, logits_BV: Any, turns: Sequence[int], positions: Sequence[int]) -> None:
        """Change logits in place: row b is about to say token `positions[b]` of turn `turns[b]`."""
        logits_BV[:, self._banned] = OUT
        said = [self.turns[turn][position] for turn, position in zip(turns, positions, strict=True)]
        forced = [(row, token) for row, token in enumerate(said) if token is not None]
        if forced:
            rows, tokens = (list(column) for column in zip(*forced, strict=True))
            logits_BV[rows] = OUT
            logits_BV[rows, tokens] = 0.0


# -- workers ------------------------------------------------------------


def work(job: Mapping[str, Any]) -> None:
    from transformers import AutoTokenizer

    gate, tokenizer = Gate(), AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    arm = {"upswing": work_upswing, "trl": work_trl}[job["arm"]]
    arm(gate, job, tokenizer, Script(tokenizer, job["kind"]))


def work_upswing(gate: Gate, job: Mapping[str, Any], tokenizer: Any, script: Script) -> None:
    from upswing.engine.torch import TorchEngine
    from upswing.recipe import recipe_from

    own_sample = TorchEngine._sample

    def sample(engine: Any, ready: Sequence[Any], logits_UV: Any, rows: Sequence[int]) -> Any:
        logits_BV = logits_UV[list(rows)]
        turns = [script.turn(request.sequence[: request.num_prompt]) for request in ready]
        script.force(logits_BV, turns, [len(request.tokens) for request in ready])
        return own_sample(engine, ready, logits_BV, range(len(ready)))

    TorchEngine._sample = sample  # type: ignore[method-assign]
    stage = {"stage": "rl", "steps": job["steps"], "tasks_per_step": job["prompts"], "group_size": job["samples"]}
    recipe = {
        "name": "step",
        "model": job["model"],
        "env": {"name": f"{Path(__file__).resolve()}:Atlas", "args": {"calls": CALLS[job["kind"]]}},
        "verifiers": [f"{Path(__file__).resolve()}:spread"],
        "engine": {"max_slots": job["prompts"] * job["samples"], "max_context": MAX_TOKENS},
        "limits": {"turn_tokens": script.longest, "context_tokens": MAX_TOKENS},
        "stages": [{**stage, "lr": LR, "eval_every": 0, "save_every": 0}],
    }
    run_upswing(gate, recipe_from(recipe), job["out"])


def work_trl(gate: Gate, job: Mapping[str, Any], tokenizer: Any, script: Script) -> None:
    from transformers import LogitsProcessorList

    calls, batch = CALLS[job["kind"]], job["prompts"] * job["samples"]
    config = trl_config(
        batch=batch,
        micro_batch=min(job["micro_batch"], batch),
        turn_tokens=script.longest,
        output_dir=job["out"],
        num_generations=job["samples"],
        max_steps=job["steps"],
        learning_rate=LR,
        max_completion_length=MAX_TOKENS,
        max_tool_calling_iterations=calls,
    )

    def script_generate(trainer: Any) -> None:
        own_generate = trainer.model.generate

        def generate(input_ids: Any, **kwargs: Any) -> Any:
            turn, start = script.turn(input_ids[0]), input_ids.shape[1]

            def force(ids: Any, scores_BV: Any) -> Any:
                script.force(scores_BV, [turn] * len(ids), [ids.shape[1] - start] * len(ids))
                return scores_BV

            return own_generate(input_ids=input_ids, logits_processor=LogitsProcessorList([force]), **kwargs)

        trainer.model.generate = generate

    run_trl(
        gate,
        config,
        model=job["model"],
        tokenizer=tokenizer,
        rows=[{"prompt": prompt(number)} for number in range(job["steps"] * job["prompts"])],
        rewards=lambda completions, **_: [spread(messages[-1]["content"]) for messages in completions],
        prepare=script_generate,
        tools=[read_page] if calls else None,
    )


# -- the comparison ------------------------------------------------------------


def prepare_model(name: str, folder: Path) -> None:
    """A copy of the model whose chat template both sides can render and parse calls with."""
    from trl.chat_template_utils import qwen2_5_chat_template

    from upswing.models.load import load_model

    loaded = load_model(name)
    loaded.tokenizer.chat_template = qwen2_5_chat_template
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def compare(job: Mapping[str, Any], rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """What both sides report, round by round (A B A B); the first round warms up and is thrown away."""
    sides = [Side(__file__, name, folder, steps=rounds + 2, **job) for name in ("trl", "upswing")]
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            seen = side.step()
            found[side.name].append(seen)
            print(
                f"{job['kind']:9} round {number}  {side.name:7}  {seen['seconds']:7.1f} s  {seen['peak_mb']:6.0f} MB  "
                f"{seen['sampled']:.0f} of {seen['tokens']:.0f} tokens sampled",
                flush=True,
            )
        theirs, ours = ([found[name][-1][key] for key in ("tokens", "sampled")] for name in found)
        if theirs != ours:
            raise ArmFailed(f"unequal work: TRL had {theirs}, Upswing {ours} tokens, and of them sampled")
    for side in sides:
        side.close()
    return {name: steps[1:] for name, steps in found.items()}


def figures_of(kind: str, found: Mapping[str, list[dict[str, float]]]) -> dict[str, Figure]:
    seconds = {name: [step["seconds"] for step in steps] for name, steps in found.items()}
    ratios = [theirs / ours for theirs, ours in zip(seconds["trl"], seconds["upswing"], strict=True)]
    value = statistics.median(seconds["trl"]) / statistics.median(seconds["upswing"])
    peaks = {name: max(step["peak_mb"] for step in steps) for name, steps in found.items()}
    figures = {
        f"{kind}_vs_trl": Figure(value, TARGETS[kind], spread=(min(ratios), max(ratios))),
        f"memory_vs_trl.{kind}": Figure(peaks["upswing"] / peaks["trl"], better="lower"),
    }
    for name in found:
        figures[f"seconds.{kind}.{name}"] = Figure(statistics.median(seconds[name]), better="lower")
        figures[f"peak_mb.{kind}.{name}"] = Figure(peaks[name], better="lower")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="smollm2-135m", help="tiny: to try the script out")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="rows that TRL trains on at once")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return 0
    if not has_trl():
        return cannot_run(MISSING)
    prompts, samples = (1, 2) if args.quick else (8, 8)
    rounds = {"single": 1, "multiturn": 1} if args.quick else {"single": 3, "multiturn": 2}
    print(describe_machine(("upswing", "trl", "torch", "transformers")))
    print(f"{args.model}, {prompts} prompts x {samples} samples, TRL trains on {args.trl_micro_batch} rows at once")
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = {"model": f"{folder}/model", "prompts": prompts, "samples": samples, "micro_batch": args.trl_micro_batch}
        try:
            prepare_model(args.model, Path(job["model"]))
            for kind in CALLS:
                figures |= figures_of(kind, compare({**job, "kind": kind}, rounds[kind], Path(folder) / kind))
        except (ArmFailed, UpswingError) as error:
            return cannot_run(str(error))
    memory = max(figures[f"memory_vs_trl.{kind}"].value or 0.0 for kind in CALLS)
    figures = {"memory_vs_trl": Figure(memory, 0.6, "lower"), **figures}
    return finish("step", args.quick, dict(sorted(figures.items(), key=lambda item: item[1].target is None)))


if __name__ == "__main__":
    sys.exit(main())
