"""Whether prefetching pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relume.strategy.lanes import Key

#: Outcomes after which it is judged.
WINDOW = 512


@dataclass
class PrefetchMonitor:
    """Follows each prefetched expert until it is used or leaves, and stops prefetching when more are wasted.

    Attributes:
        useful, wasted: prefetched experts that were used, and that left or were dropped before.
        stopped: of the last `WINDOW` outcomes more than half were wasted; it stays off.
    """

    useful: int = 0
    wasted: int = 0
    stopped: bool = False
    _open: set[Key] = field(default_factory=set)
    _recent: list[int] = field(default_factory=lambda: [0, 0])

    def brought(self, keys: Iterable[Key]) -> None:
        """These came in unasked."""
        self._open.update(keys)

    def used(self, keys: Iterable[Key]) -> None:
        """These were hit."""
        count = self._close(keys)
        self.useful += count
        self._recent[0] += count
        self._judge()

    def left(self, keys: Iterable[Key], dropped: int = 0) -> None:
        """These left; `dropped` further ones were brought in vain."""
        count = self._close(keys) + dropped
        self.wasted += count
        self._recent[1] += count
        self._judge()

    def forget_but(self, keys: Iterable[Key]) -> None:
        """Only these are still there; what else was brought has got lost, neither used nor wasted."""
        self._open.intersection_update(keys)

    def _close(self, keys: Iterable[Key]) -> int:
        if not self._open:
            return 0
        closed = self._open.intersection(keys)
        self._open -= closed
        return len(closed)

    def _judge(self) -> None:
        if sum(self._recent) >= WINDOW:
            self.stopped = self.stopped or self._recent[0] < self._recent[1]
            self._recent = [0, 0]
