"""The bound: keep what is used again soonest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from relume.core import RelumeError
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import ExpertShape, LayerUse

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Future:
    """When each expert of a whole trace is used. Time counts layer events: forward * layers + layer.

    Attributes:
        times: `[uses + layers * E]` int32, ascending for each expert, its last one never coming.
        starts: `[layers, E]` int64, where in `times` an expert's begin.
    """

    times: np.ndarray
    starts: np.ndarray

    @classmethod
    def from_active(cls, shape: ExpertShape, active: Iterable[np.ndarray]) -> Future:
        """From the active experts of each forward in order, `[layers, E]` bool."""
        size = shape.num_layers * shape.num_experts
        experts, times = [], []
        for forward, mask in enumerate(active):
            used = mask.reshape(-1).nonzero()[0].astype(np.int32)
            experts.append(used)
            times.append(used // shape.num_experts + np.int32(forward * shape.num_layers))
        keys = np.concatenate((*experts, np.arange(size, dtype=np.int32)))
        ends = np.full(size, _NEVER, dtype=np.int32)
        order = keys.argsort(kind="stable")  # keeps each expert's times ascending
        starts = np.concatenate(([0], np.bincount(keys, minlength=size).cumsum()[:-1]))
        return cls(np.concatenate((*times, ends))[order], starts.reshape(shape.num_layers, shape.num_experts))


class Belady(Retention):
    """Ranks by the next use, which only a replay of a trace knows; needs the fewest loads of all policies.

    The slots are filled beforehand, as other policies may do, so it bounds those too.

    Raises:
        RelumeError: there is no future to look into.
    """

    preload = True

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        if context.future is None:
            raise RelumeError(
                "the strategy belady looks into the future, so it only replays traces: use it with relume simulate"
            )
        self._times = context.future.times
        self._at = context.future.starts.copy()
        self._ranks: np.ndarray = -self._times[self._at].astype(np.float64)

    def observe(self, use: LayerUse) -> None:
        """Move on to each used expert's next use."""
        used = use.active.nonzero()[0]
        at = self._at[use.layer]
        at[used] += 1
        self._ranks[use.layer, used] = -self._times[at[used]]

    def admits(self, use: LayerUse) -> np.ndarray:
        """Every active expert: the bound must hold whatever others may keep."""
        return use.active

    def priority(self, layers: slice) -> np.ndarray:
        """The sooner used, the higher."""
        return self._ranks[layers]
