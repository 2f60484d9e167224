"""Which experts are resident, and how a layer's use changes that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.use import ExpertShape, LayerUse


@dataclass(frozen=True)
class Decision:
    """What one layer of one forward finds, and what stays afterwards.

    Attributes:
        hits, misses: expert ids, ascending; together the layer's active set.
        kept: those of the misses that stay; the others are used once.
        evicted: (layer, expert) pairs that leave.
    """

    hits: np.ndarray
    misses: np.ndarray
    kept: np.ndarray
    evicted: tuple[tuple[int, int], ...]


class ResidentPool:
    """The resident set of every layer: each has slots of its own, or all share one pool.

    A miss takes a free slot, else that of the lowest-ranking resident if it ranks higher itself; at equal rank
    the resident stays, then the lower id. So after each layer the best of residents and misses are resident.

    Args:
        shape: of the model.
        slots: of each layer, or one number for a pool that all layers share.
    """

    def __init__(self, shape: ExpertShape, slots: Sequence[int] | int) -> None:
        self.shape = shape
        self.shared = isinstance(slots, int)
        self.slots = [slots] if isinstance(slots, int) else list(slots)
        self.resident = np.zeros((shape.num_layers, shape.num_experts), dtype=bool)

    @property
    def num_slots(self) -> int:
        """Experts that can be resident at once."""
        return sum(self.slots)

    def decide(self, use: LayerUse, retention: Retention) -> Decision:
        """Take a layer's use into account; `retention` has observed it already."""
        layer = use.layer
        row = self.resident[layer]
        active = use.active
        hits, misses = (active & row).nonzero()[0], (active & ~row).nonzero()[0]
        wanted = misses[use.counts[misses] > 0]
        kept, evicted = self._admit(layer, wanted, retention) if len(wanted) else (wanted, ())
        return Decision(hits, misses, kept, evicted)

    def forget(self, layer: int, expert: int) -> None:
        """The expert is not resident after all: reading it failed."""
        self.resident[layer, expert] = False

    def fill(self, retention: Retention) -> list[tuple[int, int]]:
        """Fill free slots with the highest-ranking experts; returns what came in, in order of rank."""
        added = []
        groups = [slice(None)] if self.shared else [slice(i, i + 1) for i in range(self.shape.num_layers)]
        for group, slots in zip(groups, self.slots, strict=True):
            priority = np.where(self.resident[group], -np.inf, retention.priority(group))
            free = slots - int(self.resident[group].sum())
            best = np.argsort(-priority.ravel(), kind="stable")[:free]
            for flat in best.tolist():
                layer, expert = divmod(flat, self.shape.num_experts)
                added.append((layer + (group.start or 0), expert))
        for layer, expert in added:
            self.resident[layer, expert] = True
        return added

    def _admit(
        self, layer: int, wanted: np.ndarray, retention: Retention
    ) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        group = slice(None) if self.shared else slice(layer, layer + 1)
        first = 0 if self.shared else layer
        slots = self.slots[0 if self.shared else layer]
        residents = self.resident[group].ravel().nonzero()[0]
        excess = len(residents) + len(wanted) - slots
        kept, evicted = wanted, tuple[tuple[int, int], ...]()
        if excess > 0:
            num_experts = self.shape.num_experts
            candidates = np.concatenate((residents, (layer - first) * num_experts + wanted))
            order = np.argsort(-retention.priority(group).ravel()[candidates], kind="stable")
            losers = np.sort(order[len(order) - excess :])
            out = candidates[losers[losers < len(residents)]]
            kept = np.delete(wanted, losers[losers >= len(residents)] - len(residents))
            evicted = tuple((int(i) // num_experts + first, int(i) % num_experts) for i in out)
        for loser_layer, expert in evicted:
            self.resident[loser_layer, expert] = False
        self.resident[layer, kept] = True
        return kept, evicted
