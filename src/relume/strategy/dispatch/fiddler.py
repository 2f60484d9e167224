"""Fiddler's two objectives: its comment says the longer lane, its code says the sum."""

from __future__ import annotations

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.dispatch.lanes import worth


class FiddlerSum(Dispatch):
    """The smaller sum of both lanes, hence for each expert by itself whichever of the two ways is shorter.

    This is what Fiddler's published code computes (arXiv 2402.07033, `mixtral.py`): it goes through all
    partitions of a layer and keeps the first with the smallest sum, which leaves an expert on the device when both
    cost the same. Its host cost is a constant times the tokens, its device cost a constant, 0 for a resident. Ours
    are the case's: the device lane costs transfer plus device time, with nothing overlapped and no start cost, as
    there.
    """

    def plan(self, case: DispatchCase) -> np.ndarray:
        """The cheaper way for each."""
        return np.asarray(case.transfer_s + case.device_s <= case.host_s)


class FiddlerMax(Dispatch):
    """The smaller of the longer of two serial lanes, which the comment in Fiddler's code says it minimises.

    Costs are those of `FiddlerSum`; residents cost nothing, as there. Fiddler goes through the 2^8 partitions of
    a layer, which nobody can with dozens of misses. But its device cost is one constant, so of all choices of k
    experts for the device the best takes those of the largest host cost, and trying every k finds the minimum.
    Our device costs may differ (tokens, tiers). Then the ranking is by host cost over device cost, which is the
    same one where device costs are equal and a heuristic where they are not. Of several k with the same maximum
    we take the largest, as Fiddler's loop meets the device first.
    """

    def plan(self, case: DispatchCase) -> np.ndarray:
        """The best prefix of that ranking."""
        device = case.transfer_s + case.device_s
        # What the host cannot compute comes first, so a prefix without it has an infinite host lane.
        order = np.argsort(-worth(case.host_s, device), kind="stable")
        device_lane = np.concatenate(([0.0], device[order].cumsum()))
        host_lane = np.concatenate((case.host_s[order][::-1].cumsum()[::-1], [0.0]))
        num_transferred = case.num_misses - int(np.maximum(device_lane, host_lane)[::-1].argmin())
        transferred = np.zeros(case.num_misses, dtype=bool)
        transferred[order[:num_transferred]] = True
        return transferred
