"""The `cluster` section: on which machines the parts of a run are."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from upswing.recipe.engine import EngineSection
from upswing.recipe.fields import Count, CountOrZero, NotNegative, Positive, Text
from upswing.recipe.section import Section, null, opt, refuse


class ClusterSection(Section):
    """Where the parts of a run are: all in one process, or engines, environments, verifiers and further ranks of the
    learner as actors of a Ray cluster (docs/distributed.md). `upswing run --cluster ray` sets `kind`."""

    kind: Literal["local", "ray"] = opt("local", "One process, or actors of Ray.")
    address: Text | None = null(
        "Of a Ray cluster: its host:port, or auto, the one that this machine belongs to; null: one is "
        "started on this machine."
    )
    engines: Count = opt(1, "Engines, each with max_slots of its own.")
    engine_cpus: Count = opt(1, "Processors, and threads, of an engine.")
    engine_gpus: NotNegative | None = null("GPUs of an engine; below 1: a share. null: 1 where there are any, else 0.")
    env_workers: CountOrZero = opt(
        0, "Processes that play environments and run verifiers; 0: the process of the run does."
    )
    env_cpus: Positive = opt(1.0, "Processors of such a process.")
    learners: Count = opt(1, "Ranks of the learner, the process of the run among them; on GPUs each takes one.")
    learner_cpus: Count = opt(1, "Processors of each further rank.")
    placement: Literal["pack", "spread", "strict_pack", "strict_spread"] = opt(
        "pack", "Few machines, or many; strict: one, or one each, or an error."
    )

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for name, field in type(self).model_fields.items():
            got = getattr(self, name)
            if self.kind == "local" and name != "kind" and got != field.default:
                raise refuse(name, f"got {got!r} without effect: kind is local; add kind: ray, or --cluster ray")
        for name, of, none in (("env_cpus", "env_workers", 0), ("learner_cpus", "learners", 1)):
            got = getattr(self, name)
            if getattr(self, of) == none and got != type(self).model_fields[name].default:
                raise refuse(name, f"got {got:g} without effect: {of} is {none}; raise that, or leave it out")
        if (gpus := self.engine_gpus or 0) > 1 and gpus % 1:
            raise refuse("engine_gpus", f"got {gpus:g}; allowed: a share of one GPU, or whole ones")
        if self.address is not None and self.address.startswith("ray://"):
            instead = "start this on a machine of the cluster, with auto or host:port"
            raise refuse("address", f"got '{self.address}', Ray's client, which can't start a learner; {instead}")
        return self


def check_cluster(cluster: ClusterSection, engine: EngineSection, *, agent: bool) -> None:
    """Raises for what doesn't go together."""
    if cluster.kind == "ray" and engine.kind != "torch":
        allowed = "torch (or kind local, which uses the server at engine.url, wherever that is)"
        why = "but cluster.kind ray starts embedded engines"
        raise refuse("engine.kind", f"got '{engine.kind}', {why}; allowed: {allowed}")
    if cluster.env_workers and agent:
        why = "the agent program plays in place of the environment"
        raise refuse("cluster.env_workers", f"got {cluster.env_workers} without effect: {why}")
