"""When the two lanes of a layer end, given what crosses the link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relume.strategy.dispatch.case import DispatchCase

#: Stands for no time at all where one divides by it; so much larger than the smallest float that none overflows.
_NO_TIME = 1e-200


class LinkTimes(NamedTuple):
    """A case with its misses in the order in which the link would bring them all.

    That is the order of Johnson's rule for a flow shop of two machines (S. M. Johnson, 1954), here link and
    device: first the experts that transfer no longer than they compute, by rising transfer time, then the others
    by falling device time; equals by index. No order ends the device lane earlier, whatever the device does
    before the first: that adds a term to the maximum, the start and all device times, which is the same in any
    order. An expert that leaves the link does not change the order of those that stay, so one order serves all
    decisions on a case.

    The times are plain lists: a few dozen are walked faster than numpy makes the arrays of one evaluation.

    Attributes:
        order: `[m]` int64, the misses' indices.
        transfer, device, host: seconds in that order.
        resident_s, host_start_s: as in the case.
    """

    order: np.ndarray
    transfer: list[float]
    device: list[float]
    host: list[float]
    resident_s: float
    host_start_s: float

    @classmethod
    def of(cls, case: DispatchCase) -> LinkTimes:
        """From a case."""
        long_transfer = case.transfer_s > case.device_s
        key = np.where(long_transfer, -case.device_s, case.transfer_s)
        order = np.lexsort((key, long_transfer))
        return cls(
            order,
            case.transfer_s[order].tolist(),
            case.device_s[order].tolist(),
            case.host_s[order].tolist(),
            float(case.resident_s),  # a numpy scalar would slow every sum that begins with it
            float(case.host_start_s),
        )

    def ends(self, transferred: Sequence[bool]) -> tuple[float, float]:
        """When the device lane and the host lane end, for a decision in the link's order."""
        arrived, free, host = 0.0, self.resident_s, 0.0
        for crosses, transfer_s, device_s, host_s in zip(
            transferred, self.transfer, self.device, self.host, strict=True
        ):
            if crosses:
                arrived += transfer_s
                if arrived > free:  # max() would double what this loop takes
                    free = arrived + device_s
                else:
                    free += device_s
            else:
                host += host_s
        return free, host + self.host_start_s if False in transferred else 0.0

    def marginal(self, transferred: Sequence[bool]) -> list[float]:
        """What each expert adds to the device lane, to first order, or would add if it crossed the link too.

        The lane's length is all transfers up to the last expert that kept the device waiting, and all device times
        from that one on. So an expert up to there costs its transfer, a later one its device time.
        """
        transfer, device = self.transfer, self.device
        arrived, free, last_awaited = 0.0, self.resident_s, -1
        for position, crosses in enumerate(transferred):
            if crosses:
                arrived += transfer[position]
                if arrived > free:
                    free = arrived
                    last_awaited = position
                free += device[position]
        return transfer[: last_awaited + 1] + device[last_awaited + 1 :]


def link_order(case: DispatchCase, transferred: np.ndarray) -> np.ndarray:
    """Indices of the transferred misses, int64, in the order that ends the device lane earliest: `LinkTimes`."""
    order = LinkTimes.of(case).order
    return np.asarray(order[transferred[order]])


def lane_seconds(case: DispatchCase, transferred: np.ndarray) -> tuple[float, float]:
    """When the device lane and the host lane end, for `transferred` `[m]` bool; the others are the host's.

    The link brings one expert after the other, in `link_order`. The device starts with the residents and computes
    each expert once it has arrived and the one before is done.
    """
    times = LinkTimes.of(case)
    return times.ends(transferred[times.order].tolist())


def makespan(case: DispatchCase, transferred: np.ndarray) -> float:
    """When both lanes have ended."""
    return max(lane_seconds(case, transferred))


def worth(host_s: np.ndarray, lane_s: np.ndarray) -> np.ndarray:
    """Host seconds that bringing an expert saves for each second of the device lane; infinite where it must come.

    If lanes were sums and experts could be split, the best decision would bring those of the highest worth.
    """
    return np.asarray(host_s / (lane_s + _NO_TIME))
