"""`upswing serve`: a trained agent behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from upswing.cli.common import Host, Port, is_run_folder, listen, user_command
from upswing.cli.eval import checkpoints_of
from upswing.errors import ConfigError
from upswing.recipe import load_recipe


@user_command
def serve_command(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model's folder or its name.")],
    stage: Annotated[str | None, typer.Option(help="Of a run: base or a stage; by default the last finished.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    protocol: Annotated[str, typer.Option(help="How the model writes calls: hermes, llama3_json, …")] = "hermes",
    tools_in: Annotated[str, typer.Option(help="Where it reads of tools: template, system or nowhere.")] = "template",
    max_slots: Annotated[int, typer.Option(min=1, help="Completions at once; more wait.")] = 32,
    max_context: Annotated[
        int | None, typer.Option(min=16, help="Tokens, prompt and answer; default: the model's.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    quantize: Annotated[str | None, typer.Option(help="int8, on a CPU.")] = None,
) -> None:
    """Serve a run's newest weights, or any model, as an OpenAI-compatible endpoint with tools.

    POST /v1/chat/completions (stream, tools, n, logprobs, seed), GET /v1/models, GET /health.
    """
    model = target
    if is_run_folder(Path(target)):
        ((_, model),) = checkpoints_of(Path(target), load_recipe(Path(target)), [stage] if stage else []).items()
    elif stage is not None:
        raise ConfigError(f"--stage needs a run folder, but '{target}' isn't one")
    _check_choices(protocol, tools_in, quantize)
    serve = listen(host, port, "/v1")
    from upswing.engine.torch import TorchEngine
    from upswing.models.load import load_model
    from upswing.rollout.limits import Limits
    from upswing.rollout.serving import Serving
    from upswing.trajectory.render import ChatRenderer

    loaded = load_model(model)
    kind: Literal["int8"] | None = "int8" if quantize else None
    engine = TorchEngine.from_model(
        loaded.model, tokenizer=loaded.tokenizer, max_slots=max_slots, max_context=max_context, quantize=kind
    )
    serving = Serving(
        name=target,
        engine=engine,
        renderer=ChatRenderer(loaded.tokenizer),
        end_tokens=loaded.stop_tokens,
        limits=Limits(turn_tokens=max_tokens, context_tokens=engine.max_request),
        protocol=protocol,
        tools_in=tools_in,
    )
    serve(serving.app(), lifespan="off")


def _check_choices(protocol: str, tools_in: str, quantize: str | None) -> None:
    from upswing.envs.tool_env import PROTOCOLS

    places = ("template", "system", "nowhere")
    for name, value, allowed in (("protocol", protocol, PROTOCOLS), ("tools-in", tools_in, places)):
        if value not in allowed:
            raise ConfigError(f"--{name} is '{value}'; allowed: {', '.join(allowed)}")
    if quantize not in (None, "int8"):
        raise ConfigError(f"--quantize is '{quantize}'; allowed: int8")
