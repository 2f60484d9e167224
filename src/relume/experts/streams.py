"""Queues of work on a device, as far as bringing experts needs them: a protocol, and CUDA's.

The protocol has another implementation in the tests, which does the work late and in the order that does the most
harm: what a GPU would give wrong once in a thousand runs, it gives wrong every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

#: Timed spans that may be under way; more are not timed.
_MOST_OPEN = 64


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it has ended."""

    def synchronize(self) -> None:
        """Keep the calling thread waiting until it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later event; both must have been recorded `timed`, and have ended."""


class Stream(Protocol):
    """Work that a device does in the order in which it was given, beside that of other streams."""

    def run(self, work: Callable[[], object]) -> None:
        """Add work: what `work` launches."""

    def record(self, timed: bool = False) -> Event:
        """An event after all work that was added till now."""

    def wait(self, event: Event) -> None:
        """What is added from now on begins after `event`; the calling thread does not wait."""


class CudaStream:
    """See `Stream`. `None` is the stream that is current where it is used, on which kernels are launched."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        """See `Stream`."""
        if self._stream is None:
            work()
            return
        with torch.cuda.stream(self._stream):
            work()

    def record(self, timed: bool = False) -> torch.cuda.Event:
        """See `Stream`."""
        # blocking: a reader that waits must not keep a core busy.
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(self._here)
        return event

    def wait(self, event: Any) -> None:
        """See `Stream`."""
        self._here.wait_event(event)

    @property
    def _here(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)


class Timings:
    """What spans of work took on their stream, told once they have ended, so that nobody waits for them."""

    def __init__(self) -> None:
        self._open: deque[tuple[str, float, Event, Event]] = deque()

    @contextmanager
    def span(self, stream: Stream, lane: str, predicted_s: float) -> Iterator[None]:
        """Time what is added to `stream` within, which was predicted to take `predicted_s`."""
        begin = stream.record(timed=True)
        yield
        if len(self._open) < _MOST_OPEN:
            self._open.append((lane, predicted_s, begin, stream.record(timed=True)))

    def ended(self) -> Iterator[tuple[str, float, float]]:
        """(lane, predicted seconds, seconds) of the spans that have ended since."""
        while self._open and self._open[0][3].query():
            lane, predicted_s, begin, end = self._open.popleft()
            yield lane, predicted_s, begin.elapsed_time(end) / 1000.0

    def forget(self) -> None:
        """Spans under way are not told."""
        self._open.clear()
