"""The interval that costs least: TIDE's program over one interval, solved by trying all of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.curves import INTERVALS, RefreshCurves

#: What another plan must be predicted to save, relatively, to be worth leaving a plain one: curves and costs are
#: not known any better. In simulations one that promised 2.7% of the experts' time lost 1.5% of all, and from 3.3%
#: on all of them gained.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class RefreshPlan:
    """A solved program.

    Attributes:
        intervals: of each layer, in iterations.
        slots: of each layer.
        experts_s: predicted seconds of an iteration's experts over all layers, its share of commit forwards
            included.
        lanes_s: of that, for how long `link`, `device` and `host` are busy; they overlap.
        curve: `[T]`, `experts_s` of one interval for all layers, by interval, with these slots.
        method: `measured` (one interval), `layers` (the program over layers), or `given`.
        gap: proven distance from the best value of the program, relatively; 0 where everything was tried.
        notes: what a user should know, a line each.
    """

    intervals: tuple[int, ...]
    slots: tuple[int, ...]
    experts_s: float
    lanes_s: dict[str, float]
    curve: tuple[float, ...]
    method: str
    gap: float = 0.0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "intervals": list(self.intervals),
            "slots": list(self.slots),
            "experts_ms": 1000 * self.experts_s,
            "lanes_ms": {lane: 1000 * seconds for lane, seconds in self.lanes_s.items()},
            "curve_ms": [1000 * seconds for seconds in self.curve],
            "method": self.method,
            "gap": self.gap,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class LayerSeconds:
    """Predicted seconds of an iteration by interval and layer, `[T, layers]` each; commit forwards shared in."""

    all: np.ndarray
    link: np.ndarray
    device: np.ndarray
    host: np.ndarray


def layer_seconds(curves: RefreshCurves, costs: RefreshCosts, slots: np.ndarray) -> LayerSeconds:
    """TIDE's eq. 5 and 6 with measured curves, and lanes that overlap, for `slots` `[layers]`.

    Eq. 5 charges promotions, eq. 6 misses, and eq. 7 adds both. But the host computes while the link brings, so
    of each kind of forward the longer one counts.
    """
    means = curves.at(slots)
    share = curves.share[:, :, None]
    total = (share * costs.layer_s(**means)).sum(axis=0)
    lanes = costs.lanes(means["hits"], means["brought"], means["missed"])
    link, device, host = ((share * lane).sum(axis=0) for lane in lanes)
    return LayerSeconds(total, link, device, host)


def plan_of(
    curves: RefreshCurves,
    costs: RefreshCosts,
    slots: np.ndarray,
    intervals: np.ndarray,
    method: str,
    gap: float = 0.0,
    notes: tuple[str, ...] = (),
) -> RefreshPlan:
    """What the model predicts for given intervals and slots, `[layers]` each."""
    seconds = layer_seconds(curves, costs, slots)
    rows = np.minimum(intervals, INTERVALS[-1]) - INTERVALS[0]
    if int(np.max(intervals)) > INTERVALS[-1]:
        notes = (*notes, f"intervals beyond {INTERVALS[-1]} iterations are predicted as that one")
    here = (rows, np.arange(len(slots)))
    return RefreshPlan(
        intervals=tuple(int(interval) for interval in intervals),
        slots=tuple(int(number) for number in slots),
        experts_s=float(seconds.all[here].sum()),
        lanes_s={lane: float(getattr(seconds, lane)[here].sum()) for lane in ("link", "device", "host")},
        curve=tuple(seconds.all.sum(axis=1).tolist()),
        method=method,
        gap=gap,
        notes=notes,
    )


def solve_interval(curves: RefreshCurves, costs: RefreshCosts, slots: np.ndarray) -> RefreshPlan:
    """The one interval of the least predicted time (eq. 7); of equals the longest, which moves least.

    Where the link may be busy for a share of the time only, it is the best of those that keep to it, or else the
    one that moves least.
    """
    seconds = layer_seconds(curves, costs, slots)
    totals, busy = seconds.all.sum(axis=1), seconds.link.sum(axis=1)
    fits = busy <= costs.link_share * totals * (1.0 + 1e-9)
    totals = np.where(fits, totals, np.inf) if fits.any() else busy
    best = len(totals) - 1 - int(totals[::-1].argmin())
    intervals = np.full(len(slots), INTERVALS[best])
    return plan_of(curves, costs, slots, intervals, "measured")


def solve_intervals(curves: RefreshCurves, costs: RefreshCosts, slots: np.ndarray) -> RefreshPlan:
    """The interval of the least predicted time for each layer by itself, its slots being given."""
    seconds = layer_seconds(curves, costs, slots).all
    best = len(seconds) - 1 - seconds[::-1].argmin(axis=0)
    return plan_of(curves, costs, slots, INTERVALS[best], "layers")


def published_curve(curves: RefreshCurves, costs: RefreshCosts, slots: np.ndarray) -> np.ndarray:
    """`[T]` seconds of an iteration by TIDE's eq. 5 to 7 as published, without curves.

    `C_IO * (B / tau) * (1 - (1 - d)^tau) + C_CPU * B * f(tau)`, summed over layers, B being the layer's slots, d
    the fitted drift there. f is not given in closed form; ours is the mean share of residents that drifted
    away, `(1 / tau) * sum over j < tau of 1 - (1 - d)^j`. Where the host cannot compute, C_CPU is the transfer.
    """
    fitted = np.interp(slots, curves.slots, curves.drift[0])  # [layers]
    gone = 1.0 - (1.0 - fitted) ** np.arange(INTERVALS[-1] + 1)[:, None]  # [j, layers]
    drifted = np.cumsum(gone, axis=0)[:-1] / INTERVALS[:, None]
    compute_s = costs.transfer_s if costs.host_s == inf else costs.host_s
    io = costs.transfer_s * slots / INTERVALS[:, None] * gone[1:]
    return np.asarray((io + compute_s * slots * drifted).sum(axis=1))


def solve_published(curves: RefreshCurves, costs: RefreshCosts, slots: np.ndarray) -> int:
    """The interval that minimises eq. 7 as published, tried over all integers."""
    return int(INTERVALS[published_curve(curves, costs, slots).argmin()])
