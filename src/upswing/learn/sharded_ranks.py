"""The processes of a run on several ranks: rank 0 drives, the others do what it orders, and a lost one is noticed.

torchrun or Ray's back end starts them, and ends them all when one of them ends. An order is done by all ranks in step,
through collectives; after a failure in one there is nothing to go on from but the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from upswing.errors import ConfigError, UpswingError

TIMEOUT_S = 600.0
"""How long a rank waits for the others to come, and within an order; between two orders as long as it takes."""
BEAT_S = 1.0
SILENT_S = 15.0
"""A rank that has come and isn't heard for so long before all are there is lost: then nothing keeps it busy."""
LOST_S = 60.0
"""The same within an order, where a rank may be too busy to be heard for a while."""
GRACE_S = 10.0
"""For so long rank 0 may take to end by itself, once one is lost within an order."""
BUILD, END = "build", "end"
AGAIN = "start the run again with --resume"


class Ranks:
    """This process's place among them."""

    def __init__(
        self,
        place: Mapping[str, str] = os.environ,
        *,
        store: TCPStore | None = None,
        watch: Callable[[], object] = lambda: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Meet the others, as torchrun's variables in `place` say; on CUDA a rank has the GPU of its number.

        `store`: rank 0's, where `place` names none. `watch` is called while rank 0 waits for the others, and raises
        when one can't come. Raises ConfigError for more ranks than GPUs, UpswingError when a rank doesn't come or ends.
        """
        if dist.is_initialized():
            raise UpswingError("torch.distributed is in use, by ranks that failed, maybe; start a new process")
        self.rank, self.size, timeout = int(place["RANK"]), int(place["WORLD_SIZE"]), timedelta(seconds=timeout_s)
        self.device = _device(int(place.get("LOCAL_RANK", 0)))
        self._busy, self._broken, self._loss, self._done = False, "", "", threading.Event()
        self.built = 0
        """Learners so far; orders are for the newest."""
        if store is None:
            keeps = self.rank == 0 and place.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            address = place["MASTER_ADDR"], int(place["MASTER_PORT"])
            store = TCPStore(*address, is_master=keeps, timeout=timeout, wait_for_workers=False)
        store.set_timeout(timeout)
        # A connection of its own: one is blocked while a process group waits for what another rank is to write.
        self._store = TCPStore(store.host, store.port, timeout=timeout, wait_for_workers=False)
        if self.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is rank 0's to deal with
            self._store.set(f"device/{self.rank}", self.device.type)
            threading.Thread(target=self._beat, daemon=True).start()
            self._join(store, timeout)
            return
        self._before = signal.signal(signal.SIGTERM, self._terminated) or signal.SIG_DFL
        try:
            with self.losses_named():
                self._wait(_begun(lambda: self._join(store, timeout)), watch, timeout_s)
            threading.Thread(target=self._guard, daemon=True).start()
        except BaseException:
            self._broken = f"the ranks haven't met; {AGAIN}"
            self.end()
            raise

    def _join(self, store: TCPStore, timeout: timedelta) -> None:
        """Raises RuntimeError when not all come in time."""
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.mesh = init_device_mesh(self.device.type, (self.size,))
        self._orders = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _wait(self, joined: Future[None], watch: Callable[[], object], timeout_s: float) -> None:
        """Until all are there. Joining itself would wait for one that has ended as for one that is slow."""
        until, heard = time.monotonic() + timeout_s, dict[int, tuple[int, float]]()
        while not wait({joined}, BEAT_S).done:
            watch()
            now = time.monotonic()
            for rank, beat in self._beats().items():
                if beat and rank not in heard:
                    self._check_device(rank)
                if beat != heard.get(rank, (0,))[0]:
                    heard[rank] = beat, now
            silent = [rank for rank, (_, when) in heard.items() if now - when > SILENT_S]
            missing = [rank for rank in range(1, self.size) if rank not in heard] if now > until else []
            if told := self._told(silent, missing):
                raise UpswingError(f"{told}; {AGAIN}")
        if (problem := joined.exception()) is not None:
            why = f"the ranks can't reach each other ({' '.join(str(problem).split())})"
            raise UpswingError(self.lost() or why) from problem

    def _check_device(self, rank: int) -> None:
        """Raises UpswingError when ranks that compute on different kinds of devices would talk past each other."""
        if (kind := self._store.get(f"device/{rank}").decode()) != self.device.type:
            raise UpswingError(
                f"rank {rank} of {self.size} computes on {kind}, rank 0 on {self.device.type}; give each rank a GPU, "
                "or hide those there are (CUDA_VISIBLE_DEVICES='')"
            )

    @contextmanager
    def order(self, name: str, *details: Any) -> Iterator[None]:
        """On rank 0: the others do this order while the body does it here. On others, or within an order: the body.

        Raises UpswingError that names the rank when another one fails or is gone.
        """
        if self.rank or self._busy:
            yield
            return
        if self._broken:
            raise UpswingError(self._broken)
        self._busy = True
        try:
            dist.broadcast_object_list([(name, *details)], src=0, group=self._orders)
            yield
        except BaseException as error:
            self._broken = f"the ranks are out of step since '{name}' failed; {AGAIN}"
            self._tell(f"{name}: {type(error).__name__}: {error}")
            unclear = isinstance(error, RuntimeError) and not isinstance(error, UpswingError)
            if unclear and (loss := self.lost()):
                raise UpswingError(loss) from error
            raise
        finally:
            self._busy = False

    def _guard(self) -> None:
        """End the process, and say why, when a rank is lost within an order: collectives would wait for it for ever, on
        NCCL in a place that no signal reaches."""
        heard: dict[int, tuple[int, float]] = {}
        with suppress(RuntimeError):  # the store went with its host
            while not self._done.wait(BEAT_S):
                now = time.monotonic()
                for rank, beat in self._beats().items():
                    if not self._busy or beat != heard.get(rank, (0,))[0]:
                        heard[rank] = beat, now
                silent = [rank for rank, (_, when) in heard.items() if now - when > LOST_S]
                if silent:
                    told = f"error: UpswingError: {self._told(silent, [])}; {AGAIN}"
                    os.kill(os.getpid(), signal.SIGTERM)  # where Python still runs, all is put away
                    if not self._done.wait(GRACE_S) and self._busy:
                        print(told, file=sys.stderr, flush=True)
                        os._exit(1)
                    return

    def lost(self) -> str:
        """Which other ranks have failed or are gone, of which nothing is asked any more; empty: none. Takes a few
        beats."""
        before = self._beats()
        time.sleep(3 * BEAT_S)
        silent = [rank for rank, beat in self._beats().items() if before[rank] == beat]
        if told := self._told([rank for rank in silent if before[rank]], [rank for rank in silent if not before[rank]]):
            self._loss = self._broken = f"{told}; {AGAIN}"
        return self._loss

    @contextmanager
    def losses_named(self) -> Iterator[None]:
        """An interrupt that comes because a rank is lost (`_terminated`) is raised as UpswingError that says which."""
        try:
            yield
        except KeyboardInterrupt as error:
            if self._loss:
                raise UpswingError(self._loss) from error
            raise

    def _told(self, silent: Iterable[int], missing: Iterable[int]) -> str:
        """What is wrong with other ranks, the most telling first: those that are silent, or what the first that failed
        said, or those that never came. Empty: nothing."""
        count = self._store.add("failures", 0)
        said = [self._store.get(f"failure/{number}").decode() for number in range(1, count + 1)]
        said = [text for text in said if not text.startswith("rank 0 ")]
        speaking = {text.split()[1] for text in said}
        if quiet := [rank for rank in silent if str(rank) not in speaking]:
            return f"{self._named(quiet)} ended without a word (killed, or out of memory?)"
        if said:
            return said[0]
        return f"{self._named(missing)} didn't come (see what it said)" if missing else ""

    def _named(self, ranks: Iterable[int]) -> str:
        numbers = list(map(str, ranks))
        return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {self.size}"

    def end(self) -> None:
        """Let the others go."""
        self._done.set()
        signal.signal(signal.SIGTERM, self._before)
        if not self._broken:
            with suppress(RuntimeError):  # one that is gone: nothing is asked of it any more
                dist.broadcast_object_list([(END,)], src=0, group=self._orders)
                dist.destroy_process_group()

    def _beats(self) -> dict[int, int]:
        return {rank: self._store.add(f"beat/{rank}", 0) for rank in range(1, self.size)}

    def _terminated(self, *_: object) -> None:
        """Of torchrun, as a rule, because another rank has ended. Ends as Ctrl-C does: an error raised here, wherever
        that is, could be taken for a trajectory's."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._broken:
            self.lost()
            interrupt = signal.getsignal(signal.SIGINT)
            (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, None)

    # -- the others ----------------------------------------------------------------------------------------------------

    def obey(self, build: Callable[..., Any]) -> None:
        """Do what rank 0 orders until it ends the run: `build(self, *details)` a learner, or call a method of it.

        Raises UpswingError when rank 0 is gone.
        """
        learner: Any = None
        name = "waiting"
        try:
            while name != END:
                box: list[Any] = [None]
                dist.broadcast_object_list(box, src=0, group=self._orders)
                name, *details = box[0]
                if name == BUILD:
                    learner = None  # its memory first
                    learner = build(self, *details)
                elif name != END:
                    args, kwargs, shared = details
                    vars(learner).update(shared)
                    getattr(learner, name)(*args, **kwargs)
                name = name if name == END else "waiting"
        except Exception as error:
            first = self._tell(f"{name}: {type(error).__name__}: {error}")
            if name == "waiting" or not first:  # what failed is elsewhere
                raise UpswingError(f"rank {self.rank} ends, because another one did") from error
            raise
        finally:
            self._done.set()
        dist.destroy_process_group()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store went with its host
            while True:
                self._store.add(f"beat/{self.rank}", 1)
                if self._done.wait(BEAT_S):
                    return

    # -- all -----------------------------------------------------------------------------------------------------------

    def _tell(self, what: str) -> bool:
        """Leave word of a failure -> whether it is the first."""
        try:
            number = self._store.add("failures", 1)
            self._store.set(f"failure/{number}", f"rank {self.rank} failed at {' '.join(what.split())[:500]}")
        except RuntimeError:
            return False
        return bool(number == 1)

    def gathered(self, mine: Any) -> list[Any]:
        """`mine` of every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found


def _device(number: int) -> torch.device:
    """Of a rank, by its number on this machine. Raises ConfigError when there is no such GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if number >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"each rank takes a GPU, but this machine has {count}, and rank {number} on it finds none; start at most "
            f"{count} here (--nproc-per-node)"
        )
    torch.cuda.set_device(number)
    torch.cuda.init()  # type: ignore[no-untyped-call]  # else the mesh would choose again
    return torch.device("cuda", number)


def _begun(work: Callable[[], None]) -> Future[None]:
    """`work`, in a thread that the process's end doesn't wait for."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as problem:
            done.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return done
