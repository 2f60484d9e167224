"""What brings experts and computes them, as strategies see it: a machine, a virtual one, or a record of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from relume.core import SpanInput
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.use import LayerUse

#: Experts that may have been prefetched and wait for their layer; each takes a slot that is nobody's yet.
PREFETCH_SLOTS = 16
#: An expert: its MoE layer, from 0, and its id.
Key = tuple[int, int]


class Lanes(Protocol):
    """The link to the device, the device and the host. The calls of a forward come in this order."""

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """A forward over these requests' tokens begins."""

    def begin_layer(self, layer: int) -> None:
        """Everything before the experts of a layer is done."""

    def arrived(self, layer: int) -> list[int]:
        """Prefetched experts of a layer that are there and were not told of before, ascending."""

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        """What the layer's misses take on each lane; see `DispatchCase`."""

    def run_layer(self, layer: int, misses: np.ndarray, case: DispatchCase, transferred: np.ndarray) -> None:
        """The layer's experts are computed, the misses where `transferred`, `[m]` bool, says."""

    def end_forward(self, num_rows: int) -> None:
        """The head over `num_rows` positions, and the decoder, are done."""

    def order(self, keys: Sequence[Key]) -> None:
        """Prefetch these when the link has nothing else to do, the first one first, and no others."""


class TimelessLanes:
    """Nothing takes time: what is prefetched is there when its layer begins, and every miss is transferred."""

    def __init__(self) -> None:
        self._ordered: dict[int, set[int]] = {}

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """See `Lanes`."""

    def begin_layer(self, layer: int) -> None:
        """See `Lanes`."""

    def arrived(self, layer: int) -> list[int]:
        """See `Lanes`."""
        return sorted(self._ordered.pop(layer, ()))

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        """See `Lanes`."""
        nothing = np.zeros(len(misses))
        return DispatchCase(use.token_counts[misses], reuse, nothing, nothing, np.full(len(misses), np.inf))

    def run_layer(self, layer: int, misses: np.ndarray, case: DispatchCase, transferred: np.ndarray) -> None:
        """See `Lanes`."""

    def end_forward(self, num_rows: int) -> None:
        """See `Lanes`."""

    def order(self, keys: Sequence[Key]) -> None:
        """See `Lanes`."""
        self._ordered = {}
        for layer, expert in keys:
            self._ordered.setdefault(layer, set()).add(expert)
