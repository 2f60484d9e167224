"""Threads that bring experts into slots, most urgent first."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from relume.experts.arena import Arena, Lease
from relume.experts.source import ExpertSource
from relume.machine.workers import one_thread

#: Urgencies, lower first.
DEMAND, AHEAD = 0, 1


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


@dataclass(order=True)
class _Queued:
    urgency: int
    number: int
    load: Load = field(compare=False)


class Loader:
    """Several reads in flight; those still queued can be cancelled.

    Args:
        source: where experts come from.
        arena: where they go.
        num_threads: reads in flight.
    """

    def __init__(self, source: ExpertSource, arena: Arena, num_threads: int) -> None:
        self._source = source
        self._arena = arena
        self._queue: list[_Queued] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"relume-read-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        """Reads in flight at most."""
        return len(self._threads)

    def submit(self, load: Load, urgency: int = DEMAND) -> None:
        """Queue a load; it ends up in its `finished`, with an error if it failed."""
        with self._changed:
            assert not self._closed, "the loader is closed"
            heapq.heappush(self._queue, _Queued(urgency, next(self._numbers), load))
            self._changed.notify()

    def cancel(self, load: Load) -> bool:
        """Take a load out of the queue; false if it has begun."""
        with self._changed:
            for index, queued in enumerate(self._queue):
                if queued.load is load:
                    del self._queue[index]
                    heapq.heapify(self._queue)
                    return True
        return False

    def close(self) -> None:
        """End the threads and close the source."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._source.close()

    def _work(self) -> None:
        with one_thread(), torch.inference_mode():
            while True:
                with self._changed:
                    while not self._queue and not self._closed:
                        self._changed.wait()
                    if not self._queue:
                        return
                    load = heapq.heappop(self._queue).load
                self._read(load)
                del load

    def _read(self, load: Load) -> None:
        load.began = time.perf_counter()
        try:
            views = self._arena.views(load.lease)
            load.bytes_from_disk = self._source.read(load.layer, load.expert, views)
        except Exception as error:
            load.error = error
        load.ended = time.perf_counter()
        load.finished.put(load)
