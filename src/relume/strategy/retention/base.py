"""What every retention policy answers: which experts to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.use import ExpertShape, LayerUse


class Retention(ABC):
    """Ranks experts. It sees what a live engine sees, in that order, and never learns where it runs.

    For each forward: `begin_forward` once; `observe` for every MoE layer in turn, each followed by the pool's
    decision, which asks for `priority`; then `end_forward` once.

    Attributes:
        preload: fill the slots by rank before the first forward.
        notes: what a user should know of how it was made, a line each.
    """

    preload: bool = False
    notes: tuple[str, ...] = ()

    @property
    def intervals(self) -> tuple[int, ...]:
        """Iterations between refreshes of each layer, where it refreshes in intervals."""
        return ()

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:  # noqa: B027 (most have nothing to do)
        """Take note of what is about to be computed, the forward's requests in order."""

    @abstractmethod
    def observe(self, use: LayerUse) -> None:
        """Take note of a layer's routing, before its misses are loaded."""

    def admits(self, use: LayerUse) -> np.ndarray:
        """`[E]` bool: experts of the layer that may come to stay; by default those of voting tokens."""
        return use.counts > 0

    def placed(self, layer: int, kept: np.ndarray) -> None:  # noqa: B027 (as above)
        """Take note of the layer's misses that have come to stay."""

    def resized(self, slots: tuple[int, ...] | None) -> None:  # noqa: B027 (as above)
        """Each layer has so many slots from now on; `None` if they share them."""

    @abstractmethod
    def priority(self, layers: slice) -> np.ndarray:
        """`[layers, E]` float64: the higher, the more worth keeping. The ranking is that of this moment."""

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:  # noqa: B027 (most have nothing to do)
        """Take note of what the decoder made of the forward's tokens, its requests in order."""
