"""Everything crosses the link."""

from __future__ import annotations

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase


class AllTransfer(Dispatch):
    """Brings every miss on demand, as mixtral-offloading, MoE-Infinity and FineMoE do: they have no host lane."""

    def plan(self, case: DispatchCase) -> np.ndarray:
        """All of them."""
        return np.ones(case.num_misses, dtype=bool)
