"""What most tokens used just now stays."""

from __future__ import annotations

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Counts(Retention):
    """Ranks by the number of voting tokens that used an expert in its layer's latest forward."""

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        self._counts = np.zeros((context.shape.num_layers, context.shape.num_experts))

    def observe(self, use: LayerUse) -> None:
        """Take the counts over."""
        self._counts[use.layer] = use.counts

    def priority(self, layers: slice) -> np.ndarray:
        """Tokens of the latest forward."""
        return self._counts[layers]
