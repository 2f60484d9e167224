"""Misses are computed where they lie."""

from __future__ import annotations

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase


class AllHost(Dispatch):
    """Leaves every miss on the host between two refreshes of the residents, as TIDE does (arXiv 2605.20179).

    TIDE's host can compute every expert. What ours cannot, we bring.
    """

    def plan(self, case: DispatchCase) -> np.ndarray:
        """Only what the host cannot compute."""
        return case.must_transfer
