"""Frequency over age."""

from __future__ import annotations

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Lfru(Retention):
    """Ranks by uses / (time since the last use + 1), the score of vLLM's expert cache (pull request 37190).

    Uses are counted as in `Lfu`. Each layer has a clock of its own, that of its forwards: ages then do not depend
    on how many layers lie between two visits, and those of several layers can be compared in a shared pool.
    """

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        size = (context.shape.num_layers, context.shape.num_experts)
        self._uses = np.zeros(size)
        self._last_used = np.zeros(size)
        self._clock = np.zeros((context.shape.num_layers, 1))

    def observe(self, use: LayerUse) -> None:
        """Count a use of each expert that voting tokens use, and note the time."""
        layer = use.layer
        self._clock[layer] += 1.0
        used = use.counts > 0
        self._uses[layer] += used
        np.putmask(self._last_used[layer], used, self._clock[layer])

    def priority(self, layers: slice) -> np.ndarray:
        """Uses / (age + 1)."""
        return self._uses[layers] / (self._clock[layers] - self._last_used[layers] + 1.0)
