"""Further ranks of the learner as actors, in place of torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from upswing.cluster.actors import Cluster, enter, first_line
from upswing.errors import UpswingError
from upswing.learn.sharded import follow, lead


class RankActor:
    """A rank that follows rank 0, the process of the run."""

    def __init__(self, folder: str) -> None:
        enter(folder)

    def follow(self, place: Mapping[str, str]) -> None:
        follow(place)


@contextmanager
def led(cluster: Cluster) -> Iterator[None]:
    """Learners made inside are on `cluster.learners` ranks. Raises UpswingError when one of them can't start."""
    section, ray = cluster.section, cluster.ray
    if section.learners == 1:
        yield
        return
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)  # at a free port
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(section.learners)}
    first = section.engines + section.env_workers - 1
    actors = [cluster.start(RankActor, first + rank, os.getcwd()) for rank in range(1, section.learners)]
    ends = [actor.follow.remote({**place, "RANK": str(rank)}) for rank, actor in enumerate(actors, start=1)]

    def watch() -> None:
        """Raises UpswingError for a rank that has ended."""
        for end in ray.wait(ends, timeout=0)[0]:
            which = f"rank {ends.index(end) + 1} of {section.learners}"
            try:
                ray.get(end)
            except ray.exceptions.RayError as problem:
                why = first_line(getattr(problem, "cause", problem))
                raise UpswingError(f"{which} can't start: {why}") from problem

    with lead({**place, "RANK": "0"}, store=store, watch=watch):
        yield
