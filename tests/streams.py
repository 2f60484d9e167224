"""A device with two streams, played on the CPU: its work is done late, in the order that does the most harm."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch

from relume.experts import build
from relume.experts.arena import Arena
from relume.experts.copies import CopyLane, StreamCopies
from relume.experts.formats import ExpertFormat
from relume.experts.grouped import GroupedExperts
from relume.experts.source import ExpertSource
from relume.model import loading

#: Which stream goes first where both may: copies before kernels, after them, or either.
Order = Literal["copies first", "copies last", "random"]


class PlayedEvent:
    """See `Event`."""

    def __init__(self, device: PlayedDevice) -> None:
        self._device = device
        self.ended = False
        self.at = 0

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.ended)

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event.at - self.at)


class PlayedStream:
    """See `Stream`. Work, events to record and events to wait for, in order."""

    def __init__(self, device: PlayedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.queue: deque[Callable[[], object] | tuple[str, PlayedEvent]] = deque()

    def run(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            self.queue.append(work)

    def record(self, timed: bool = False) -> PlayedEvent:
        event = PlayedEvent(self.device)
        with self.device.lock:
            self.queue.append(("record", event))
        return event

    def wait(self, event: Any) -> None:
        if (self.name, "waits") in self.device.broken:
            return
        with self.device.lock:
            self.queue.append(("wait", event))

    @property
    def blocked(self) -> bool:
        """Nothing to do, or not yet."""
        if not self.queue:
            return True
        first = self.queue[0]
        return isinstance(first, tuple) and first[0] == "wait" and not first[1].ended

    def step(self) -> None:
        self.device.clock += 1
        first = self.queue.popleft()
        if not isinstance(first, tuple):
            first()
        elif first[0] == "record":
            first[1].ended, first[1].at = True, self.device.clock


class PlayedDevice:
    """Two streams that nothing drives but those who wait for what they do.

    Attributes:
        broken: (stream, "waits") of streams that ignore what they are to wait for.
    """

    def __init__(self, order: Order, broken: set[tuple[str, str]] | None = None, seed: int = 0) -> None:
        self.order: Order = order
        self.broken = broken or set()
        self.draw = random.Random(seed)
        self.lock = threading.RLock()
        self.clock = 0
        self.kernels = PlayedStream(self, "kernels")
        self.copies = PlayedStream(self, "copies")

    def run_until(self, done: Callable[[], bool]) -> None:
        with self.lock, torch.inference_mode():
            while not done():
                able = [stream for stream in (self.copies, self.kernels) if not stream.blocked]
                assert able, "the streams wait for each other"
                if self.order == "random":
                    self.draw.choice(able).step()
                else:
                    able[0 if self.order == "copies first" else -1].step()

    def settle(self) -> None:
        """Everything is done, whatever comes of it."""
        while self.kernels.queue or self.copies.queue:
            with suppress(RuntimeError):
                self.run_until(lambda: not self.kernels.queue and not self.copies.queue)


class PlayedCopies(StreamCopies):
    """Copies on a played device; kernels on it are done when somebody needs what they write."""

    def __init__(self, device: PlayedDevice, source: ExpertSource, expert_format: ExpertFormat) -> None:
        super().__init__(
            source, expert_format, device.kernels, device.copies, device.settle, torch.device("cpu"), pinned=False
        )
        self.played = device
        self.poisoned = True

    def join(self) -> None:
        self.played.run_until(lambda: not self.played.kernels.queue)


def play(
    patch: pytest.MonkeyPatch, device: PlayedDevice, *, pinned: bool = True, grouped: int | None = None
) -> None:
    """Let engines that are loaded from now on have their slots on `device`.

    Args:
        patch: ends it.
        device: played.
        pinned: host memory can be pinned; else all goes through staging buffers.
        grouped: compute experts in grouped products of so many slots.
    """

    def copy_lane(source: ExpertSource, expert_format: ExpertFormat, _: torch.device) -> CopyLane:
        return PlayedCopies(device, source, expert_format)

    def grouped_for(arena: Arena, *_: object) -> GroupedExperts | None:
        return None if grouped is None else GroupedExperts(arena, grouped)

    patch.setattr(build, "copy_lane", copy_lane)
    patch.setattr(build, "pin_for", lambda _: (lambda memory: None) if pinned else None)
    patch.setattr(loading, "grouped_for", grouped_for)
