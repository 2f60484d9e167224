"""What the published policies that rank and prefetch at once have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relume.config import require
from relume.strategy.lanes import PREFETCH_SLOTS
from relume.strategy.use import ExpertShape, LayerUse

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool

#: Length of a vector whose entries are rounded to whole numbers. The product of two of up to 36,000 entries is
#: below 2**24, so all partial sums of it are exact in float32: in whatever order they are added, a live run and
#: its replay on another machine find the same entry the most similar.
LENGTH = 4000.0
#: Experts that are asked for at once, ours: half of what may be under way, as what was asked for after an earlier
#: layer may still be, for one to come.
MOST = PREFETCH_SLOTS // 2
#: Added to what is predicted, so that experts that are not predicted rank by their visits.
FLOOR = 1e-6


def whole_number(policy: str, name: str, value: float, least: int = 1) -> int:
    """A parameter that counts something.

    Raises:
        RelumeError: it is no whole number of at least `least`.
    """
    require(
        float(value).is_integer() and value >= least,
        f"{policy}: {name} is {value:g}: it must be a whole number of at least {least}",
    )
    return int(value)


def look_ahead(predicted: np.ndarray, layer: int | None) -> np.ndarray:
    """`[layers, E]` prefetch scores of a prediction, likewise, after `layer`, or before the first one if `None`.

    Layer l' > l gets 1 - (l' - l) / (L + 1) of what is predicted for it, the linear decay of MoE-Infinity's code,
    which FineMoE took over. Layers that are past get nothing. Before the first layer l is -1, which is ours.
    """
    num_layers = len(predicted)
    now = -1 if layer is None else layer
    distances = np.arange(num_layers) - now
    decay = np.where(distances > 0, 1.0 - distances / (num_layers + 1), 0.0)
    scores: np.ndarray = predicted * decay[:, None]
    return scores


def worth_bringing(scores: np.ndarray, ranks: np.ndarray, pool: ResidentPool, most: int) -> list[Key]:
    """The absent experts of the highest positive scores that the pool would let in now; equals by layer, then id.

    The published systems let in whatever they prefetched; here the pool compares ranks, and what it would turn
    away is not worth the link.

    Args:
        scores, ranks: `[layers, E]`, how urgent an expert is, and the retention's priority of it.
        pool: who is resident.
        most: experts to name. More than may be under way at once would be of no use, as the next layer asks anew.
    """
    absent = (scores > 0.0) & ~pool.resident
    if not absent.any():
        return []
    values = np.where(absent | pool.resident, ranks, -np.inf)
    groups = values.reshape(1, -1) if pool.shared else values
    ascending = np.sort(groups, axis=1)
    size = groups.shape[1]
    # The highest rank that would find no slot; whatever ranks higher finds one.
    left_out = [
        row[size - 1 - slots] if slots < size else -np.inf
        for row, slots in zip(ascending, pool.slots, strict=True)
    ]
    fits = (absent & (values > np.array(left_out)[:, None])).reshape(-1).nonzero()[0]
    best = fits[np.argsort(-scores.reshape(-1)[fits], kind="stable")[:most]]
    layers, experts = np.divmod(best, scores.shape[1])
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


class CacheVisits:
    """How often each expert was used since it became resident, and the layer that is being computed.

    MoE-Infinity and FineMoE evict by the visits in the cache times what is predicted, and spare what is wanted
    right now. That the visits begin anew when an expert comes in, and count forwards that use it for a voting
    token, are our choices. A retention is not told who is resident, but its prefetch is: without the prefetch
    (`:prefetch=none`) visits count from the start, resident or not.
    """

    def __init__(self, shape: ExpertShape) -> None:
        self._visits = np.zeros((shape.num_layers, shape.num_experts))
        self._pool: ResidentPool | None = None
        self._layer = -1  # in use, and which of its experts
        self._in_use = np.zeros(shape.num_experts, dtype=bool)

    def look(self, pool: ResidentPool) -> None:
        """A decision has been taken: what is not resident has no visits."""
        self._pool = pool
        self._visits[~pool.resident] = 0.0

    def observe(self, use: LayerUse) -> None:
        """Count a visit of each expert that voting tokens use, the misses' first one included."""
        row = self._visits[use.layer]
        if self._pool is not None:
            row[~self._pool.resident[use.layer]] = 0.0
        self._layer, self._in_use = use.layer, use.counts > 0
        row += self._in_use

    def end_forward(self) -> None:
        """No layer is being computed."""
        self._layer = -1

    def ranks(self, layers: slice, predicted: np.ndarray) -> np.ndarray:
        """`[layers, E]` from what is predicted of those layers, likewise: in 0..1, and 1 more for what is in use.

        The product is of the visits and one more, which stands for the entry itself, as something that was
        prefetched has not been used yet.
        """
        product = (predicted + FLOOR) * (1.0 + self._visits[layers])
        ranks: np.ndarray = product / (1.0 + product)  # keeps the order
        first = layers.start or 0
        if first <= self._layer < first + len(ranks):
            ranks[self._layer - first] += self._in_use
        return ranks
