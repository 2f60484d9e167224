"""The host's share of a layer: experts that are computed where they lie, while the device computes the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from relume.machine.workers import keep_num_threads, one_thread

#: Rows of a layer's outputs, and what belongs there.
Rows = tuple[torch.Tensor, torch.Tensor]


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
    """A thread of its own, started when it is first needed."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def computing(self, tasks: Sequence[Callable[[], list[Rows]]]) -> Iterator[HostResults]:
        """Within this context the tasks are computed one after the other; at its end they have all been.

        Raises:
            Exception: that of the first task that failed.
        """
        results = HostResults()
        if not tasks:
            yield results
            return
        running = self._start(tasks, results)
        try:
            yield results
        finally:
            running.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, tasks: Sequence[Callable[[], list[Rows]]], results: HostResults) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="relume-host")
            self._thread.submit(torch.set_num_threads, 1).result()
            keep_num_threads()
        return self._thread.submit(_compute, tasks, results)


def _compute(tasks: Sequence[Callable[[], list[Rows]]], results: HostResults) -> None:
    started = time.perf_counter()
    with one_thread(), torch.inference_mode():
        for task in tasks:
            results.rows += task()
    results.seconds = time.perf_counter() - started
