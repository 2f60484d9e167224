"""What the current pass did not use leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import SpanSignals
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse

#: Above any time of entry.
_FRESH = 2.0**52


class LeastStale(Retention):
    """Two generations: experts used in this pass are *fresh*, all others *stale*; stale ones leave first.

    The end of a pass makes all fresh experts stale, as in SpecMD's Least-Stale (arXiv 2602.03921). Within a
    generation the first to enter leaves first. Our construction of *entry*: the layer event that began the
    expert's latest unbroken run of passes, so one that is used pass after pass keeps its time of entry, and one
    that was left out of a pass enters anew. (With an entry at every use the policy would be LRU.)
    """

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        size = (context.shape.num_layers, context.shape.num_experts)
        self._clock = 0
        self._entered = np.zeros(size)
        self._fresh = np.zeros(size, dtype=bool)
        self._fresh_before = np.zeros(size, dtype=bool)

    def observe(self, use: LayerUse) -> None:
        """Make the experts of voting tokens fresh."""
        layer = use.layer
        self._clock += 1
        used = use.counts > 0
        np.putmask(self._entered[layer], used > self._fresh_before[layer], self._clock)
        self._fresh[layer] = used

    def priority(self, layers: slice) -> np.ndarray:
        """Fresh before stale, then the time of entry."""
        return self._entered[layers] + _FRESH * self._fresh[layers]

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Begin a pass in which nothing is fresh yet."""
        self._fresh_before, self._fresh = self._fresh, self._fresh_before
        self._fresh[:] = False
