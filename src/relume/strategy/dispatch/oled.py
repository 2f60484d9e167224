"""OLED-MoE's dispatch: predicted reuse first, then bounded swaps that balance the lanes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.dispatch.lanes import LinkTimes, worth

#: Estimates that differ by less, relatively, may be equal.
_ROUNDING = 1e-12
#: Experts of each lane that a step thinks of moving: those that gain the least from where they are.
_CONSIDERED = 4
#: Estimates that a step may check before it gives up.
_CHECKED = 3
#: A change: estimated makespan, reuse lost, and which positions leave and enter the link, -1 for none.
_Exchange = tuple[float, float, int, int]


class _Split(NamedTuple):
    """A decision in the link's order, and when its lanes end."""

    transferred: list[bool]
    device_s: float
    host_s: float
    makespan: float


@dataclass(frozen=True)
class Balanced(Dispatch):
    """Balances the lanes, and brings what will be used again where that costs no time (arXiv 2609.33385, Fig. 11).

    The paper says that experts of high predicted reuse are transferred first and that bounded swaps then balance
    the two lanes. Our construction:

    1. Start: the first k experts by reuse cross the link, for the k that ends the longer lane earliest, which is
       where the lanes are about equal. All and none are among the k, so the plan is never worse than those.
    2. Swaps do not lead from every such start to a good split: what one expert costs the link may be several on
       the host. So the same is done in the order of `worth`, and reuse leads only if that costs no more than
       `slack`.
    3. Up to `max_swaps` times one expert changes lanes, or two change places: of a few that gain the least from
       where they are, the change that is estimated to help most. It is accepted if it ends the longer lane
       earlier, or at the same time with more reuse on the link.

    Attributes:
        max_swaps: changes after the start.
        slack: by how much, relatively, the start by reuse may be longer than the other and still be preferred.

    Raises:
        ValueError: one of them is negative.
    """

    max_swaps: int = 4
    slack: float = 0.02

    def __post_init__(self) -> None:
        if self.max_swaps < 0:
            raise ValueError(f"max_swaps is {self.max_swaps}: it must be 0 or more")
        if not self.slack >= 0.0:
            raise ValueError(f"slack is {self.slack}: it must be 0 or more")

    def plan(self, case: DispatchCase) -> np.ndarray:
        """The start that is better, improved."""
        times = LinkTimes.of(case)
        host = case.host_s[times.order]
        reuse = case.reuse[times.order]
        num_forced = times.host.count(inf)
        by_reuse = np.where(host < inf, -reuse, -inf).argsort(kind="stable")
        split = _best_prefix(times, by_reuse.tolist(), num_forced, inf)
        assert split is not None, "all prefixes are worse than infinite"
        if sum(split.transferred) > num_forced or split.host_s > split.device_s:
            saved = worth(host, (case.transfer_s + case.device_s)[times.order])
            by_worth = by_reuse[(-saved[by_reuse]).argsort(kind="stable")].tolist()  # equals by reuse
            other = _best_prefix(times, by_worth, num_forced, split.makespan / (1.0 + self.slack))
            split = self._improve(times, other or split, by_worth[num_forced:], reuse.tolist())
        # else the device lane is the longer one although it has only what must cross: there is no better plan
        transferred = np.empty(case.num_misses, dtype=bool)
        transferred[times.order] = split.transferred
        return transferred

    def _improve(self, times: LinkTimes, split: _Split, by_worth: list[int], reuse: list[float]) -> _Split:
        """After the swaps; `by_worth` has the experts that have a choice."""
        for _ in range(self.max_swaps):
            for _, reuse_lost, leaves, enters in sorted(_exchanges(times, split, by_worth, reuse))[:_CHECKED]:
                transferred = split.transferred.copy()
                if leaves >= 0:
                    transferred[leaves] = False
                if enters >= 0:
                    transferred[enters] = True
                changed = _evaluate(times, transferred)
                gain = split.makespan - changed.makespan
                if gain > 0.0 or (gain == 0.0 and reuse_lost < 0.0):
                    split = changed
                    break
            else:
                break
        return split


def _evaluate(times: LinkTimes, transferred: list[bool]) -> _Split:
    device_s, host_s = times.ends(transferred)
    return _Split(transferred, device_s, host_s, device_s if device_s > host_s else host_s)


def _best_prefix(times: LinkTimes, order: list[int], num_forced: int, below: float) -> _Split | None:
    """The first k experts of an order (positions) cross the link, for the k with the smallest makespan.

    None if that is not `below` the given one. With k the device lane gets no shorter and the host lane no longer,
    so the best k is where they cross, or the one before. A device lane is no shorter than the link is busy, nor
    than the device is, so it crosses the host lane where the longer of these does, or before: usually right
    there.
    """

    def split(k: int) -> _Split:
        transferred = [False] * len(order)
        for position in order[:k]:
            transferred[position] = True
        return _evaluate(times, transferred)

    _, transfer, device, host, busy, left = times
    link, left_before = 0.0, inf
    for position in order[:num_forced]:
        link += transfer[position]
        busy += device[position]
    free = order[num_forced:]
    left += sum([host[position] for position in free])
    high = num_forced
    for position in free:
        if link >= left or busy >= left:
            break
        link += transfer[position]
        busy += device[position]
        left_before = left
        left -= host[position]
        high += 1
    low, crossing, at_least = num_forced, high, max(link, busy)
    if at_least >= below and left_before >= below:
        return None
    best = None
    probe = high - 1
    while low < high:
        tried = split(probe)
        if best is None or tried.makespan < best.makespan:
            best = tried
        if tried.device_s >= tried.host_s:
            high = probe
        else:
            low = probe + 1
        probe = (low + high) // 2
    if high == crossing and (best is None or best.makespan > at_least):
        tried = split(high)
        if best is None or tried.makespan < best.makespan:
            best = tried
    return best if best is not None and best.makespan < below else None


def _exchanges(times: LinkTimes, split: _Split, by_worth: list[int], reuse: list[float]) -> list[_Exchange]:
    """Changes that may end the longer lane earlier, or at the same time with more reuse on the link."""
    transferred, device_end, host_end, longest = split
    may_be = longest * (1.0 + _ROUNDING)
    better = longest * (1.0 - _ROUNDING)
    cost, host = times.marginal(transferred), times.host
    leaving = [p for p in reversed(by_worth) if transferred[p]][:_CONSIDERED]
    entering = [p for p in by_worth if not transferred[p]][:_CONSIDERED]
    on_link = [(p, cost[p], host[p], reuse[p]) for p in leaving]
    on_host = [(p, cost[p], host[p], reuse[p]) for p in entering]
    if device_end >= host_end:
        host_start_s = 0.0 if entering else times.host_start_s
        on_host.append((-1, 0.0, -host_start_s, 0.0))
    else:
        on_link.append((-1, 0.0, 0.0, 0.0))
    found = []
    for leaves, link_less_s, host_more_s, reuse_lost in on_link:
        device_left = device_end - link_less_s
        host_left = host_end + host_more_s
        for enters, link_more_s, host_less_s, reuse_won in on_host:
            device_then = device_left + link_more_s
            host_then = host_left - host_less_s
            if device_then <= may_be and host_then <= may_be:
                then = device_then if device_then > host_then else host_then
                if then < better or reuse_won > reuse_lost:
                    found.append((then, reuse_lost - reuse_won, leaves, enters))
    return found
