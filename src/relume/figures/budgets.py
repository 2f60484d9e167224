"""Time per token and hit rate over the budget, a line for each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relume.figures.drawing import require_drawing, save
from relume.simulate.groups import FULL, Group
from relume.simulate.matrix import BOUND

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

#: Inches of a panel.
_WIDTH, _HEIGHT = 4.6, 3.4
#: Strategies that stand out, and their colours; the others share a row of duller ones.
_OURS = {"oled": "#0072B2", "foresight": "#D55E00"}
_OTHERS = ("#999999", "#8C6D31", "#7B4173", "#5B8C5A", "#B07AA1", "#7F9FBF", "#C49C94", "#6B6B6B", "#BCBD22")
_MARKERS = "svD^<>pPX"


def draw_budgets(groups: Sequence[Group], path: Path) -> None:
    """Draw two panels for each trace and machine, one below the other: TPOT, and hit rate.

    Full residency's TPOT is dashed, the hit rate of Belady's bound is dotted.

    Raises:
        RelumeError: matplotlib is missing, or the file cannot be written.
    """
    require_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * _WIDTH + 1.8, _HEIGHT * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for group, (times, hits) in zip(groups, panels, strict=True):
        _draw_times(times, group)
        _draw_hits(hits, group)
    handles: dict[str, Artist] = {}
    for axes in panels.flat:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    save(figure, path)


def _draw_times(axes: Axes, group: Group) -> None:
    for name in _strategies(group):
        rows = [row for row in group.rows if row.strategy == name and row.tpot_ms is not None]
        _line(axes, group, name, [row.slots_per_layer for row in rows], [row.tpot_ms or 0.0 for row in rows])
    if group.full is not None and group.full.tpot_ms is not None:
        axes.axhline(group.full.tpot_ms, color="black", linestyle="--", label="full residency")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylabel("TPOT, ms")
    _finish(axes, group)


def _draw_hits(axes: Axes, group: Group) -> None:
    for name in [*_strategies(group), BOUND]:
        rows = [row for row in group.rows if row.strategy == name and row.hit_rate is not None]
        _line(axes, group, name, [row.slots_per_layer for row in rows], [row.hit_rate or 0.0 for row in rows])
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("hit rate")
    _finish(axes, group)


def _strategies(group: Group) -> list[str]:
    names = dict.fromkeys(row.strategy for row in group.rows)
    return [name for name in names if name not in {FULL, BOUND}]


def _line(axes: Axes, group: Group, name: str, slots: list[float], values: list[float]) -> None:
    points = sorted(zip(slots, values, strict=True))
    x, y = [slot for slot, _ in points], [value for _, value in points]
    if name == BOUND:
        axes.plot(x, y, color="black", linestyle=":", label=f"{BOUND}, the bound")
    elif name in _OURS:
        axes.plot(x, y, color=_OURS[name], linewidth=2.5, marker="o", label=name, zorder=3)
    else:
        number = [other for other in _strategies(group) if other not in _OURS].index(name)
        colour, marker = _OTHERS[number % len(_OTHERS)], _MARKERS[number % len(_MARKERS)]
        axes.plot(x, y, color=colour, linewidth=1.2, marker=marker, markersize=5, label=name)


def _finish(axes: Axes, group: Group) -> None:
    axes.set_title(f"simulated: {group.title}", fontsize=10)
    axes.set_xlabel(f"resident experts of {group.trace.num_experts} a layer")
    axes.grid(alpha=0.3, which="both")
