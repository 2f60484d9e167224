"""What OLED-MoE's paper compares, computed from simulated rows and put next to the paper's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from relume.simulate.groups import Group, ratio
from relume.simulate.rows import SimulationRow

OLED, FORESIGHT = "oled", "foresight"
#: Baselines that prefetch. The paper's ranges are over its offloading baselines, of which FineMoE is one for sure.
PREFETCHING = ("moe-infinity", "finemoe", "hybrimoe")
#: Where the paper's figures are from: its abstract, which is all of it that we could read.
PAPER = "arXiv 2609.33385"
PAPER_TPOT_GAIN = (1.23, 7.93)
PAPER_UTILISATION_GAIN = (1.44, 4.23)
PAPER_EXCESS = 0.23
#: Share of the experts that are resident where the paper compares with full residency.
PAPER_SHARE = 0.4

#: Of each baseline that was simulated, by budget; `None` where a figure is missing.
Gains = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Comparison:
    """One trace on one machine.

    Attributes:
        trace, hardware: which.
        tpot_gain: a prefetching baseline's time per token / OLED's.
        utilisation_gain: OLED's utilisation / that baseline's.
        nearest_budget: the budget whose share of resident experts is nearest to the paper's.
        nearest_share: that share.
        excess: there, OLED's time per token / that of full residency, less 1.
        foresight_over_oled: foresight's time per token / OLED's, by budget.
    """

    trace: str
    hardware: str
    tpot_gain: Gains
    utilisation_gain: Gains
    nearest_budget: str
    nearest_share: float
    excess: float | None
    foresight_over_oled: dict[str, float | None]

    @property
    def slower(self) -> dict[str, float]:
        """Budgets at which foresight is slower than OLED, and by what factor."""
        return {budget: found for budget, found in self.foresight_over_oled.items() if found and found > 1.0}

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def compare(group: Group) -> Comparison | None:
    """The paper's comparisons; `None` if OLED is not among the rows."""
    ours = {budget: row for budget in group.budgets if (row := group.row(OLED, budget)) is not None}
    if not ours:
        return None
    shares = {budget: row.slots_per_layer / group.trace.num_experts for budget, row in ours.items()}
    nearest = min(shares, key=lambda budget: abs(shares[budget] - PAPER_SHARE))
    over_full = group.over_full(ours[nearest])
    return Comparison(
        trace=str(group.trace.path),
        hardware=group.hardware.name,
        tpot_gain=_gains(group, ours, lambda oled, other: ratio(other.tpot_ms, oled.tpot_ms)),
        utilisation_gain=_gains(group, ours, lambda oled, other: ratio(oled.utilisation, other.utilisation)),
        nearest_budget=nearest,
        nearest_share=shares[nearest],
        excess=None if over_full is None else over_full - 1.0,
        foresight_over_oled={
            budget: ratio(found.tpot_ms, row.tpot_ms)
            for budget, row in ours.items()
            if (found := group.row(FORESIGHT, budget)) is not None
        },
    )


def range_of(gains: Gains) -> tuple[float, float] | None:
    """The least and the largest gain over baselines and budgets; `None` if there is none."""
    found = [gain for by_budget in gains.values() for gain in by_budget.values() if gain is not None]
    return (min(found), max(found)) if found else None


def _gains(
    group: Group,
    ours: dict[str, SimulationRow],
    gain: Callable[[SimulationRow, SimulationRow], float | None],
) -> Gains:
    found: Gains = {}
    for name in PREFETCHING:
        rows = {budget: group.row(name, budget) for budget in ours}
        there = {budget: gain(ours[budget], row) for budget, row in rows.items() if row is not None}
        if there:
            found[name] = there
    return found
