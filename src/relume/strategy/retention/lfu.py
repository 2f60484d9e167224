"""Least frequently used leaves first."""

from __future__ import annotations

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Lfu(Retention):
    """Ranks by the number of forwards that used an expert, since the start and whether it was resident or not."""

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        self._uses = np.zeros((context.shape.num_layers, context.shape.num_experts))

    def observe(self, use: LayerUse) -> None:
        """Count one use of each expert that voting tokens use."""
        self._uses[use.layer] += use.counts > 0

    def priority(self, layers: slice) -> np.ndarray:
        """Number of uses."""
        return self._uses[layers]
