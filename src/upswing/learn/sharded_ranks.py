"""The processes of a run on several ranks: rank 0 drives, the others do what it orders, and a lost one is noticed.

`torchrun` starts them, and ends them all when one of them ends. An order is done by all ranks in step, through
collectives; after a failure in one there is nothing to go on from but the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from upswing.errors import UpswingError

TIMEOUT_S = 600.0
"""How long a rank waits for the others within an order. Between two orders it waits for as long as it takes."""
BEAT_S = 1.0
BUILD, END = "build", "end"
AGAIN = "start the run again with --resume"


class Ranks:
    """This process's place among them."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the others, as the environment variables of torchrun say; on CUDA a rank has the GPU of its number."""
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        timeout = timedelta(seconds=timeout_s)
        self._store, self.rank, self.size = next(iter(rendezvous("env://", timeout=timeout)))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )
        self.mesh = init_device_mesh(self.device.type, (self.size,))
        self._orders = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.built = 0
        """Learners so far; orders are for the newest."""
        self._busy, self._broken, self._done = False, "", threading.Event()
        if self.rank == 0:
            signal.signal(signal.SIGTERM, self._terminated)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is rank 0's to deal with
            threading.Thread(target=self._beat, daemon=True).start()

    # -- rank 0 --------------------------------------------------------------------------------------------------------

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
            lost = self.lost() if isinstance(error, RuntimeError) and not isinstance(error, UpswingError) else None
            if lost is not None:
                raise lost from error
            raise
        finally:
            self._busy = False

    def lost(self) -> UpswingError | None:
        """Which other ranks have failed or are gone, if any; takes a few beats."""
        self._broken = self._broken or f"a rank is gone; {AGAIN}"
        before = self._beats()
        time.sleep(3 * BEAT_S)
        told = [self._store.get(f"failure/{n}").decode() for n in range(1, self._store.add("failures", 0) + 1)]
        told = [text for text in told if not text.startswith("rank 0 ")]
        speaking = {text.split()[1] for text in told}
        silent = [r for r, beat in self._beats().items() if before[r] == beat and str(r) not in speaking]
        if silent:
            which = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
            return UpswingError(f"{which} of {self.size} ended without a word (killed, or out of memory?); {AGAIN}")
        return UpswingError(f"{told[0]}; {AGAIN}") if told else None

    def end(self) -> None:
        """Let the others go."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._broken:
            with suppress(RuntimeError):  # one that is gone: nothing is asked of it any more
                dist.broadcast_object_list([(END,)], src=0, group=self._orders)
                dist.destroy_process_group()

    def _beats(self) -> dict[int, int]:
        return {rank: self._store.add(f"beat/{rank}", 0) for rank in range(1, self.size)}

    def _terminated(self, *_: object) -> None:
        """Of torchrun, as a rule, because another rank has ended."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._broken:
            raise self.lost() or UpswingError(f"ended by SIGTERM; {AGAIN}")

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
        while not self._done.wait(BEAT_S):
            try:
                self._store.add(f"beat/{self.rank}", 1)
            except RuntimeError:  # the store went with its host
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
