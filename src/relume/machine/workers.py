"""Compute threads of our own, each of which runs torch operations alone.

A matrix product that torch spreads over threads may round differently with their number. Products of one thread
each, many at a time, do not; nor do they wait for one another at barriers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch

Task = Callable[[], None]


class Workers:
    """Threads that run batches of tasks; one thread means that the caller runs them itself.

    Args:
        num_threads: tasks that run at once.

    Raises:
        RuntimeError: a thread could not be started.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"relume-compute-{index}", daemon=True)
            for index in range(num_threads if num_threads > 1 else 0)
        ]
        self._ready = threading.Barrier(len(self._threads) + 1)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._ready.abort()
            raise
        self._ready.wait()
        keep_num_threads()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks and wait for them. Raises the first error, after all of them have ended."""
        if not self._threads or len(tasks) <= 1:
            with one_thread():  # as a worker's: whether a task has company must not change its result
                for task in tasks:
                    task()
            return
        batch = _Batch(tasks)
        for _ in range(min(len(self._threads), len(tasks))):
            self._batches.put(batch)
        batch.wait()

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        with one_thread(), torch.inference_mode():
            try:
                self._ready.wait()
            except threading.BrokenBarrierError:  # another thread could not be started
                return
            while (batch := self._batches.get()) is not None:
                batch.help()
                del batch  # its tasks hold tensors


class _Batch:
    """Tasks that several threads take one by one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = iter(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def help(self) -> None:
        """Run tasks until none is left to take."""
        while True:
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            try:
                task()
            except BaseException as error:
                self._error = self._error or error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._ended.set()

    def wait(self) -> None:
        """Until every task has ended. Raises the first error."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


def keep_num_threads() -> None:
    """Make this thread's number hold for new threads again, after others have set theirs."""
    torch.set_num_threads(torch.get_num_threads())


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch operations of this thread run alone while inside.

    torch keeps the number per thread, but a thread's first operation takes over the number that was set last
    anywhere. Asking for it counts as that operation; new threads then go on with `before`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
