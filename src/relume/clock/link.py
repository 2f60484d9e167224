"""The link to the device: prefetches, one at a time, whenever nothing urgent crosses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.strategy.lanes import Key


class Link:
    """Brings one expert at a time; what is demanded goes first, and a prefetch in progress waits as far as it is.

    Args:
        seconds: `[layers, experts]` float64, to bring each.
        on_disk: `[layers, experts]` bool, whose bytes come from disk.
        expert_bytes: of one.
        slots: prefetched experts that may wait for their layer; while they are as many, the link brings no more.

    Attributes:
        now: until when its work is known.
        busy_s: of that.
        num_bytes, disk_bytes: of experts that crossed, and of the part of those whose prefetch was given up.
    """

    def __init__(self, seconds: np.ndarray, on_disk: np.ndarray, expert_bytes: int, slots: int) -> None:
        self._seconds = seconds
        self._on_disk = on_disk
        self._expert_bytes = expert_bytes
        self._slots = slots
        self._queue: list[Key] = []
        self._done_s = 0.0  # of the first in the queue; nothing else is ever partly across
        self._arrived: list[Key] = []
        self.now = 0.0
        self.busy_s = 0.0
        self.num_bytes = 0
        self.disk_bytes = 0

    def prefetch_until(self, time: float) -> None:
        """Work on the queue until `time`."""
        while self._queue and len(self._arrived) < self._slots and self.now < time:
            needed = float(self._seconds[self._queue[0]]) - self._done_s
            spent = min(needed, time - self.now)
            self.now += spent
            self.busy_s += spent
            self._done_s += spent
            if spent == needed:
                key = self._queue.pop(0)
                self._done_s = 0.0
                self._count(key, self._expert_bytes)
                self._arrived.append(key)
        self.now = max(self.now, time)

    def bring(self, layer: int, experts: np.ndarray, seconds: Sequence[float]) -> None:
        """Demanded experts cross from now on, one after the other, in `seconds` each."""
        keys = [(layer, expert) for expert in experts.tolist()]
        if self._queue and self._queue[0] in keys:
            self._done_s = 0.0  # its rest is among `seconds`, its bytes are counted whole
        self._remove(keys)
        for key, spent in zip(keys, seconds, strict=True):
            self.now += spent
            self.busy_s += spent
            self._count(key, self._expert_bytes)

    def forget(self, layer: int, experts: np.ndarray) -> None:
        """These are no longer wanted."""
        keys = [(layer, expert) for expert in experts.tolist()]
        if self._queue and self._queue[0] in keys:
            self._give_up()
        self._remove(keys)

    def order(self, keys: Sequence[Key]) -> None:
        """Replace the queue; the progress of a prefetch is lost unless it stays the first."""
        there = set(self._arrived)
        queue = [key for key in dict.fromkeys(keys) if key not in there]
        if self._queue and queue[:1] != self._queue[:1]:
            self._give_up()
        self._queue = queue

    def take(self, layer: int) -> list[int]:
        """Prefetched experts of a layer that are across, ascending; their slots are free again."""
        found = sorted(expert for there, expert in self._arrived if there == layer)
        self._arrived = [key for key in self._arrived if key[0] != layer]
        return found

    def remaining_s(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Seconds until each would be across if it went now, alone."""
        remaining: np.ndarray = self._seconds[layer, experts]
        if self._queue and self._queue[0][0] == layer:
            remaining = remaining - self._done_s * (experts == self._queue[0][1])
        return remaining

    def _give_up(self) -> None:
        """Whatever is partly across was for nothing."""
        if self._done_s:
            key = self._queue[0]
            self._count(key, int(self._expert_bytes * self._done_s / float(self._seconds[key])))
            self._done_s = 0.0

    def _remove(self, keys: Sequence[Key]) -> None:
        if self._queue:
            gone = set(keys)
            self._queue = [key for key in self._queue if key not in gone]

    def _count(self, key: Key, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.disk_bytes += num_bytes if self._on_disk[key] else 0
