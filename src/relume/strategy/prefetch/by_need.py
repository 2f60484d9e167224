"""What ranks higher than residents is brought between forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relume.strategy.prefetch.base import Prefetch

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool
    from relume.strategy.retention.base import Retention

#: Experts that are brought for a layer between two forwards.
EXPERTS_PER_LAYER = 4
#: How much likelier it must be used than what it replaces.
LEAST_GAIN = 0.2


class ByNeed(Prefetch):
    """Once the next input is known, brings the absent experts whose need exceeds that of the lowest residents.

    For retention that ranks by the probability of a use, also of absent experts, as `foresight` does.
    """

    def wanted(self, layer: int | None, pool: ResidentPool, retention: Retention) -> list[Key] | None:
        """After each forward; layers in the order in which they come."""
        if layer is not None:
            return None
        need = retention.priority(slice(0, pool.shape.num_layers))
        free = 0 if pool.shared else np.array(pool.slots) - pool.resident.sum(axis=1)
        free = np.broadcast_to(free, len(need))
        keys: list[Key] = []
        # A shared pool holds what outranks the lowest of all layers; here each layer is compared with itself.
        for layer_id, (here, ranks) in enumerate(zip(pool.resident, need, strict=True)):
            lowest = np.concatenate((np.zeros(free[layer_id]), np.sort(ranks[here])))
            absent = (~here).nonzero()[0]
            count = min(EXPERTS_PER_LAYER, len(lowest), len(absent))
            if not count or ranks[absent].max() <= lowest[0] + LEAST_GAIN:
                continue
            best = absent[np.argsort(-ranks[absent], kind="stable")[:count]]
            keys += [(layer_id, int(expert)) for expert in best[ranks[best] > lowest[:count] + LEAST_GAIN]]
        return keys
