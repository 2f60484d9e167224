"""Time of an iteration over the refresh interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relume.figures.drawing import require_drawing, save

if TYPE_CHECKING:
    from relume.simulate.intervals import IntervalRow

#: Inches of a panel.
_WIDTH, _HEIGHT = 4.2, 3.0


@dataclass(frozen=True)
class IntervalCurve:
    """One line over the intervals 1, 2, ...

    Attributes:
        panel: title of the panel that it belongs to.
        label: of it.
        predicted_ms, simulated_ms: of an iteration; what is simulated may be missing.
        solved: the interval that is marked; `None` where layers have different ones.
    """

    panel: str
    label: str
    predicted_ms: Sequence[float]
    simulated_ms: Sequence[float]
    solved: int | None


def curve_of(row: IntervalRow) -> IntervalCurve:
    """A row of the comparison."""
    panel = f"{Path(row.trace).name}, {row.hardware}"
    return IntervalCurve(panel, row.expert_memory, row.predicted_ms, row.curve_ms, row.solved_interval)


def draw_intervals(curves: Sequence[IntervalCurve], path: Path) -> None:
    """A panel for each title: predictions dashed, simulations solid, and a dot at the interval that was solved.

    Raises:
        RelumeError: matplotlib is missing, or the file cannot be written.
    """
    require_drawing(path)
    from matplotlib.figure import Figure

    titles = list(dict.fromkeys(curve.panel for curve in curves))
    columns = min(4, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes, title in zip(panels.flat, titles, strict=False):
        for number, curve in enumerate(found for found in curves if found.panel == title):
            colour = f"C{number}"
            intervals = range(1, len(curve.predicted_ms) + 1)
            axes.plot(intervals, curve.predicted_ms, color=colour, linestyle="--", linewidth=1)
            shown = curve.simulated_ms or curve.predicted_ms
            if curve.simulated_ms:
                axes.plot(intervals, shown, color=colour, linewidth=1.8, label=curve.label)
            if curve.solved is not None:
                axes.plot(curve.solved, shown[curve.solved - 1], color=colour, marker="o")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("iterations between refreshes")
        axes.set_ylabel("ms an iteration")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title="expert memory", title_fontsize=8) if curves[0].simulated_ms else None
    for axes in list(panels.flat)[len(titles) :]:
        axes.set_visible(False)
    kinds = "simulated (lines) and predicted (dashes)" if curves[0].simulated_ms else "predicted"
    figure.suptitle(f"{kinds}; dots: the interval that was solved", fontsize=10)
    save(figure, path)
