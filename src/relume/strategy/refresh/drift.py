"""Whether a model drifts as its profile says."""

from __future__ import annotations

from dataclasses import dataclass

#: Refreshes over which promotions are compared with the profile's; those of a few blocks vary by chance.
WINDOW = 128


@dataclass
class DriftMonitor:
    """Compares the experts that refreshes promote with those that were expected.

    Args:
        margin: relative difference from which the drift counts as another one.

    Attributes:
        ratio: of the drift in force to the profile's.
        changes: times that it was set anew.
    """

    margin: float
    ratio: float = 1.0
    changes: int = 0
    _promoted: float = 0.0
    _expected: float = 0.0
    _refreshes: int = 0

    def take(self, promoted: float, expected: float) -> bool:
        """Add a refresh's promotions and those that were expected; returns whether `ratio` changed."""
        self._promoted += promoted
        self._expected += expected
        self._refreshes += 1
        if self._refreshes < WINDOW or self._expected <= 0.0:
            return False
        seen = self._promoted / self._expected
        self._promoted = self._expected = 0.0
        self._refreshes = 0
        if abs(seen - self.ratio) <= self.margin * self.ratio:
            return False
        self.ratio = seen
        self.changes += 1
        return True
