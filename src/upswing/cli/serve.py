"""`upswing serve`: a trained agent behind OpenAI's API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upswing.cli.common import Host, Port, is_run_folder, listen, user_command
from upswing.cli.eval import checkpoints_of
from upswing.errors import ConfigError
from upswing.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from upswing.envs.base import Environment, Observation

PLACES = ("template", "system", "nowhere")


@user_command
def serve_command(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a model's folder or its name.")],
    stage: Annotated[str | None, typer.Option(help="Of a run: base or a stage; by default the last finished.")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    protocol: Annotated[str | None, typer.Option(help="How calls are written; default: the run's, or hermes.")] = None,
    tools_in: Annotated[
        str | None,
        typer.Option(help="Where tools are told: template, system, nowhere; default: as in the run, else what fits."),
    ] = None,
    max_slots: Annotated[int, typer.Option(min=1, help="Completions at once; more wait.")] = 32,
    max_context: Annotated[
        int | None, typer.Option(min=16, help="Tokens, prompt and answer; default: the run's, else the model's.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer; default: the run's, or 1024.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8, on a CPU.")] = None,
) -> None:
    """Serve a run's newest weights, or any model, as an OpenAI-compatible endpoint with tools.

    POST /v1/chat/completions (stream, tools, n, logprobs, seed), GET /v1/models, GET /health.
    """
    _check_choices(protocol, tools_in, quantize)
    model = target
    recipe: Recipe | None = None
    if is_run_folder(Path(target)):
        recipe = load_recipe(Path(target))
        ((_, model),) = checkpoints_of(Path(target), recipe, [stage] if stage else []).items()
    elif stage is not None:
        raise ConfigError(f"--stage needs a run folder, but '{target}' isn't one")
    manner = manner_of(recipe, protocol=protocol, tools_in=tools_in, turn_tokens=max_tokens, context_tokens=max_context)
    serve = listen(host, port, "/v1")
    from upswing.engine.torch import TorchEngine
    from upswing.models.load import load_model, load_tokenizer
    from upswing.rollout.limits import Limits
    from upswing.rollout.serving import Serving
    from upswing.rollout.sessions import tools_place
    from upswing.trajectory.render import ChatRenderer

    renderer = ChatRenderer(load_tokenizer(model, None if recipe is None else recipe.chat_template))
    tools_in = tools_place(renderer, manner.tools_in, manner.protocol, "--tools-in")
    loaded = load_model(model, tokenizer=renderer.tokenizer)
    engine = TorchEngine.from_model(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_slots=max_slots,
        max_context=manner.context_tokens,
        quantize="int8" if quantize else None,
    )
    serving = Serving(
        name=target,
        engine=engine,
        renderer=renderer,
        end_tokens=renderer.end_tokens(loaded.stop_tokens),
        limits=Limits(turn_tokens=manner.turn_tokens, context_tokens=engine.max_request),
        protocol=manner.protocol,
        tools_in=tools_in,
        system=manner.system,
    )
    serve(serving.app(), lifespan="off")


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a model is used to being talked to."""

    protocol: str = "hermes"
    tools_in: str | None = None
    """None: the chat template if it shows tools, else the system message."""
    system: str = ""
    """The system message that it is used to."""
    turn_tokens: int = 1024
    context_tokens: int | None = None
    """None: the model's."""


def manner_of(recipe: Recipe | None, **given: Any) -> Manner:
    """What is `given` (and not None), else as a run's model was trained: by its agent program's section, or as its
    environment opens a task, which isn't tried when `tools_in` is given. Raises ConfigError when that can't be."""
    known = Manner() if recipe is None else _trained(recipe, ask=given.get("tools_in") is None)
    return replace(known, **{name: value for name, value in given.items() if value is not None})


def _trained(recipe: Recipe, *, ask: bool) -> Manner:
    from upswing.envs import environment_factory

    limits = recipe.limits
    known = Manner(turn_tokens=limits.turn_tokens, context_tokens=limits.context_tokens)
    if recipe.agent is not None:
        return replace(known, protocol=recipe.agent.protocol, tools_in=recipe.agent.tools_in)
    env = environment_factory(recipe.env.name, recipe.env.args)()
    known = replace(known, protocol=getattr(env, "protocol", known.protocol))
    if not ask:
        return known
    try:
        opening = asyncio.run(_opening(env, recipe))
    except Exception as problem:
        said = " ".join(f"{type(problem).__name__}: {problem}".split())
        why = f"environment '{recipe.env.name}' can't open a task here, to show how its tools are told ({said})"
        raise ConfigError(f"--tools-in: {why}; say it: {', '.join(PLACES)}") from problem
    system = "\n\n".join(one.content for one in opening.messages if one.role == "system")
    return replace(known, tools_in="template" if opening.tools else "nowhere", system=system)


async def _opening(env: Environment, recipe: Recipe) -> Observation:
    """What the environment itself says before a task's own messages: also a system message that two tasks share."""
    from upswing.trajectory.types import Task
    from upswing.verify.deadline import call_env

    tasks = [Task(id="", messages=())] if recipe.dataset else list(islice(env.tasks("train", recipe.seed), 2))
    first, *others = [tuple(one for one in task.messages if one.role == "system") for task in tasks]
    opening = replace(tasks[0], messages=first if others == [first] else ())
    try:
        found: Observation = await call_env(env.reset, opening, recipe.seed, timeout_s=recipe.limits.env_timeout_s)
    finally:
        await call_env(env.close, timeout_s=recipe.limits.env_timeout_s)
    return found


def _check_choices(protocol: str | None, tools_in: str | None, quantize: str | None) -> None:
    from upswing.envs.tool_env import PROTOCOLS

    for name, value, allowed in (("protocol", protocol, PROTOCOLS), ("tools-in", tools_in, PLACES)):
        if value is not None and value not in allowed:
            raise ConfigError(f"--{name} is '{value}'; allowed: {', '.join(allowed)}")
    if quantize not in (None, "int8"):
        raise ConfigError(f"--quantize is '{quantize}'; allowed: int8")
