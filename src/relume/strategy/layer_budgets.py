"""How a number of slots is shared among layers."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from relume.core import Registry
from relume.strategy.budget import uniform
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.program import solve_layers
from relume.strategy.use import ExpertShape


class LayerBudget(Protocol):
    """From slots in all, the model's shape, its profile and the machine's costs to slots of each layer."""

    def __call__(
        self, total_slots: int, shape: ExpertShape, profile: Profile | None, costs: RefreshCosts | None = None
    ) -> list[int]:
        """See the class."""
        ...


def by_activation(
    total_slots: int, shape: ExpertShape, profile: Profile | None, costs: RefreshCosts | None = None
) -> list[int]:
    """In proportion to the experts that an iteration uses, as OLED-MoE does (Fig. 10).

    At least top-k each where that many fit, at most all; what rounding leaves over goes to the largest remainders.
    Without a profile every layer gets the same.
    """
    del costs
    if profile is None:
        return uniform(total_slots, shape)
    least = min(shape.top_k, total_slots // shape.num_layers)
    wanted = total_slots * profile.mean_active / profile.mean_active.sum()
    slots = np.clip(np.floor(wanted), least, shape.num_experts)
    return _settle(slots, wanted, total_slots, least, shape)


def by_marginal_hits(
    total_slots: int, shape: ExpertShape, profile: Profile | None, costs: RefreshCosts | None = None
) -> list[int]:
    """One slot after the other to the layer in which it is hit most often. Ours.

    A layer's r-th slot holds the expert with the r-th most votes, which a profile's `reuse` says how often is
    active next. That falls with the rank, so the sum of hits is concave and taking the best slot each time is
    optimal. At least top-k each where that many fit. Without a profile every layer gets the same.
    """
    del costs
    if profile is None:
        return uniform(total_slots, shape)
    least = min(shape.top_k, total_slots // shape.num_layers)
    gains = np.minimum.accumulate(profile.reuse, axis=1)  # counted, so not quite falling everywhere
    gains[:, :least] = np.inf
    order = np.argsort(-gains, axis=None, kind="stable")[:total_slots]
    return [int(number) for number in np.bincount(order // shape.num_experts, minlength=shape.num_layers)]


def _settle(slots: np.ndarray, wanted: np.ndarray, total_slots: int, least: int, shape: ExpertShape) -> list[int]:
    """Add or take single slots until the sum is right, where the share is missed most."""
    while (left := total_slots - int(slots.sum())) != 0:
        step = 1 if left > 0 else -1
        room = slots < shape.num_experts if step > 0 else slots > least
        lack = np.where(room, step * (wanted - slots), -np.inf)
        slots[int(lack.argmax())] += step
    return [int(number) for number in slots]


def by_refresh(
    total_slots: int, shape: ExpertShape, profile: Profile | None, costs: RefreshCosts | None = None
) -> list[int]:
    """As the program over layers solves it together with their intervals (`solve_layers`).

    Without a profile that has curves, or where costs are not known, every layer gets the same.
    """
    if profile is None or profile.refresh is None or costs is None:
        return uniform(total_slots, shape)
    return list(solve_layers(profile.refresh, costs, total_slots, shape).slots)


def _uniform(
    total_slots: int, shape: ExpertShape, profile: Profile | None, costs: RefreshCosts | None = None
) -> list[int]:
    del profile, costs
    return uniform(total_slots, shape)


BUDGETS: Registry[LayerBudget] = Registry(
    "layer budget",
    {
        "uniform": _uniform,
        "activation": by_activation,
        "marginal": by_marginal_hits,
        "refresh": by_refresh,
    },
)
