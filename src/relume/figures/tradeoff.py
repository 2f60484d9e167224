"""Exact match over the experts that a block uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.figures.drawing import require_drawing, save

_MARKERS = "osD^v<>pPX*"


@dataclass(frozen=True)
class TradeoffPoint:
    """One marker.

    Attributes:
        line: its points are joined, in order of their experts.
        active_experts: distinct experts of a layer in an iteration.
        exact_match: share of right answers.
        interval: of it, 95 per cent.
        is_base: it is drawn as a dashed line across, too.
    """

    line: str
    active_experts: float
    exact_match: float
    interval: tuple[float, float]
    is_base: bool = False


def curve_of(routing: str) -> str:
    """The curve that a routing belongs to: its name, and what else than its strength was chosen."""
    name, *options = routing.split(":")
    native = ", native prefill" if "prefill=native" in options else ""
    residents = ", heeding residents" if any(option.startswith("residents=") for option in options) else ""
    return name + native + residents


def draw_tradeoff(points: Sequence[TradeoffPoint], path: Path) -> None:
    """Draw all of it, measured; error bars are the intervals.

    Raises:
        RelumeError: matplotlib is missing, or the file cannot be written.
    """
    require_drawing(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, line in enumerate(dict.fromkeys(point.line for point in points)):
        chosen = sorted((p for p in points if p.line == line), key=lambda point: point.active_experts)
        heights = [point.exact_match for point in chosen]
        # Of 0 and 1 an end of the interval is the share itself, but for rounding.
        below = [max(0.0, point.exact_match - point.interval[0]) for point in chosen]
        above = [max(0.0, point.interval[1] - point.exact_match) for point in chosen]
        axes.errorbar(
            [point.active_experts for point in chosen],
            heights,
            yerr=(below, above),
            label=line,
            color=f"C{number % 10}",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=6,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=2,
        )
    for point in points:
        if point.is_base:
            axes.axhline(point.exact_match, color="black", linestyle="--", linewidth=1, label="base")
    axes.set_xlim(left=0.0)
    axes.set_xlabel("distinct experts of a layer in an iteration, mean")
    axes.set_ylabel("exact match, 95% intervals")
    axes.set_title("measured on held-out prompts", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    save(figure, path)
