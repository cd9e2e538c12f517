"""The learner on two ranks (FSDP2, gloo) against one process, on this machine's CPU: the same losses, and the cost.

    python bench/ranks.py [--quick]

Both arms train the same model from the same weights on the same batches in float32, with the same number of threads in
all, and alternate (A B A B) a few updates at a time. `same_loss_curve`: the largest relative difference between the
losses of an update, over all of them. `overhead`: seconds an update on two ranks over those of one process; 1 would be
for nothing. On CPUs of one machine that says what the ranks cost each other, not what more machines bring. The model
has SmolLM2-135M's shape with random weights (--quick: a small one's), so that each update has something to learn.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arms import ArmFailed, Worker, serve
from common import Figure, cannot_run, describe_machine, finish

ROUNDS, EACH, WARM = 4, 5, 2
"""Rounds of so many updates, after a few to warm up, which count for the losses."""
TARGET, RANKS = 1e-5, 2
SIZES = {
    "full": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "vocab": 49_152, "rows": 8, "length": 128},
    "quick": {"hidden": 96, "inner": 256, "layers": 6, "heads": 3, "vocab": 4096, "rows": 6, "length": 64},
}


class Learns:
    """An arm: one process, or rank 0 of several."""

    def __init__(self, size: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from upswing.learn import sharded

        self.size = SIZES[size]
        config = LlamaConfig(
            vocab_size=self.size["vocab"],
            hidden_size=self.size["hidden"],
            intermediate_size=self.size["inner"],
            num_hidden_layers=self.size["layers"],
            num_attention_heads=self.size["heads"],
            num_key_value_heads=self.size["heads"] // 3 or 1,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        if "RANK" in os.environ:
            self._led = sharded.lead()
            self._led.__enter__()
        options = {"lr": 1e-4, "max_tokens_per_pack": 256, "compute_dtype": torch.float32}
        self.learner, self.done = sharded.make_learner(LlamaForCausalLM(config), **options), 0

    def update(self, count: int) -> dict[str, Any]:
        """So many updates -> their losses, and the seconds that they took together."""
        batches = [self._batch(self.done + number) for number in range(count)]
        began = time.perf_counter()
        losses = [self.learner.sft_update(batch).loss for batch in batches]
        self.done += count
        return {"losses": losses, "seconds": time.perf_counter() - began}

    def _batch(self, number: int) -> list[Any]:
        """Rows of uneven lengths that say one thing: a model with random weights learns which tokens there are."""
        import numpy as np

        from upswing.learn import TrainRow

        rng, longest = np.random.default_rng(number), self.size["length"]
        lengths = rng.integers(longest // 2, longest + 1, self.size["rows"])
        texts = [rng.integers(3, 200, length).astype(np.int32) for length in lengths]
        return [TrainRow(tokens=text, loss_mask=np.arange(len(text)) >= len(text) // 4) for text in texts]


def follow() -> None:
    """What the other ranks do."""
    from upswing.learn import sharded

    sharded.follow()


def threads_of(ranks: int) -> int:
    return max(1, (os.cpu_count() or 1) // ranks)


def arms(size: str) -> list[Worker]:
    """One process, rank 0 of two, and the other rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, __file__, "--size", size, "--arm"]
    alone = {"OMP_NUM_THREADS": str(threads_of(1)), "CUDA_VISIBLE_DEVICES": ""}
    shared = {**alone, **place, "OMP_NUM_THREADS": str(threads_of(RANKS))}
    return [
        Worker("one process", [*command, "learn"], alone),
        Worker(f"{RANKS} ranks", [*command, "learn"], {**shared, "RANK": "0"}),
        *(Worker(f"rank {n}", [*command, "follow"], {**shared, "RANK": str(n)}) for n in range(1, RANKS)),
    ]


def compared(losses: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> dict[str, Figure]:
    """Of (one process, ranks): the losses of each update, the seconds of each round."""
    apart = max(abs(ours - one) / abs(one) for one, ours in zip(*losses, strict=True))
    ratios = [ours / one for one, ours in zip(*seconds, strict=True)]
    one, ranks = (statistics.median(each) / EACH for each in seconds)
    return {
        "same_loss_curve": Figure(apart, TARGET, "lower"),
        "updates": Figure(len(losses[0])),
        "loss_fell": Figure(losses[0][0] - losses[0][-1]),
        "overhead": Figure(statistics.median(ratios), None, "lower", (min(ratios), max(ratios))),
        "update_seconds.one": Figure(one, None, "lower"),
        f"update_seconds.{RANKS}_ranks": Figure(ranks, None, "lower"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=["learn", "follow"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm == "follow":
        follow()
        return 0
    if args.arm:
        serve(Learns, args.size)
    print(describe_machine(("upswing", "torch", "transformers")))
    print(f"threads: {threads_of(1)} in one process, {threads_of(RANKS)} in each of {RANKS} ranks", flush=True)
    one, ranks, *_ = workers = arms("quick" if args.quick else "full")
    losses: tuple[list[float], list[float]] = [], []
    seconds: tuple[list[float], list[float]] = [], []
    try:
        for count in (WARM, *([EACH] * ROUNDS)):
            for number, arm in enumerate((one, ranks)):
                found = arm("update", count=count)
                losses[number].extend(found["losses"])
                if count == EACH:
                    seconds[number].append(found["seconds"])
                    print(f"{arm.name}: {found['seconds'] / count:.3g} s an update, loss {losses[number][-1]:.6f}")
    except ArmFailed as problem:
        return cannot_run(f"an arm ended: {problem}")
    finally:
        for worker in workers:
            worker.close()
    return finish("ranks", args.quick, compared(losses, seconds))


if __name__ == "__main__":
    sys.exit(main())
