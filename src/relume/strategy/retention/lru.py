"""Least recently used leaves first."""

from __future__ import annotations

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Lru(Retention):
    """Ranks by the time of the last use.

    The clock ticks once per layer of a forward, not once per forward: in a shared pool the layers that were just
    computed are then newer than those still to come, as in published caches. That is what gives such a pool no
    hits at all when it holds less than one pass uses.
    """

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        self._clock = 0
        self._last_used = np.zeros((context.shape.num_layers, context.shape.num_experts))

    def observe(self, use: LayerUse) -> None:
        """Mark the experts of voting tokens as used now."""
        self._clock += 1
        np.putmask(self._last_used[use.layer], use.counts, self._clock)

    def priority(self, layers: slice) -> np.ndarray:
        """Time of the last use; 0 for never."""
        return self._last_used[layers]
