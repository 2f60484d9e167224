"""A strategy's components, one by one: what each of them is worth alone and with the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from relume.simulate.groups import Group, ratio
from relume.simulate.rows import SimulationRow
from relume.strategy.strategies import STRATEGIES

BASELINE = "lru"
#: Strategies that are taken apart.
SYSTEMS = ("oled", "foresight")
#: Seams, and what a strategy's choice there is called.
SEAMS = {"retention": "retention", "budget": "layer budgets", "prefetch": "prefetch", "dispatch": "dispatch"}


@dataclass(frozen=True)
class Variant:
    """The baseline with some components of another strategy.

    Attributes:
        system: that strategy.
        components: seams that are taken from it, in the order of `SEAMS`; the others are the baseline's.
        strategy: what that makes, as `Strategy.parse` reads it.
    """

    system: str
    components: tuple[str, ...]
    strategy: str


@dataclass(frozen=True)
class AblationResult:
    """A variant as it was simulated.

    Attributes:
        variant: which.
        row: its.
        gain: the baseline's time per token / its.
    """

    variant: Variant
    row: SimulationRow
    gain: float | None

    def to_dict(self) -> dict[str, Any]:
        """What it has beyond the row, for JSON."""
        return {"system": self.variant.system, "components": list(self.variant.components), "gain": self.gain}


def components_of(system: str) -> list[str]:
    """Seams in which a strategy differs from the baseline."""
    theirs, ours = STRATEGIES[system], STRATEGIES[BASELINE]
    return [seam for seam in SEAMS if getattr(theirs, seam) != getattr(ours, seam)]


def variants(system: str) -> list[Variant]:
    """Every choice of a strategy's components: none, each alone, each pair, and so on to all of them."""
    there = components_of(system)
    chosen = [some for count in range(len(there) + 1) for some in combinations(there, count)]
    return [Variant(system, some, _strategy(system, some)) for some in chosen]


def ablate(group: Group, budget: str) -> list[AblationResult]:
    """The variants of all systems, system by system, from rows that have every one of them at this budget."""
    baseline, results = group.row(BASELINE, budget), []
    assert baseline is not None
    for variant in (variant for system in SYSTEMS for variant in variants(system)):
        row = group.row(variant.strategy, budget)
        assert row is not None
        results.append(AblationResult(variant, row, ratio(baseline.tpot_ms, row.tpot_ms)))
    return results


def _strategy(system: str, components: tuple[str, ...]) -> str:
    name = system if "retention" in components else BASELINE
    text = name
    for seam in SEAMS:
        wanted = getattr(STRATEGIES[system if seam in components else BASELINE], seam)
        if seam != "retention" and wanted != getattr(STRATEGIES[name], seam):
            text += f":{seam}={wanted}"
    return text
