"""Everything is resident."""

from __future__ import annotations

import numpy as np

from relume.core import RelumeError
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Full(Retention):
    """Holds every expert, so nothing is ever ranked against anything.

    Raises:
        RelumeError: there are fewer slots than experts.
    """

    preload = True

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        num_experts = context.shape.num_layers * context.shape.num_experts
        if context.num_slots != num_experts:
            raise RelumeError(
                f"the strategy full holds all {num_experts} experts, and the expert memory has "
                f"{context.num_slots} slots: set --expert-memory to 100% or choose another strategy"
            )
        self._ranks = np.zeros((context.shape.num_layers, context.shape.num_experts))

    def observe(self, use: LayerUse) -> None:
        """Nothing to note."""

    def priority(self, layers: slice) -> np.ndarray:
        """All alike."""
        return self._ranks[layers]
