"""The host's share of a layer: experts that are computed where they lie, while the device computes the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from relume.machine.workers import keep_num_threads, one_thread

#: Rows of a layer's outputs, and what belongs there.
Rows = tuple[torch.Tensor, torch.Tensor]
Task = Callable[[], list[Rows]]


@dataclass
class HostResults:
    """What the host lane gave; complete when its context has ended.

    Attributes:
        rows: of all tasks, in their order.
        seconds: that they took.
    """

    rows: list[Rows] = field(default_factory=list)
    seconds: float = 0.0


class HostLane:
    """Threads of its own, started when they are first needed; each computes alone.

    Args:
        num_threads: one where the device is the processor itself; beside a GPU as many as there are cores.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._threads: ThreadPoolExecutor | None = None

    @contextmanager
    def computing(self, tasks: Sequence[Task]) -> Iterator[HostResults]:
        """Within this context the tasks are computed; at its end they have all been.

        Raises:
            Exception: that of a task that failed.
        """
        results = HostResults()
        if not tasks:
            yield results
            return
        started = time.perf_counter()
        running = self._start(tasks)
        try:
            yield results
        finally:
            wait(running)  # for all, whatever comes of one
            ended = [future.result() for future in running]
        found = dict(pair for share, _ in ended for pair in share)
        results.rows = [row for index in range(len(tasks)) for row in found[index]]
        results.seconds = max(end for _, end in ended) - started

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    def _start(self, tasks: Sequence[Task]) -> list[Future[_Share]]:
        if self._threads is None:
            threads = ThreadPoolExecutor(self.num_threads, thread_name_prefix="relume-host")
            together = threading.Barrier(self.num_threads)  # so that each of them is a thread of its own
            try:
                for begun in [threads.submit(_begin, together) for _ in range(self.num_threads)]:
                    begun.result()
            except BaseException:
                together.abort()
                threads.shutdown(wait=False)
                raise
            self._threads = threads
            keep_num_threads()
        queue = iter(list(enumerate(tasks)))
        return [self._threads.submit(_compute, queue) for _ in range(min(self.num_threads, len(tasks)))]


#: What one thread computed, by the tasks' indices, and when it ended.
_Share = tuple[list[tuple[int, list[Rows]]], float]


def _begin(together: threading.Barrier) -> None:
    torch.set_num_threads(1)
    together.wait()


def _compute(queue: Iterator[tuple[int, Task]]) -> _Share:
    with one_thread(), torch.inference_mode():
        # A list's iterator gives each entry once, whoever asks.
        found = [(index, task()) for index, task in queue]
    return found, time.perf_counter()
