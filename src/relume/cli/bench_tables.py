"""How `relume bench` shows what it simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from relume.cli.simulate import figures_of
from relume.simulate.ablation import SEAMS, AblationResult
from relume.simulate.comparisons import (
    PAPER,
    PAPER_EXCESS,
    PAPER_TPOT_GAIN,
    PAPER_UTILISATION_GAIN,
    Comparison,
    Gains,
    range_of,
)
from relume.simulate.groups import LINK, Group, TraceLabel
from relume.simulate.matrix import BOUND
from relume.simulate.rows import SimulationRow

_FIGURES = ("hit rate", "util.", "moved/token", "hosted", "TPOT ms")
#: Of a table that goes to a file or a pipe.
_WIDTH = 160


def print_strategies(group: Group) -> None:
    """A trace on a machine: strategies by budget, full residency first and the bound last."""
    table = make_table(group.title, "memory", *_FIGURES, "x full")
    budget = None
    for row in group.rows:
        if budget is not None and row.expert_memory != budget:
            table.add_row()
        budget = row.expert_memory
        table.add_row(row.strategy, budget, *figures_of(row), _factor(group.over_full(row), ""))
    _print(table)


def print_comparisons(comparisons: Sequence[Comparison]) -> None:
    """OLED's gains as simulated and as its paper has them, and where foresight is slower than OLED."""
    for comparison in comparisons:
        title = f"simulated: {Path(comparison.trace).name}, {comparison.hardware}"
        table = Table("", title, f"paper, measured ({PAPER})", box=None, pad_edge=False)
        for what, gains, paper in (
            ("oled's TPOT gain", comparison.tpot_gain, PAPER_TPOT_GAIN),
            ("oled's utilisation gain", comparison.utilisation_gain, PAPER_UTILISATION_GAIN),
        ):
            for baseline, by_budget in gains.items():
                table.add_row(f"{what} over {baseline}", _by_budget(by_budget), "")
            table.add_row(f"{what}, range", _range(gains), "{:.2f}x to {:.2f}x".format(*paper))
        excess = "-" if comparison.excess is None else f"{comparison.excess:+.0%}"
        where = f"{comparison.nearest_budget} ({comparison.nearest_share:.1%} of the experts)"
        table.add_row("oled's TPOT over full residency's", f"{excess} at {where}", f"{PAPER_EXCESS:+.0%} at 40%")
        table.add_row("foresight's TPOT / oled's", _by_budget(comparison.foresight_over_oled), "")
        _print(table)
    cells = sum(len(comparison.foresight_over_oled) for comparison in comparisons)
    slower = [
        f"{comparison.trace}, {comparison.hardware} at {budget} ({factor:.3f}x)"
        for comparison in comparisons
        for budget, factor in comparison.slower.items()
    ]
    if cells and not slower:
        make_console().print(f"simulated: foresight is at least as fast as oled in all {cells} cells")
    elif cells:
        make_console().print(f"simulated: foresight is slower than oled in {len(slower)} of {cells} cells:")
        make_console().print("\n".join(f"  {cell}" for cell in slower), soft_wrap=True)


def print_ablation(group: Group, budget: str, results: Sequence[AblationResult]) -> None:
    """A trace on a machine at a budget: each system's components."""
    table = make_table(f"{group.title}, expert memory {budget}", *_FIGURES, "gain")
    system = ""
    for result in results:
        if result.variant.system != system:
            system = result.variant.system
            table.add_row()
            table.add_row(f"of {system}:")
        names = " + ".join(SEAMS[seam] for seam in result.variant.components) or "none (lru)"
        table.add_row(f"  {names}", *figures_of(result.row), _factor(result.gain))
    _print(table)


def print_sensitivity(groups: Sequence[Group], strategies: Sequence[str], varied: str) -> None:
    """Milliseconds per token and hit rate of each strategy, a line for each value of what is `varied`."""
    tables: dict[str, Table] = {}
    for group in groups:
        machine = group.hardware.name.partition(f":{LINK}=")[0]
        for budget in group.budgets:
            title, label = {
                "budget": (group.title, budget),
                "link": (f"{group.trace.path.name}, {machine}, {budget}", f"{group.link_gb_s:g} GB/s"),
                "trace": (f"{machine}, {budget}", _label(group.trace)),
            }[varied]
            if title not in tables:
                tables[title] = make_table(title, *strategies, "full", BOUND)
            rows = [group.row(name, budget) for name in strategies]
            figures = [f"{_ms(row)} {_share(row)}" for row in rows]
            tables[title].add_row(label, *figures, _ms(group.full), _share(group.row(BOUND, budget)))
    for table in tables.values():
        _print(table)
    make_console().print("TPOT ms and hit rate; of full the TPOT, of belady the hit rate")


def _label(trace: TraceLabel) -> str:
    if trace.block_length is None:
        return trace.path.name
    return f"{trace.path.name}, block {trace.block_length:g}, {trace.requests_per_forward:.2f} requests a forward"


def _ms(row: SimulationRow | None) -> str:
    return "-" if row is None or row.tpot_ms is None else f"{row.tpot_ms:.2f}"


def _share(row: SimulationRow | None) -> str:
    return "-" if row is None or row.hit_rate is None else f"{row.hit_rate:.3f}"


def _factor(value: float | None, unit: str = "x") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _by_budget(values: dict[str, float | None]) -> str:
    return ", ".join(f"{_factor(value)} at {budget}" for budget, value in values.items()) or "-"


def _range(gains: Gains) -> str:
    found = range_of(gains)
    return "-" if found is None else "{:.2f}x to {:.2f}x".format(*found)


def make_table(title: str, *columns: str) -> Table:
    """Of simulated figures, under unnamed labels."""
    table = Table(title=f"simulated: {title}", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def make_console() -> Console:
    """Of a terminal's width, or wide enough for a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH)


def _print(table: Table) -> None:
    console = make_console()
    console.print(table)
    console.print()
