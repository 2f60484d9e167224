"""Threads that bring experts into slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from relume.config import require
from relume.core import RelumeError
from relume.experts.arena import Arena, Lease
from relume.experts.copies import CopyLane
from relume.experts.source import ExpertSource
from relume.machine.workers import keep_num_threads, one_thread

#: Seconds without an arrival after which a wait is given up. The slowest disk that makes sense brings an expert of
#: a few MB well within it; a network file system that has lost its server never does.
PATIENCE_S = 120.0


class AbandonedError(Exception):
    """Nobody wants this load any more."""


@dataclass(eq=False)
class Load:
    """One expert on its way to a slot.

    Attributes:
        finished: takes this load when it has ended.
        ahead: nobody waits for it yet, so it gives way to those that are waited for.
        abandoned: it is to end as soon as it can.
        bytes_from_disk, error: set when it has ended.
        began, ended: `perf_counter` times of the read itself; 0 before.
    """

    layer: int
    expert: int
    lease: Lease
    finished: SimpleQueue[Load]
    ahead: bool = False
    abandoned: bool = False
    bytes_from_disk: int = 0
    error: Exception | None = None
    began: float = 0.0
    ended: float = 0.0


class Loader:
    """Several reads in flight; those still queued can be forgotten.

    Loads that are brought ahead have a thread of their own, which reads only while nothing is waited for: a load
    that is asked for meanwhile finds at most one part of such a read in its way.

    Args:
        source: where experts come from; also an attribute.
        arena: where they go.
        copies: puts them there; also an attribute.
        num_threads: reads in flight.
        ahead: whether experts are brought ahead.

    Attributes:
        patience_s: without an arrival for so long, whoever waits is told what is stuck.
    """

    def __init__(
        self, source: ExpertSource, arena: Arena, copies: CopyLane, num_threads: int, ahead: bool = False
    ) -> None:
        self.source = source
        self.copies = copies
        self.patience_s = PATIENCE_S
        self.num_threads = num_threads
        self._arena = arena
        self._queue: deque[Load] = deque()
        self._ahead: deque[Load] = deque()
        self._reading: list[Load] = []
        # Held as it is, not through its conditions: they are Python code, and an interrupt could leave it locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for those who read
        self._calm = threading.Condition(self._lock)  # for the one who reads ahead
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._alone = threading.Semaphore(0)  # released by each thread that computes alone from now on
        try:
            for index in range(num_threads):
                self._start(f"relume-read-{index}", self._next)
            if ahead:
                self._start("relume-read-ahead", self._next_ahead)
            keep_num_threads()
        except BaseException:
            self.close()
            raise

    def submit(self, load: Load) -> None:
        """Queue a load, or begin a copy that needs no thread.

        It ends up in its `finished`, with an error if it failed.
        """
        require(not self._closed, "the engine was closed: load the model again")
        began = time.perf_counter()
        if self.copies.start(load.layer, load.expert, load.lease.slot, self._arena.views(load.lease)):
            load.began, load.ended = began, time.perf_counter()
            load.finished.put(load)
            return
        with self._lock:
            self._queue.append(load)
            self._changed.notify()

    def bring_ahead(self, loads: Sequence[Load]) -> list[Load]:
        """Let these, and no others, be read while nothing is waited for; returns those that were queued till now.

        One that is being read goes on.
        """
        with self._lock:
            before, self._ahead = self._ahead, deque(load for load in loads if not load.began)
            self._calm.notify()
            return [load for load in before if load not in self._ahead]

    def hurry(self, load: Load, finished: SimpleQueue[Load]) -> None:
        """Somebody waits for a load that was brought ahead: it ends up in `finished`, if it has not ended yet."""
        with self._lock:
            load.ahead = False
            if load.ended:
                finished.put(load)
                return
            load.finished = finished
            if load in self._ahead:
                self._ahead.remove(load)
                self._queue.append(load)
                self._changed.notify()
            else:
                self._calm.notify()

    def wait(self, finished: SimpleQueue[Load], most: int | None = None) -> list[Load]:
        """Wait for one load to end, and take all that have ended by then, or the first `most`.

        Raises:
            RelumeError: none did for `patience_s`; names what is being read for longest.
        """
        try:
            loads = [finished.get(timeout=self.patience_s)]
        except Empty:
            raise RelumeError(self._overdue()) from None
        with suppress(Empty):
            while most is None or len(loads) < most:
                loads.append(finished.get_nowait())
        return loads

    def halt(self) -> list[Load]:
        """Forget what is queued and wait for what is being read; returns what `patience_s` did not bring."""
        with self._lock:
            self._queue.clear()
            self._ahead.clear()
            for load in self._reading:
                load.abandoned = True
            self._calm.notify()
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
            self._calm.notify_all()
        if self.halt():
            return
        for thread in self._threads:
            thread.join()
        self._release()

    def _release(self) -> None:
        self.copies.close()  # which may still be copying from what the source holds
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

    @property
    def _busy(self) -> bool:
        """Whether anything is waited for."""
        return bool(self._queue) or any(not load.ahead for load in self._reading)

    def _start(self, name: str, take: Callable[[], Load | None]) -> None:
        thread = threading.Thread(target=self._work, args=(take,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._alone.acquire()

    def _next(self) -> Load | None:
        """The next load that is waited for; `None` if the loader is closed. With the lock held."""
        while not self._queue and not self._closed:
            self._changed.wait()
        return None if self._closed else self._queue.popleft()

    def _next_ahead(self) -> Load | None:
        """The next load to bring ahead, likewise."""
        while (self._busy or not self._ahead) and not self._closed:
            self._calm.wait()
        return None if self._closed else self._ahead.popleft()

    def _work(self, take: Callable[[], Load | None]) -> None:
        with one_thread(), torch.inference_mode():
            self._alone.release()
            while True:
                with self._lock:
                    load = take()
                    if load is None:
                        return
                    load.began = time.perf_counter()
                    self._reading.append(load)
                self._read(load)
                with self._lock:
                    self._reading.remove(load)
                    load.ended = time.perf_counter()
                    load.finished.put(load)
                    self._calm.notify()
                    was_last = not self._reading
                    if was_last:
                        self._idle.notify_all()
                    gone = was_last and self._closed  # `close` did not wait
                if gone:
                    self._release()
                del load

    def _read(self, load: Load) -> None:
        def pause() -> None:
            with self._lock:
                while load.ahead and self._busy and not load.abandoned:
                    self._calm.wait()
            if load.abandoned:
                raise AbandonedError

        try:
            views, ahead = self._arena.views(load.lease), load.ahead
            load.bytes_from_disk = self.copies.fill(
                load.layer, load.expert, load.lease.slot, views, pause if ahead else None, ahead
            )
        except Exception as error:
            load.error = error
