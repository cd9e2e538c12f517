"""What the learner's peak memory grows with: rows, row length, and vocabulary.

    python bench/memory.py [--quick]

`vocab_growth`: the memory of one policy update beyond weights, gradients and optimizer state, with a vocabulary of 152k
against one of 49k, at equal tokens. A learner that holds logits `[tokens, vocabulary]` grows threefold. The model has
SmolLM2-135M's shape with random weights; memory doesn't depend on their values. Every arm is a process of its own; the
peak is that of the resident set during the second update, when the optimizer's state is there too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from common import Figure, cannot_run, describe_machine, finish

VOCABULARIES = (49_152, 151_936)
ROWS, LENGTH = 16, 256
TARGET = 1.10


def measure(vocab: int, rows: int, length: int) -> dict[str, float]:
    """MB of one arm, measured in this process: `peak`, and `state` of weights, gradients and AdamW's moments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from upswing.learn import Learner, TrainRow

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    learner = Learner(LlamaForCausalLM(config), lr=1e-6, max_tokens_per_pack=1024)
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 2
    texts = rng.integers(3, 40_000, (rows, length)).astype(np.int32)
    batch = [
        TrainRow(tokens=text, loss_mask=mask, advantage=float(1 - 2 * (i % 2)), group=i) for i, text in enumerate(texts)
    ]
    learner.rl_update(batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    learner.rl_update(batch)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    parameters = sum(p.numel() for p in learner.model.parameters())
    return {"peak": int(status["VmHWM"].split()[0]) / 1024, "state": parameters * 16 / 2**20}


def arm(vocab: int, rows: int, length: int) -> dict[str, float]:
    """`measure` in a process of its own, less what importing everything takes."""
    command = [sys.executable, __file__, "--arm", str(vocab), str(rows), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, fewer arms")
    parser.add_argument("--arm", nargs=3, type=int, metavar=("VOCAB", "ROWS", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        import resource

        import torch  # noqa: F401  # so that its own memory is in the baseline
        import transformers  # noqa: F401

        import upswing.learn  # noqa: F401

        baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**measure(*args.arm), "baseline": baseline}))
        return 0
    if not Path("/proc/self/clear_refs").exists():
        return cannot_run("peak memory is read from /proc, which only Linux has")
    print(describe_machine())
    arms = [(vocab, ROWS, LENGTH) for vocab in VOCABULARIES]
    if not args.quick:
        small = VOCABULARIES[0]
        arms += [(small, ROWS, LENGTH // 2), (small, ROWS, LENGTH * 4), (small, ROWS * 2, LENGTH)]
    beyond: dict[tuple[int, int, int], list[float]] = {one: [] for one in arms}
    for _ in range(1 if args.quick else 3):
        for one in arms:
            found = arm(*one)
            beyond[one].append(found["peak"] - found["baseline"] - found["state"])
            print(
                f"vocab {one[0]:>7}, {one[1]} rows of {one[2]}: {found['peak']:.0f} MB, of it {found['state']:.0f} MB "
                f"weights, gradients and AdamW, {beyond[one][-1]:.0f} MB beyond"
            )
    medians = {one: statistics.median(values) for one, values in beyond.items()}
    small, large = (medians[(vocab, ROWS, LENGTH)] for vocab in VOCABULARIES)
    figures = {"vocab_growth": Figure(large / small, TARGET, "lower")}
    figures |= {f"mb_beyond_weights.{v}x{r}x{n}": Figure(value) for (v, r, n), value in medians.items()}
    return finish("memory", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
