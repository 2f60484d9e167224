"""Half of a simulation's rows in another process."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from relume.core import RelumeError
from relume.simulate.rows import Job, Setting, SimulationRow


@contextmanager
def second_process(
    setting: Setting, jobs: Sequence[Job], report: Callable[[int], None]
) -> Iterator[tuple[Callable[[], int], Callable[[], list[SimulationRow]]]]:
    """A process that replays `jobs`: how many forwards it did since the last call, and its rows at the end."""
    if not jobs:
        yield (lambda: 0), list
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit the threads of the Parquet reader
    receive, send = context.Pipe(duplex=False)
    done = context.Value("q", 0)
    process = context.Process(target=_work, args=(send, done, setting, jobs), daemon=True)
    process.start()
    send.close()
    seen: int = 0

    def poll() -> int:
        nonlocal seen
        added: int = done.value - seen
        seen += added
        return added

    def finish() -> list[SimulationRow]:
        while not receive.poll(0.1):
            report(poll())
        try:
            answer: list[SimulationRow] | RelumeError = receive.recv()
        except EOFError:
            raise RelumeError("a process of the simulation ended early: give it more memory") from None
        if isinstance(answer, RelumeError):
            raise answer
        report(poll())
        return answer

    try:
        yield poll, finish
    finally:
        process.terminate()
        process.join()


def _work(send: Connection, done: Any, setting: Setting, jobs: Sequence[Job]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the first process, which ends this one

    def tick(count: int) -> None:
        done.value += count

    try:
        send.send(setting.rows(jobs, None, tick))
    except RelumeError as error:
        send.send(error)
