"""FreeToken's q*: a share of the misses set by two bandwidths."""

from __future__ import annotations

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase


class FreeToken(Dispatch):
    """Fetches F of the M misses, F being near f * M with f = p / (p + c), where link and host end together.

    p and c are the experts a second that the link brings and the host computes. F is the integer next to f * M
    with the smaller max(F * (1 - f), (M - F) * f), the lower one if both are equal (FreeToken's split rule, in
    `offload_kernels.py`; there p and c are measured once, with both lanes busy). Device time and residents do not
    count.

    Our choices: p and c come from the case's means, the host's over what it can compute. FreeToken does not say
    which F to fetch; we fetch those of most tokens, after what the host cannot compute, which is part of F and
    may exceed it. Its rules for pinned layers and for whether to use both lanes at all are left out: they choose
    a mode at the start, not a split.
    """

    def plan(self, case: DispatchCase) -> np.ndarray:
        """The F of most tokens."""
        transferred = case.must_transfer
        host = case.host_s[~transferred]
        if len(host) == 0:
            return transferred
        host_s, transfer_s = float(host.mean()), float(case.transfer_s.mean())
        if host_s + transfer_s == 0.0:
            return transferred  # both are free: nothing is gained by moving anything
        share = host_s / (host_s + transfer_s)
        num_fetched = balanced_fetches(case.num_misses, share)
        order = np.lexsort((-case.counts, ~transferred))
        transferred[order[:num_fetched]] = True
        return transferred


def balanced_fetches(num_misses: int, share: float) -> int:
    """The integer F next to `share * num_misses` that minimises max(F * (1 - share), (M - F) * share)."""

    def slower_lane(fetches: int) -> float:
        return max(fetches * (1.0 - share), (num_misses - fetches) * share)

    lower = min(int(share * num_misses), num_misses)
    return min((lower, min(lower + 1, num_misses)), key=slower_lane)
