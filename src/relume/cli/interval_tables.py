"""How `relume bench tide` and `relume plan` show refresh intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relume.cli.bench_tables import make_console, make_table

if TYPE_CHECKING:
    from rich.console import Console

    from relume.simulate.intervals import IntervalRow
    from relume.simulate.tide_paper import PaperRow

#: Intervals of the curve that a table has room for.
_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 31)


def print_intervals(rows: Sequence[IntervalRow]) -> None:
    """What was solved next to what is best, the whole curve, and what intervals and slots of each layer gain."""
    console = make_console()
    for title in dict.fromkeys(_title(row) for row in rows):
        own = [row for row in rows if _title(row) == title]
        table = make_table(
            title,
            *("solved", "ms/token", "best", "ms/token", "excess", "model ms", "clock ms", "error", "worst"),
            *("eq. 5-7", "ms/token", "by layer", "gain", "solved in", "gap"),
        )
        for row in own:
            table.add_row(
                row.expert_memory,
                *(f"{row.solved_interval}", f"{row.solved_ms:.2f}", f"{row.best_interval}", f"{row.best_ms:.2f}"),
                *(f"{row.excess:+.1%}", f"{row.model_ms:.2f}", f"{row.clock_ms:.2f}", f"{row.model_error:+.1%}"),
                *(f"{row.largest_error:+.1%}", f"{row.published_interval}", f"{row.published_ms:.2f}"),
                *(f"{row.layers_ms:.2f}", f"{row.layers_gain:+.1%}", f"{row.solve_s:.2f} s", f"{row.gap:.1e}"),
            )
        console.print(table)
        curve = make_table("ms an iteration by interval", *(str(interval) for interval in _SHOWN))
        for row in own:
            for label, values in ((row.expert_memory, row.curve_ms), ("  predicted", row.predicted_ms)):
                curve.add_row(label, *(f"{values[interval - 1]:.2f}" for interval in _SHOWN))
        console.print(curve)
        console.print()
    largest = max((row.model_error for row in rows), key=abs)
    console.print(
        f"simulated: the solved interval is at most {max(row.excess for row in rows):.1%} slower than the best of "
        f"1..31; the model is off by at most {abs(largest):.1%} there; by layer gains "
        f"{min(row.layers_gain for row in rows):+.1%} to {max(row.layers_gain for row in rows):+.1%}"
    )


def print_paper(rows: Sequence[PaperRow]) -> None:
    """Each cell of TIDE's table: gains over the baselines as simulated, and over its better one as published."""
    from relume.simulate.tide_paper import BASELINES, PAPER, PAPER_HEADLINE

    console = make_console()
    table = make_table("TIDE's gain in time per token over", *BASELINES, "tide ms", "paper, measured", "over")
    for row in rows:
        cell = row.cell
        table.add_row(
            f"{cell.hardware} {cell.work}, {cell.slots} of 256",
            *(f"{row.gains[name]:.2f}x" for name in BASELINES),
            *(f"{row.tide_ms:.2f}", f"{row.paper_gain:.2f}x", cell.baseline),
        )
    console.print(table)
    headline = ", ".join(f"{gain}x for {work}" for work, gain in PAPER_HEADLINE.items())
    console.print(f"The paper ({PAPER}) names up to {headline}.")


def print_refresh(refresh: Mapping[str, Any], console: Console) -> None:
    """The refresh interval of a plan: which, what it takes by part, the curve, and why."""
    intervals, slots = refresh["intervals"], refresh["slots"]
    one = len(set(intervals)) == 1
    how = {"given": "as given", "measured": "solved", "layers": "solved for each layer"}[refresh["method"]]
    console.print()
    console.print(f"Refresh interval, {how}: {_iterations(intervals[0]) if one else _spelled(intervals)}")
    if not one:
        console.print(f"Slots: {_spelled(slots)}")
    lanes = refresh["lanes_ms"]
    console.print(
        f"Predicted for {refresh['hardware']}: {refresh['iteration_ms']:.2f} ms an iteration, "
        f"{refresh['outside_experts_ms']:.2f} ms of it outside experts. Their lanes, side by side: device "
        f"{lanes['device']:.2f} ms, link {lanes['link']:.2f} ms, host {lanes['host']:.2f} ms."
    )
    curve = make_table("ms an iteration by interval, predicted", *(str(interval) for interval in _SHOWN))
    curve.add_row("", *(f"{refresh['curve_ms'][interval - 1]:.2f}" for interval in _SHOWN))
    console.print(curve)
    costs = refresh["costs"]
    host = "cannot compute it" if costs["host_s"] is None else f"computes it in {1e6 * costs['host_s']:.0f} us"
    console.print(
        f"Why: an expert crosses the link in {1e6 * costs['transfer_s']:.0f} us, the host {host}; the residents "
        f"drift by {refresh['drift']:.3f} an iteration (fitted, error {refresh['drift_error']:.3f} of the slots, "
        f"over {refresh['iterations_profiled']} iterations of the profile). The formulas as published, which have "
        f"no measured curve and add the lanes up, give {refresh['published_interval']}."
    )
    if refresh["gap"]:
        console.print(f"The program over layers is within {refresh['gap']:.1e} of its best value.")


def _iterations(interval: int) -> str:
    return "every iteration" if interval == 1 else f"every {interval} iterations"


def _spelled(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def _title(row: IntervalRow) -> str:
    return f"{Path(row.trace).name}, {row.hardware}"
