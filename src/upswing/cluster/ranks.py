"""Further ranks of the learner as actors, in place of torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from upswing.cluster.actors import Cluster, enter
from upswing.learn.sharded import follow, lead


class RankActor:
    """A rank that follows rank 0, the process of the run."""

    def __init__(self, folder: str) -> None:
        enter(folder)

    def follow(self, place: Mapping[str, str]) -> None:
        os.environ.update(place)
        follow()


@contextmanager
def led(cluster: Cluster) -> Iterator[None]:
    """Learners made inside are on `cluster.learners` ranks."""
    section = cluster.section
    if section.learners == 1:
        yield
        return
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host = cluster.ray.util.get_node_ip_address()
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(section.learners), "LOCAL_RANK": "0"}
    first = section.engines + section.env_workers - 1
    actors = [cluster.start(RankActor, first + rank, os.getcwd()) for rank in range(1, section.learners)]
    for rank, actor in enumerate(actors, start=1):
        actor.follow.remote({**place, "RANK": str(rank)})
    before = dict(os.environ)
    os.environ.update({**place, "RANK": "0"})
    try:
        with lead():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for actor in actors:
            cluster.ray.kill(actor)
