"""`upswing tools serve`: tools for other trainers, over HTTP by VerlTool's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from upswing.cli.common import Host, Port, is_run_folder, listen, user_command
from upswing.errors import ConfigError

if TYPE_CHECKING:
    from upswing.envs import Environment

tools_app = typer.Typer(help="Serve tools to other programs.", no_args_is_help=True)
ENDLESS = 10**9
"""Whoever asks counts the turns."""


@tools_app.callback()
def _group() -> None:
    pass


@tools_app.command("serve")
@user_command
def serve_command(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]... | TOOL...",
            help="A recipe, whose environment is served, or functions such as tools.py:search.",
        ),
    ],
    host: Host = "127.0.0.1",
    port: Port = 5000,
    protocol: Annotated[str | None, typer.Option(help="How calls are written, for functions; hermes, say.")] = None,
    step_timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that an action may take.")] = 60.0,
    idle_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until an idle trajectory is forgotten.")
    ] = 600.0,
) -> None:
    """Serve tools, or a recipe's environment, by VerlTool's protocol (POST /get_observation)."""
    from upswing.envs.tool_server import PATH, ToolService

    make_env = _environment(source, protocol)
    service = ToolService(make_env, step_timeout_s=step_timeout, idle_timeout_s=idle_timeout)
    listen(host, port, PATH)(service.app())


def _environment(source: list[str], protocol: str | None) -> Callable[[], Environment]:
    """What makes an environment for every trajectory. Raises ConfigError."""
    from upswing.envs import environment_factory
    from upswing.trajectory.types import Task

    first, *rest = source
    if first.endswith((".yaml", ".yml")) or is_run_folder(Path(first)):
        from upswing.recipe import load_recipe

        if protocol is not None:
            raise ConfigError("--protocol is for functions; of a recipe, set env.args.protocol=…")
        env = load_recipe(first, rest).env
        return environment_factory(env.name, env.args)
    if ":" not in first:
        raise ConfigError(f"'{first}' is no recipe (.yaml) and no function (path/file.py:name or my_pkg.module:name)")
    args = {"tools": source, "max_turns": ENDLESS, "max_invalid_calls": ENDLESS, "tools_in_system": True}
    make_env = environment_factory("tool", args | ({"protocol": protocol} if protocol else {}))
    opening = asyncio.run(make_env().reset(Task(id="", messages=()), 0))
    typer.echo(opening.messages[0].content)  # what a prompt has to say of the tools
    return make_env
