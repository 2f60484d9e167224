"""Processes that answer batches side by side: with a small model Python takes the time, which uses one core."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relume.checkpoint.folder import open_checkpoint
from relume.config import EngineConfig
from relume.core import RelumeError
from relume.engine.engine import Engine
from relume.engine.request import Request
from relume.engine.result import GenerationResult

Batch = Sequence[Request]
Results = list[GenerationResult]


class AnswerProcesses:
    """Has batches answered in turns; each process has one at a time."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def fallbacks(self) -> tuple[str, ...]:
        """What a user should know of the engines, once they have read their weights."""
        found = [_receive(connection) for connection in self._connections]
        return tuple(found[0])

    def answer(self, batches: Iterable[Batch]) -> Iterator[Results]:
        """Answers in the order of the batches."""
        busy: deque[Connection] = deque()
        idle = deque(self._connections)
        for batch in batches:
            if not idle:
                yield _receive(busy[0])
                idle.append(busy.popleft())
            busy.append(idle.popleft())
            with _naming_the_end():
                busy[-1].send(batch)
        while busy:
            yield _receive(busy.popleft())


@contextmanager
def answer_processes(folder: Path, config: EngineConfig, count: int) -> Iterator[AnswerProcesses]:
    """`count` processes with an engine each; they end with the context, and with this process however it ends."""
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    try:
        for _ in range(count):
            own, other = context.Pipe()
            process = context.Process(target=_work, args=(other, folder, config), daemon=True)
            process.start()
            other.close()  # so that the end of either process is the end of the connection
            connections.append(own)
            processes.append(process)
        yield AnswerProcesses(connections)
    finally:
        for process in processes:
            process.terminate()
            process.join()


@contextmanager
def _naming_the_end() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise RelumeError("a process that answers ended early: give it more memory") from None


def _receive(connection: Connection) -> Any:
    with _naming_the_end():
        answer = connection.recv()
    if isinstance(answer, RelumeError):
        raise answer
    return answer


def _work(connection: Connection, folder: Path, config: EngineConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the first process, which ends this one
    try:
        with Engine(open_checkpoint(folder), config) as engine:
            engine.read_weights()
            connection.send(engine.fallbacks)
            while True:
                connection.send(engine.generate_batch(connection.recv()))
    except RelumeError as error:
        connection.send(error)
    except (EOFError, OSError):
        return  # the first process is gone
