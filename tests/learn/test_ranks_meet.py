"""A rank that doesn't come, or dies before all are there, is noticed in seconds. In one process: of the other ranks
there is only what they would write to the store; test_sharded.py has real ones."""

import asyncio
import re
import signal
import threading
import time

import pytest
import torch
from torch.distributed import TCPStore

from upswing.errors import ConfigError, UpswingError
from upswing.learn import sharded_ranks
from upswing.learn.sharded_ranks import Ranks

PLACE = {"RANK": "0", "WORLD_SIZE": "3"}


@pytest.fixture
def store(monkeypatch):
    """Joining takes for ever, as it does when somebody is missing."""
    monkeypatch.setattr(sharded_ranks, "BEAT_S", 0.02)
    monkeypatch.setattr(sharded_ranks, "SILENT_S", 0.2)
    monkeypatch.setattr(Ranks, "_join", lambda self, *args: threading.Event().wait())
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def come(store, rank, device="cpu", beats=1):
    other = TCPStore(store.host, store.port, wait_for_workers=False)
    other.set(f"device/{rank}", device)
    for _ in range(beats):
        other.add(f"beat/{rank}", 1)
        time.sleep(0.02 * (beats > 1))
    return other


def refused(store, message, timeout_s=60.0, **options):
    before, started = signal.getsignal(signal.SIGTERM), time.monotonic()
    with pytest.raises(UpswingError, match=re.escape(message)):
        Ranks(PLACE, store=store, timeout_s=timeout_s, **options)
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_has_come_and_is_silent_is_lost(store):
    come(store, 1)
    alive = threading.Thread(target=come, args=(store, 2, "cpu", 100), daemon=True)
    alive.start()
    refused(store, "rank 1 of 3 ended without a word (killed, or out of memory?)")


def test_one_that_says_why_it_failed_is_believed(store):
    other = come(store, 2)
    assert other.add("failures", 1) == 1
    other.set("failure/1", "rank 2 failed at waiting: OSError: the disk is full")
    refused(store, "rank 2 failed at waiting: OSError: the disk is full")


def test_those_that_never_come_are_named(store, monkeypatch):
    monkeypatch.setattr(sharded_ranks, "SILENT_S", 60.0)
    come(store, 1)
    refused(store, "rank 2 of 3 didn't come", timeout_s=0.3)
    refused(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "ranks 1, 2 of 3 didn't come", 0.3)


def test_whoever_started_the_others_may_know_better(store):
    def watch():
        raise UpswingError("rank 2 of 3 can't start: no such package")

    refused(store, "rank 2 of 3 can't start: no such package", watch=watch)


def test_what_joining_raises_is_one_line(store, monkeypatch):
    def broken(self, *args):
        raise RuntimeError("Connection\nrefused")

    monkeypatch.setattr(Ranks, "_join", broken)
    for rank in (1, 2):
        threading.Thread(target=come, args=(store, rank, "cpu", 100), daemon=True).start()
        while not store.add(f"beat/{rank}", 0):
            time.sleep(0.01)
    refused(store, "the ranks can't reach each other (Connection refused)")


def test_torchrun_ends_the_wait_when_a_rank_has_ended(store):
    """It sends SIGTERM."""
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGTERM)).start()
    come(store, 1)
    refused(store, "rank 1 of 3 ended without a word")


@pytest.mark.parametrize("size", [1, 2])
def test_sigterm_ends_a_run_as_an_interrupt_does(store, monkeypatch, size):
    """What is in play may take no notice of other errors. A lost rank is named in the end."""
    monkeypatch.setattr(Ranks, "_join", lambda self, *args: None)
    ended = []

    async def trajectory():
        while True:
            try:
                await asyncio.sleep(0)
            except Exception:
                ended.append("swallowed")

    async def run():
        try:
            await asyncio.ensure_future(trajectory())
        finally:
            ended.append("saved")

    ranks = Ranks({"RANK": "0", "WORLD_SIZE": str(size)}, store=store)
    if size > 1:
        come(store, 1)
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM)).start()
    error, message = (KeyboardInterrupt, None) if size == 1 else (UpswingError, "rank 1 of 2 ended without a word")
    with pytest.raises(error, match=message), ranks.losses_named():
        asyncio.run(run())
    assert ended == ["saved"]
    signal.signal(signal.SIGTERM, ranks._before)


def test_ranks_on_different_devices_never_meet(store):
    come(store, 2, "cuda")
    refused(store, "rank 2 of 3 computes on cuda, rank 0 on cpu; give each rank a GPU, or hide")


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2, and rank 2 on it finds none; start at most 2"):
        Ranks({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2"})
