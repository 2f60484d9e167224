"""Threads that bring experts into slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from relume.config import require
from relume.core import RelumeError
from relume.experts.arena import Arena, Lease
from relume.experts.source import ExpertSource
from relume.machine.workers import keep_num_threads, one_thread

#: Seconds without an arrival after which a wait is given up. The slowest disk that makes sense brings an expert of
#: a few MB well within it; a network file system that has lost its server never does.
PATIENCE_S = 120.0


@dataclass(eq=False)
class Load:
    """One expert on its way to a slot.

    Attributes:
        finished: takes this load when it has ended.
        bytes_from_disk, error: set when it has ended.
        began, ended: `perf_counter` times of the read itself.
    """

    layer: int
    expert: int
    lease: Lease
    finished: SimpleQueue[Load]
    bytes_from_disk: int = 0
    error: Exception | None = None
    began: float = 0.0
    ended: float = 0.0


class Loader:
    """Several reads in flight; those still queued can be forgotten.

    Args:
        source: where experts come from; also an attribute.
        arena: where they go.
        num_threads: reads in flight.

    Attributes:
        patience_s: without an arrival for so long, whoever waits is told what is stuck.
    """

    def __init__(self, source: ExpertSource, arena: Arena, num_threads: int) -> None:
        self.source = source
        self.patience_s = PATIENCE_S
        self._arena = arena
        self._queue: deque[Load] = deque()
        self._reading: list[Load] = []
        # Held as it is, not through its conditions: they are Python code, and an interrupt could leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._alone = threading.Semaphore(0)  # released by each thread that computes alone from now on
        try:
            for index in range(num_threads):
                thread = threading.Thread(target=self._work, name=f"relume-read-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
                self._alone.acquire()
            keep_num_threads()
        except BaseException:
            self.close()
            raise

    @property
    def num_threads(self) -> int:
        """Reads in flight at most."""
        return len(self._threads)

    def submit(self, load: Load) -> None:
        """Queue a load; it ends up in its `finished`, with an error if it failed."""
        with self._lock:
            require(not self._closed, "the engine was closed: load the model again")
            self._queue.append(load)
            self._changed.notify()

    def wait(self, finished: SimpleQueue[Load]) -> list[Load]:
        """Wait for one load to end, and take all that have ended by then.

        Raises:
            RelumeError: none did for `patience_s`; names what is being read for longest.
        """
        try:
            loads = [finished.get(timeout=self.patience_s)]
        except Empty:
            raise RelumeError(self._overdue()) from None
        with suppress(Empty):
            while True:
                loads.append(finished.get_nowait())
        return loads

    def halt(self) -> list[Load]:
        """Forget what is queued and wait for what is being read; returns what `patience_s` did not bring."""
        with self._lock:
            self._queue.clear()
            while self._reading:
                left = min(load.began for load in self._reading) + self.patience_s - time.perf_counter()
                if left <= 0:
                    break
                self._idle.wait(left)
            return list(self._reading)

    def close(self) -> None:
        """End the threads and close the source; reads that do not end keep both until they do."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self.halt():
            return
        for thread in self._threads:
            thread.join()
        self.source.close()

    def _overdue(self) -> str:
        with self._lock:
            load = min(self._reading, key=lambda load: load.began, default=None)
        if load is None:
            return f"no expert arrived for {self.patience_s:g} s and none is being read: load the model again"
        place = self.source.place(load.layer, load.expert)
        return (
            f"{place}: no read has ended for {self.patience_s:g} s, and this is the oldest; check the disk or the "
            "network file system, then ask again"
        )

    def _work(self) -> None:
        with one_thread(), torch.inference_mode():
            self._alone.release()
            while True:
                with self._lock:
                    while not self._queue and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    load = self._queue.popleft()
                    load.began = time.perf_counter()
                    self._reading.append(load)
                self._read(load)
                with self._lock:
                    self._reading.remove(load)
                    was_last = not self._reading
                    if was_last:
                        self._idle.notify_all()
                    gone = was_last and self._closed  # `close` did not wait
                if gone:
                    self.source.close()
                del load

    def _read(self, load: Load) -> None:
        try:
            views = self._arena.views(load.lease)
            load.bytes_from_disk = self.source.read(load.layer, load.expert, views)
        except Exception as error:
            load.error = error
        load.ended = time.perf_counter()
        load.finished.put(load)
