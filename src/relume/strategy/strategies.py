"""Named choices of what stays, what is brought ahead, where a miss is computed, and what each layer gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from relume.core import Registry, RelumeError, T
from relume.strategy.dispatch import DISPATCHES
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.foresight.statistics import TokenStatistics
from relume.strategy.layer_budgets import BUDGETS
from relume.strategy.placement import Parts
from relume.strategy.prefetch import PREFETCHES
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.retention import RETENTIONS
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.retention.finemoe import FineMoE
from relume.strategy.retention.moe_infinity import MoEInfinity
from relume.strategy.use import ExpertShape


@dataclass(frozen=True)
class Strategy:
    """One name from each of the four registries.

    Attributes:
        retention, prefetch, dispatch, budget: the names.
        parameters: of the retention.
    """

    retention: str
    prefetch: str = "none"
    dispatch: str = "transfer"
    budget: str = "uniform"
    parameters: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name of `STRATEGIES`, and what differs: `oled:dispatch=transfer:decay=0.5`.

        Raises:
            RelumeError: an unknown name, part or parameter.
        """
        name, *changes = text.strip().split(":")
        strategy = STRATEGIES[name]
        for change in changes:
            key, equals, value = change.partition("=")
            if key in _PARTS and equals:
                _PARTS[key][value]  # refuses an unknown name
                strategy = replace(strategy, **{key: value})  # type: ignore[arg-type]
                continue
            try:
                number = float(value)
            except ValueError:
                raise RelumeError(
                    f"strategy {text!r}: {change!r} is neither {', '.join(_PARTS)} with a name nor a parameter of "
                    f"{strategy.retention} with a number"
                ) from None
            strategy = replace(strategy, parameters={**strategy.parameters, key: number})
        known = list(inspect.signature(RETENTIONS[strategy.retention]).parameters)[1:]
        for key in strategy.parameters:
            if key not in known:
                has = f"has {', '.join(known)}" if known else "has none"
                raise RelumeError(f"strategy {text!r}: no parameter {key!r}; {strategy.retention} {has}")
        assert isinstance(strategy, cls)
        return strategy

    def num_bytes(self, shape: ExpertShape) -> int:
        """Of the tables that it keeps, where they are worth counting."""
        if self.retention not in _TABLES:
            return 0
        capacity = {key: value for key, value in self.parameters.items() if key == "capacity"}
        return _TABLES[self.retention](shape, **capacity)

    def weigh(self, costs: RefreshCosts | None) -> RefreshCosts | None:
        """A machine's costs as its budget and its retention are to see them: with its share of the link."""
        share = self.parameters.get("link")
        return costs if costs is None or share is None else replace(costs, link_share=share)

    def make(self, context: RetentionContext) -> Parts:
        """Its objects, fresh.

        Raises:
            RelumeError: the retention lacks something, such as a profile.
        """
        retention = RETENTIONS[self.retention](context, **self.parameters)
        make = PREFETCHES[self.prefetch]
        prefetch = None if make is None else make()
        if self.prefetch == "own":
            prefetch = self._own(retention, Prefetch, "prefetch")  # type: ignore[type-abstract]
        if self.dispatch == "own":
            return Parts(retention, prefetch, self._own(retention, Dispatch, "dispatch"))  # type: ignore[type-abstract]
        return Parts(retention, prefetch, DISPATCHES[self.dispatch]())

    def _own(self, retention: Retention, kind: type[T], seam: str) -> T:
        """The retention as what it is besides."""
        if isinstance(retention, kind):
            return retention
        others = ", ".join(name for name in _PARTS[seam] if name != "own")
        raise RelumeError(f"{self.retention} has no {seam} of its own: choose one of {others}")


#: Bytes of the tables of retentions that keep large ones.
_TABLES: Mapping[str, Callable[..., int]] = {
    "foresight": TokenStatistics.num_bytes,
    "moe-infinity": MoEInfinity.num_bytes,
    "finemoe": FineMoE.num_bytes,
}

_PARTS: Mapping[str, Mapping[str, object]] = {
    "retention": RETENTIONS,
    "prefetch": PREFETCHES,
    "dispatch": Registry("dispatch", {**DISPATCHES, "own": None}),  # the retention itself, where it dispatches too
    "budget": BUDGETS,
}

STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {
        **{
            name: Strategy(name)
            for name in ("full", "lru", "lfu", "lfru", "least-stale", "static", "counts", "belady")
        },
        "oled": Strategy("oled", dispatch="balanced", budget="activation"),
        "foresight": Strategy("foresight", "need", "balanced"),
        "fiddler": Strategy("static", dispatch="fiddler"),
        "fiddler-max": Strategy("static", dispatch="fiddler-max"),
        "freetoken": Strategy("lru", dispatch="freetoken"),
        "moe-infinity": Strategy("moe-infinity", "own"),
        "finemoe": Strategy("finemoe", "own"),
        "hybrimoe": Strategy("hybrimoe", "own", "hybrimoe"),
        "tide": Strategy("tide", dispatch="own"),
        "tide-layers": Strategy("tide", dispatch="own", budget="refresh", parameters={"by_layer": 1}),
        "refresh-always": Strategy("tide", parameters={"interval": 1}),
    },
)
