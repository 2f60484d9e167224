"""Which experts are resident."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from relume.strategy.retention.base import Retention
from relume.strategy.use import ExpertShape, LayerUse


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

    def look(self, use: LayerUse) -> tuple[np.ndarray, np.ndarray]:
        """A layer's hits and misses: expert ids, ascending, together its active set."""
        row, active = self.resident[use.layer], use.active
        return (active & row).nonzero()[0], (active > row).nonzero()[0]

    def admit(
        self, layer: int, wanted: np.ndarray, retention: Retention
    ) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        """Let experts in that rank high enough; returns those of them, and (layer, expert) pairs that leave.

        Args:
            layer: of the experts.
            wanted: ids, ascending, of experts that are not resident.
            retention: ranks them and the residents.
        """
        return self._admit(layer, wanted, retention) if len(wanted) else (wanted, ())

    def gains(self, layer: int, misses: np.ndarray, retention: Retention) -> np.ndarray:
        """`[m]` by how much each miss outranks what it would displace; 0 if it would not stay.

        The best miss displaces the lowest resident, the second best the second lowest, and so on.
        """
        first = 0 if self.shared else layer
        here, priority = self._group(first, retention)
        ranks = priority[misses + (layer - first) * self.shape.num_experts]
        residents = priority[here]
        displaced = np.zeros(len(misses))  # free slots first
        count = min(len(misses), len(residents))
        free = min(self.slots[first] - len(residents), len(misses))
        taken = min(count, len(misses) - free)
        if taken < len(residents):
            residents = np.partition(residents, taken)[:taken] if taken else residents[:0]
        displaced[free : free + taken] = np.sort(residents)
        displaced[free + taken :] = np.inf
        gained = np.zeros(len(misses))
        order = (-ranks).argsort(kind="stable")
        gained[order] = np.maximum(ranks[order] - displaced, 0.0)
        return gained

    def restore(self, keys: Iterable[tuple[int, int]]) -> None:
        """These (layer, expert) pairs are resident, and no others: loading what was decided on was broken off."""
        self.resident[:] = False
        for key in keys:
            self.resident[key] = True

    def resize(self, slots: Sequence[int] | int, retention: Retention) -> list[tuple[int, int]]:
        """Another number of slots, of the same kind; returns the (layer, expert) pairs that have to leave."""
        assert isinstance(slots, int) == self.shared
        self.slots = [slots] if isinstance(slots, int) else list(slots)
        evicted = []
        for first, number in zip(self._firsts, self.slots, strict=True):
            here, priority = self._group(first, retention)
            residents = here.nonzero()[0]
            out = residents[(-priority[residents]).argsort(kind="stable")[number:]]
            here[out] = False
            evicted += self._pairs(first, out)
        return evicted

    def fill(self, retention: Retention) -> list[tuple[int, int]]:
        """Fill free slots with the highest-ranking experts; returns what came in, in order of rank."""
        added = []
        for first, slots in zip(self._firsts, self.slots, strict=True):
            here, priority = self._group(first, retention)
            absent = (~here).nonzero()[0]
            best = absent[(-priority[absent]).argsort(kind="stable")[: slots - (len(here) - len(absent))]]
            here[best] = True
            added += self._pairs(first, best)
        return added

    @property
    def _firsts(self) -> Sequence[int]:
        """The first layer of each group that shares slots."""
        return [0] if self.shared else range(self.shape.num_layers)

    def _group(self, first: int, retention: Retention) -> tuple[np.ndarray, np.ndarray]:
        """Residency (a view) and ranks, flat, of the layers that share slots, the first of which is `first`."""
        rows = slice(first, self.shape.num_layers if self.shared else first + 1)
        return self.resident[rows].reshape(-1), retention.priority(rows).reshape(-1)

    def _pairs(self, first: int, flat: np.ndarray) -> list[tuple[int, int]]:
        """(layer, expert) of indices into the layers from `first` on."""
        num_experts = self.shape.num_experts
        return [(first + index // num_experts, index % num_experts) for index in flat.tolist()]

    def _admit(
        self, layer: int, wanted: np.ndarray, retention: Retention
    ) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
        first = 0 if self.shared else layer
        num_experts = self.shape.num_experts
        here, priority = self._group(first, retention)
        residents = here.nonzero()[0]
        newcomers = wanted + (layer - first) * num_experts
        excess = len(residents) + len(wanted) - self.slots[first]
        if excess <= 0:
            here[newcomers] = True
            return wanted, ()
        candidates = np.concatenate((residents, newcomers))
        ranks = priority[candidates]
        lowest = np.partition(ranks, excess - 1)[excess - 1]  # several times quicker than sorting a shared pool
        stays = ranks > lowest
        ties = (ranks == lowest).nonzero()[0]
        stays[ties[: len(candidates) - excess - np.count_nonzero(stays)]] = True
        here[candidates] = stays
        evicted = tuple(self._pairs(first, residents[~stays[: len(residents)]]))
        return wanted[stays[len(residents) :]], evicted
