"""`upswing plan`: how long a step would take on how many devices, by simulation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from upswing.cli.common import check_run_folder, user_command
from upswing.errors import ConfigError
from upswing.recipe import RlStage, load_recipe

if TYPE_CHECKING:
    import random

    from rich.table import Table

    from upswing.rollout.simulate import Costs, Layout, Plays, Prediction, Turn
    from upswing.trajectory.types import Trajectory

MFU = 0.4
"""Share of a device's peak that training is assumed to reach."""
USABLE = 0.9
"""Share of a device's memory that weights, caches and optimizers may take."""
LEARNER_BYTES = 16
"""A parameter: weights, gradients and two moments in float32. Activations come on top."""
_RUN = "A run folder to take trajectories, costs, slots, batch and group size from: a synchronous one."
_SLOTS = "Completions an engine runs at once, and trajectories an engine in play. [default: 64, or the run's]"
_BANDWIDTH = "Bytes/s that a device reads weights with (bf16)."
_MEMORY = "Of a device, in 1e9 bytes; an engine gets as many devices as it needs, a power of two."
_CACHE = "Bytes of a token's keys and values; 131072: 8 key-value heads of 128 in 32 layers, bf16."
_STEP_S, _ROW_S = "Measured: an engine's step with one completion.", "Measured: more for each further completion."
_TRAIN = "Measured: tokens a learner device learns from in a second."


@user_command
def plan_command(
    run: Annotated[Path | None, typer.Argument(help=_RUN)] = None,
    devices: Annotated[int, Option(min=2, help="Devices for engines and learners together.")] = 8,
    batch: Annotated[int, Option(min=1, help="Tasks a step.")] = 64,
    group: Annotated[int, Option(min=1, help="Trajectories a task.")] = 8,
    staleness: Annotated[int, Option(min=1, help="max_staleness of the asynchronous rows.")] = 2,
    slots: Annotated[int | None, Option(min=1, help=_SLOTS)] = None,
    turns: Annotated[int, Option(min=1, help="Most turns of a trajectory.")] = 3,
    prompt_tokens: Annotated[int, Option(min=1, help="Tokens of a prompt.")] = 500,
    turn_tokens: Annotated[float, Option(min=1, help="Median tokens sampled a turn.")] = 200,
    turn_spread: Annotated[float, Option(min=0, max=3, help="Deviation of their logarithm.")] = 1.0,
    result_tokens: Annotated[int, Option(min=0, help="Tokens of a tool's result.")] = 200,
    tool_s: Annotated[float, Option(min=0, help="Median seconds of a tool call.")] = 1.0,
    tool_spread: Annotated[float, Option(min=0, max=3, help="Deviation of their logarithm.")] = 1.0,
    parameters: Annotated[float, Option(min=1, max=1e15, help="Of the model.")] = 7e9,
    cache_token_bytes: Annotated[float, Option(min=0, max=1e9, help=_CACHE)] = 131072,
    device_memory_gb: Annotated[float, Option(min=1e-3, max=1e6, help=_MEMORY)] = 80,
    bandwidth: Annotated[float, Option(min=1, max=1e18, help=_BANDWIDTH)] = 3e12,
    flops: Annotated[float, Option(min=1, max=1e21, help="Peak FLOP/s of a device.")] = 9e14,
    sync_s: Annotated[float, Option(min=0, help="Seconds to give the engines new weights.")] = 2.0,
    engine_step_s: Annotated[float | None, Option(min=1e-9, help=_STEP_S)] = None,
    engine_row_s: Annotated[float | None, Option(min=0, help=_ROW_S)] = None,
    train_tokens_per_s: Annotated[float | None, Option(min=1e-9, help=_TRAIN)] = None,
    steps: Annotated[int, Option(min=3, help="Steps to simulate.")] = 12,
    seed: Annotated[int, Option(help="Of the drawn lengths.")] = 0,
) -> None:
    """Predict step time, utilisation and staleness: synchronous, one step off and asynchronous.

    The scheduler is training's own; only what takes time is simulated. Costs come from a run, from what you measured,
    or from the model and the device (weights read once a step; 2 FLOP a parameter and token, at 40 % of the peak).
    """
    needs = (1, 1)
    if run is None:
        slots = slots or 64
        mean = turn_tokens * math.exp(turn_spread**2 / 2)
        cached = slots * (prompt_tokens + turns * (mean + result_tokens)) * cache_token_bytes
        needs = fitted(devices, parameters, cached, device_memory_gb)
        from upswing.rollout.simulate import lognormal_plays

        said = f"devices of an engine: {needs[0]}; of the learner: {needs[1]} or more"
        known = dict[str, Any](step_s=engine_step_s, row_s=engine_row_s, train_tokens_per_s=train_tokens_per_s)
        sizes = dict[str, Any](cache_token_bytes=cache_token_bytes, engine_devices=needs[0])
        costs = assumed(parameters, bandwidth, flops, sync_s, **known, **sizes)
        texts = dict[str, Any](turns=turns, prompt_tokens=prompt_tokens, result_tokens=result_tokens)
        drawn = dict[str, Any](turn_tokens=turn_tokens, turn_spread=turn_spread, tool_s=tool_s, tool_spread=tool_spread)
        plays = lognormal_plays(**texts, **drawn)
    else:
        found = measured(run)
        plays, costs, batch, group, slots = found.plays, found.costs, found.batch, found.group, slots or found.slots
        step = f"an engine's step {costs.step_s:.3g} s + {costs.row_s:.2g} s a row"
        said = f"{run}: {batch} tasks x {group}, {slots} slots; {step}"
    from upswing.monitor.progress import Progress

    Progress().note(said)
    same = {"plays": plays, "group_size": group, "costs": costs, "seed": seed, "steps": steps}
    Progress().table(_table(compared(devices, batch, staleness, slots, needs, **same)))


def fitted(devices: int, parameters: float, cached_bytes: float, memory_gb: float) -> tuple[int, int]:
    """Devices of an engine, whose weights are bf16, and the fewest of the learner. Raises ConfigError when there are
    not so many."""
    room = USABLE * memory_gb * 1e9
    engine = 2 ** max(0, math.ceil(math.log2((2 * parameters + cached_bytes) / room)))
    learner = math.ceil(LEARNER_BYTES * parameters / room)
    if engine + learner > devices:
        sizes = f"{parameters:.3g} parameters and {cached_bytes / 1e9:.3g} GB of keys and values"
        raise ConfigError(
            f"--devices: got {devices}; allowed: {engine + learner} or more: with --device-memory-gb {memory_gb:g} an "
            f"engine ({sizes}) takes {engine}, its learner {learner}"
        )
    return engine, learner


def assumed(
    parameters: float,
    bandwidth: float,
    flops: float,
    sync_s: float,
    *,
    step_s: float | None = None,
    row_s: float | None = None,
    train_tokens_per_s: float | None = None,
    cache_token_bytes: float = 131072,
    engine_devices: int = 1,
) -> Costs:
    """Costs from the model and the device where nothing was measured; an engine's devices share its work evenly."""
    from upswing.rollout.simulate import Costs

    token_s = 2 * parameters / flops
    return Costs(
        step_s=step_s or 2 * parameters / bandwidth / engine_devices,
        row_s=token_s / engine_devices if row_s is None else row_s,
        prefill_token_s=token_s / MFU / engine_devices,
        train_token_s=1 / train_tokens_per_s if train_tokens_per_s else 3 * token_s / MFU,
        sync_s=sync_s,
        cache_token_s=cache_token_bytes / bandwidth / engine_devices,
    )


def compared(
    devices: int, batch: int, staleness: int, slots: int, needs: tuple[int, int], **same: Any
) -> list[tuple[str, Layout, Prediction]]:
    """(what, layout, prediction) of the synchronous and the asynchronous loops; `needs`: devices of an engine, and the
    fewest of the learner; `same` goes to `simulate`."""
    from upswing.rollout.scheduler import Pace
    from upswing.rollout.simulate import Layout, best_split, simulate

    together = Layout(engines=devices // needs[0], learners=devices, slots=slots, shared=True)
    rows = [("synchronous, devices take turns", together, simulate(pace=Pace(batch=batch), layout=together, **same))]
    same |= {"slots": slots, "engine_devices": needs[0], "learner_devices": needs[1]}
    for label, lag in (("synchronous, split", 0), ("one step off", 1), (f"asynchronous, {staleness}", staleness)):
        layout, found = best_split(devices, pace=Pace(batch=batch, max_staleness=lag), **same)
        rows.append((label, layout, found))
    return rows


def _table(rows: Sequence[tuple[str, Layout, Prediction]]) -> Table:
    from rich.table import Table

    table = Table("", "engines", "learners", "step s", "x", "tokens/s", "engines busy", "learners busy", "staleness")
    for label, layout, found in rows:
        table.add_row(
            label,
            *(str(number) for number in (layout.engines, layout.learners)),
            f"{found.step_s:.3g}",
            f"{rows[0][2].step_s / found.step_s:.2f}",
            f"{found.sampled_tokens_per_s:.4g}",
            f"{100 * found.engine_busy:.0f} %",
            f"{100 * found.learner_busy:.0f} %",
            f"{found.staleness:.2f} (max {found.max_staleness})",
        )
    return table


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of a run's newest rl stage."""

    plays: Plays
    costs: Costs
    batch: int
    group: int
    slots: int


def measured(run: Path) -> Measured:
    """What a run took. Raises ConfigError for a run that can't be measured.

    A trajectory's turns and tool times are drawn from those that were played. The engine's time is fitted: a row and a
    prompt token cost a fiftieth of a step, and a step what makes a simulated rollout as long as the median one was.
    """
    check_run_folder(run)
    recipe = load_recipe(run)
    from upswing.monitor.metrics import MetricsLog
    from upswing.rollout.scheduler import Pace
    from upswing.rollout.simulate import Costs, Layout, simulate
    from upswing.trajectory.store import TrajectoryStore

    stages = [stage for stage in recipe.stages if isinstance(stage, RlStage)]
    rows = {stage.name: [row for row in MetricsLog(run).read(stage.name) if "rollout_s" in row] for stage in stages}
    stage = next((stage for stage in reversed(stages) if rows[stage.name]), None)
    if stage is None:
        raise ConfigError(f"'{run}' has no finished step of an rl stage to measure")
    for key, usual in (("max_staleness", 0), ("oversample", 0), ("dynamic_sampling", None)):
        if (got := getattr(stage, key)) != usual:
            allowed = f"a run with {key} {'null' if usual is None else usual}, such as a few steps of the same recipe"
            why = "its rollout_s isn't the time of one whole batch"
            raise ConfigError(f"'{run}' can't be measured, {why}: {stage.name}.{key} is {got}; allowed: {allowed}")
    played = [one.trajectory for one in TrajectoryStore(run / "trajectories").read(stage.name)]
    drawn = [turns for turns in map(_turns, played) if turns]
    if not drawn:
        raise ConfigError(f"'{run}' has no stored trajectories of '{stage.name}' to measure")

    def plays(rng: random.Random) -> Sequence[Turn]:
        return rng.choice(drawn)

    def median(key: str) -> float:
        return statistics.median(float(row.get(key, 0.0)) for row in rows[stage.name])

    there, slots = recipe.cluster, recipe.engine.max_slots
    tokens = statistics.fmean(sum(t.new_tokens + t.sampled_tokens for t in turns) for turns in drawn)
    train = median("update_s") * there.learners / (tokens * stage.tasks_per_step * stage.group_size)

    def costs(step_s: float) -> Costs:
        return Costs(
            step_s=step_s, row_s=step_s / 50, prefill_token_s=step_s / 50, train_token_s=train, sync_s=median("sync_s")
        )

    low, high = 1e-6, 10.0
    layout = Layout(engines=there.engines, learners=there.learners, slots=slots)
    same = dict[str, Any](plays=plays, group_size=stage.group_size, layout=layout, steps=4)
    for _ in range(12):
        middle = math.sqrt(low * high)
        found = simulate(pace=Pace(batch=stage.tasks_per_step), costs=costs(middle), **same)
        low, high = (middle, high) if found.wait_s < median("rollout_s") else (low, middle)
    return Measured(
        plays=plays,
        costs=costs(math.sqrt(low * high)),
        batch=stage.tasks_per_step,
        group=stage.group_size,
        slots=slots,
    )


def _turns(trajectory: Trajectory) -> list[Turn]:
    """A trajectory as turns; the environment's time is shared out evenly over those that it answered."""
    from upswing.rollout.simulate import Turn

    turns: list[Turn] = []
    for branch in trajectory.branches:
        for number in sorted(set(branch.turn[branch.sampled].tolist())):
            own = branch.turn == number
            sampled = int((own & branch.sampled).sum())
            turns.append(Turn(new_tokens=int(own.sum()) - sampled, sampled_tokens=sampled))
    env_s = float(trajectory.timing.get("env_s", 0.0)) / max(1, len(turns))
    return [Turn(new_tokens=t.new_tokens, sampled_tokens=t.sampled_tokens, tool_s=env_s) for t in turns]
