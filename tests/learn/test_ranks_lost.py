"""A rank that is stopped within an order, which no collective notices: rank 0 names it and ends. Real processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from upswing.learn import sharded_ranks
from upswing.learn.sharded_ranks import BUILD, Ranks

WAITS = {"in a collective": lambda: dist.all_reduce(torch.zeros(1)), "in Python": lambda: time.sleep(60)}


def follower(ranks, *details):
    os.kill(os.getpid(), signal.SIGSTOP)


def run(waits):
    """What each process does."""
    sharded_ranks.BEAT_S, sharded_ranks.LOST_S, sharded_ranks.GRACE_S = 0.1, 1.0, 3.0
    ranks = Ranks(timeout_s=120)
    if ranks.rank:
        ranks.obey(follower)
    with ranks.losses_named(), ranks.order(BUILD):
        WAITS[waits]()


@pytest.mark.parametrize("waits", WAITS)
def test_a_rank_that_is_stopped_within_an_order_is_named(waits):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, waits], env=os.environ | place | {"RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = processes[0].communicate(timeout=150)[1].decode()
        lost = "rank 1 of 2 ended without a word (killed, or out of memory?); start the run again with --resume"
        assert processes[0].returncode == 1 and re.search(rf"UpswingError: {re.escape(lost)}\n$", said), said
        assert ("Traceback" in said) is (waits == "in Python"), "where Python still runs it is raised"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    run(sys.argv[1])
