"""Stand-ins for inference servers: a real model behind each protocol, and the faults that servers have."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import uvicorn
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.responses import JSONResponse

from upswing.models.load import load_model


class Drawn(NamedTuple):
    token: int
    logprob: float
    top: tuple[int, float]
    """The likeliest token and its log-prob."""
    version: str


class ModelServer:
    """One forward a token, slow and plain. `faults` names what it does wrong next."""

    def __init__(self) -> None:
        self.model = load_model("tiny").model.eval()
        self.first = {name: p.detach().clone() for name, p in self.model.state_dict().items()}
        self.reset()

    def reset(self) -> None:
        self.restart()
        self.paused, self.processed = False, True
        self.faults: list[str] = []
        self.calls: list[str] = []

    def restart(self) -> None:
        self.model.load_state_dict(self.first)
        self.version = "default"

    def load(self, folder: str) -> None:
        self.model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)

    async def broken(self, fault: str) -> JSONResponse | None:
        """What a server that is down answers; None: it isn't."""
        if fault == "hang":
            await asyncio.sleep(30)
        return JSONResponse({"error": "worker died"}, status_code=500) if fault == "500" else None

    async def sample(
        self, ids: list[int], count: int, temperature: float, stop: Collection[int], seed: int | None
    ) -> list[Drawn]:
        generator = torch.Generator()
        generator.manual_seed(seed) if seed is not None else generator.seed()
        drawn: list[Drawn] = []
        while len(drawn) < count and not (drawn and drawn[-1].token in stop):
            while self.paused:
                await asyncio.sleep(0.001)
            with torch.no_grad():
                logits = self.model(torch.tensor([ids + [one.token for one in drawn]])).logits[0, -1].double()
            logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
            sampled = torch.multinomial(logprobs.exp(), 1, generator=generator)
            token = int(sampled if temperature else logits.argmax())
            told = logprobs if self.processed else torch.log_softmax(logits, -1)
            top = int(logits.argmax()), float(told.max())
            drawn.append(Drawn(token, float(told[token]), top, self.version))
            await asyncio.sleep(0)
        return drawn


def spans_of(drawn: list[Drawn]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for index, one in enumerate(drawn):
        if not spans or spans[-1]["version"] != one.version:
            spans.append({"version": one.version, "start": index})
        spans[-1]["end"] = index + 1
    return spans


class HasApp(Protocol):
    def app(self) -> Starlette: ...


@contextlib.contextmanager
def serving(server: HasApp) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(server.app(), log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        running.should_exit = True
        thread.join()


def logprobs_of(model: Any, prompt: list[int], tokens: tuple[int, ...], temperature: float) -> list[float]:
    """By one forward over the whole sequence in float64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def served_recipe(engine: dict[str, Any], **stage: Any) -> dict[str, Any]:
    """A recipe of one stage, an rl stage unless told otherwise."""
    rl = {"stage": "rl", "steps": 2, "tasks_per_step": 2, "group_size": 4, "lr": 1e-3, "eval_every": 0}
    return {
        "name": "served",
        "model": "tiny",
        "env": "tests.stages.test_algorithms:TwoTurns",
        "verifiers": ["tests.stages.test_algorithms:even"],
        "engine": engine,
        "limits": {"turn_tokens": 8, "context_tokens": 60},
        "stages": [stage or rl],
    }
