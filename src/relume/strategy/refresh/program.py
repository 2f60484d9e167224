"""Interval and slots of every layer together: a small mixed-integer program."""

from __future__ import annotations

import warnings
from functools import lru_cache

import numpy as np

from relume.strategy.budget import uniform
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.curves import INTERVALS, RefreshCurves
from relume.strategy.refresh.solve import LEAST_GAIN, RefreshPlan, layer_seconds, plan_of, solve_interval
from relume.strategy.use import ExpertShape

#: Numbers of slots that a layer may get, beside an even share: so many steps from few to all experts.
_STEPS = 32
#: A program is stopped after so many seconds.
TIME_LIMIT_S = 0.8
#: What is left between a solution and the bound, relatively, when it counts as solved.
GAP = 1e-4


@lru_cache(maxsize=16)  # asked once for the slots, and once for the intervals that go with them
def solve_layers(
    curves: RefreshCurves,
    costs: RefreshCosts,
    total_slots: int,
    shape: ExpertShape,
    time_limit_s: float = TIME_LIMIT_S,
) -> RefreshPlan:
    """The intervals and slots of all layers that take the least predicted time.

    Minimises the sum over layers of `seconds[layer, interval, slots]` such that each layer takes one pair, all
    slots fit the budget, and the link is busy at most `costs.link_share` of that time; 1 is always met, as a layer
    waits for its transfers. A pair that another one of the same slots beats in time and in link time is left out
    beforehand. Ours; TIDE has one interval and equal slots.

    Args:
        curves: of the model.
        costs: of the machine.
        total_slots: of all layers together.
        shape: of the model; a layer gets at least top-k slots, where so many fit.
        time_limit_s: after which the plan with one interval is taken instead, and says so.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]

    num_layers = shape.num_layers
    even = np.array(uniform(total_slots, shape))
    single = solve_interval(curves, costs, even)
    least = min(shape.top_k, total_slots // num_layers)
    layers, slots, rows, seconds, link = _candidates(curves, costs, even, least)
    ones = np.ones(len(layers))
    member = (layers == np.arange(num_layers)[:, None]).astype(float)
    constraints = [
        LinearConstraint(member, 1.0, 1.0),
        LinearConstraint(slots[None], 0.0, total_slots),
        LinearConstraint((link - costs.link_share * seconds)[None], -np.inf, 0.0),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a time limit that was met is told below
        found = milp(
            seconds,
            integrality=ones,
            bounds=Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
        )
    if found.x is None or found.status != 0:
        reason = "ran out of time" if found.status == 1 else f"was not solved ({found.message})"
        note = f"the program over layers {reason}: all layers get the interval of {single.intervals[0]} instead"
        return plan_of(curves, costs, even, np.array(single.intervals), "measured", notes=(note,))
    chosen = found.x > 0.5
    order = np.argsort(layers[chosen])
    best_slots, best_rows = slots[chosen][order], rows[chosen][order]
    spare = total_slots - int(best_slots.sum())  # steps need not add up to the budget
    fewest = np.argsort(best_slots, kind="stable")[:spare]
    best_slots[fewest] += best_slots[fewest] < shape.num_experts
    plan = plan_of(curves, costs, best_slots, INTERVALS[best_rows], "layers", float(found.mip_gap or 0.0))
    gain = 1.0 - plan.experts_s / single.experts_s
    if gain >= LEAST_GAIN or single.lanes_s["link"] > costs.link_share * single.experts_s:
        return plan
    note = (
        f"intervals and slots of their own would save {gain:.1%} of an iteration, less than the {LEAST_GAIN:.0%} "
        "that the prediction can tell: all layers share one interval and have equal slots"
    )
    return plan_of(curves, costs, even, np.array(single.intervals), "measured", notes=(note,))


def _candidates(
    curves: RefreshCurves, costs: RefreshCosts, even: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Layer, slots, row of the interval, seconds and link seconds of every pair that no other one beats."""
    num_experts = curves.num_experts
    steps = np.unique(np.linspace(max(1, least), num_experts, min(_STEPS, num_experts)).round().astype(int))
    found: list[tuple[np.ndarray, ...]] = []
    for number in sorted({*steps.tolist(), *np.unique(even).tolist()}):
        predicted = layer_seconds(curves, costs, np.full(len(even), number))
        for layer in range(len(even)):
            rows = _undominated(predicted.all[:, layer], predicted.link[:, layer])
            found.append(
                (
                    np.full(len(rows), layer),
                    np.full(len(rows), number),
                    rows,
                    predicted.all[rows, layer],
                    predicted.link[rows, layer],
                )
            )
    layers, slots, rows, seconds, link = (np.concatenate(part) for part in zip(*found, strict=True))
    return layers, slots, rows, seconds, link


def _undominated(seconds: np.ndarray, link: np.ndarray) -> np.ndarray:
    """Rows, by rising time, of which none is beaten in both."""
    order = np.lexsort((link, seconds))
    falling = np.minimum.accumulate(link[order])
    keep = np.concatenate(([True], link[order][1:] < falling[:-1]))
    return order[keep]
