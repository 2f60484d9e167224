"""TIDE's interval as it is solved, next to every interval as it is simulated: what `relume bench tide` shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relume.clock.virtual import dense_s
from relume.config import require
from relume.core import Phase, Progress, SpanInput
from relume.engine.provision import Provision, this_hardware
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.job import read_budgets
from relume.simulate.matrix import make_matrix, setting_of
from relume.simulate.rows import Setting, SimulationRow
from relume.strategy.budget import uniform
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.curves import INTERVALS, KINDS, RefreshCurves
from relume.strategy.refresh.program import solve_layers
from relume.strategy.refresh.schedule import IterationWatch
from relume.strategy.refresh.solve import RefreshPlan, solve_interval, solve_published
from relume.strategy.retention.tide import Tide
from relume.strategy.use import ExpertShape
from relume.trace.file import TraceReader
from relume.trace.profile import read_model_profile
from relume.trace.views import span_inputs

TIDE, BY_LAYER = "tide", "tide-layers"


@dataclass(frozen=True)
class IntervalRow:
    """One trace on one machine at one budget; times are milliseconds, and simulated unless they are predicted.

    Attributes:
        trace, hardware, expert_memory: which.
        slots_per_layer: mean over layers.
        solved_interval: that the cost model finds best; `solved_ms` is its time per token, prompts apart.
        best_interval: that the simulation finds best of 1..31, and its time.
        excess: by how much the solved one is slower, relatively.
        model_ms: predicted time of an iteration at the solved interval, its share of commits included.
        clock_ms: the same as simulated.
        model_error: their relative difference; `largest_error` is that of the worst interval.
        published_interval: by TIDE's formulas with a fitted drift, without a measured curve; and its time.
        tide_ms: of the strategy as it runs, which solves again when the drift changes.
        layers_ms: of the strategy with intervals and slots of each layer; `layers_gain` is what that saves.
        layer_intervals, layer_slots: that it has.
        solve_s: measured seconds that the program over layers took; `gap` is its distance from the best value.
        curve_ms, predicted_ms: of every interval, an iteration, simulated and predicted.
        kind: `simulated`.
    """

    trace: str
    hardware: str
    expert_memory: str
    slots_per_layer: float
    solved_interval: int
    solved_ms: float
    best_interval: int
    best_ms: float
    excess: float
    model_ms: float
    clock_ms: float
    model_error: float
    largest_error: float
    published_interval: int
    published_ms: float
    tide_ms: float
    layers_ms: float
    layers_gain: float
    layer_intervals: tuple[int, ...]
    layer_slots: tuple[int, ...]
    solve_s: float
    gap: float
    curve_ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    kind: str = "simulated"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def require_curves(profile: Profile, path: object) -> RefreshCurves:
    """The curves of a profile; raises `RelumeError` if it has none."""
    require(
        profile.refresh is not None,
        f"{path}: the profile's trace decodes no block by itself: record one without --batch-size",
    )
    assert profile.refresh is not None
    return profile.refresh


def outside_experts_s(hardware: Hardware, work: WorkShape, curves: RefreshCurves) -> float:
    """Predicted seconds of an iteration outside routed experts, its share of commits included."""
    num_tokens, start = round(curves.tokens), round(curves.start)
    masked = np.arange(num_tokens) < round(curves.rows)
    tokens = np.zeros(num_tokens, dtype=np.int64)
    shape = ExpertShape(curves.num_layers, curves.num_experts, 1)
    span = SpanInput(0, Phase.DENOISE, start, num_tokens, tokens, masked, start, tokens)
    iteration_s = dense_s(hardware, work, shape, span, int(masked.sum()))
    commits = float(curves.share[KINDS.index("committing"), 0])
    return iteration_s + commits * dense_s(hardware, work, shape, span, 0)


def describe_refresh(found: Provision) -> dict[str, Any] | None:
    """What `relume plan` says of a refresh plan, as plain values for JSON; `None` if the strategy has none."""
    retention, profile, costs = found.settings.parts.retention, found.habits, found.costs
    if not isinstance(retention, Tide) or retention.refresh_plan is None:
        return None
    assert profile is not None and profile.refresh is not None and costs is not None
    curves, plan = profile.refresh, retention.refresh_plan
    hardware = found.hardware or this_hardware()
    assert hardware is not None, "its costs are known"
    slots = np.array(plan.slots)
    outside_ms = 1000 * outside_experts_s(hardware, found.work, curves)
    drifts, errors = curves.drift
    return plan.to_dict() | {
        "curve_ms": [outside_ms + 1000 * seconds for seconds in plan.curve],
        "iteration_ms": outside_ms + 1000 * plan.experts_s,
        "outside_experts_ms": outside_ms,
        "costs": costs.to_dict(),
        "drift": float(np.interp(slots, curves.slots, drifts).mean()),
        "drift_error": float(np.interp(slots, curves.slots, errors).mean()),
        "published_interval": solve_published(curves, costs, slots),
        "iterations_profiled": curves.num_iterations,
        "hardware": hardware.name,
        "kind": "simulated",
    }


def compare_intervals(
    path: Path,
    profile_path: Path,
    memories: Sequence[str],
    machines: Sequence[Hardware],
    work: WorkShape | None,
    progress: Progress,
) -> tuple[list[IntervalRow], tuple[str, ...]]:
    """Every interval on every machine at every budget, simulated, next to what is solved from the profile.

    Returns the rows, and what a user should know, a line each.

    Raises:
        RelumeError: the trace, the profile or a budget cannot be used.
    """
    reader = TraceReader(path)
    shape = reader.metadata.shape
    setting = setting_of(reader, profile_path, work=work)
    require(
        setting.work is not None, f"{path}: the trace does not say how large its model is: name one with --work"
    )
    curves = require_curves(read_model_profile(profile_path, shape), profile_path)
    budgets = read_budgets(memories, shape, setting.expert_bytes)
    longest = longest_block(reader)
    # Beyond the longest block every interval refreshes in first iterations alone.
    fixed = [f"{TIDE}:interval={min(int(interval), longest)}" for interval in INTERVALS]
    names = [*fixed, TIDE, BY_LAYER]
    matrix = make_matrix(setting, names, budgets, machines, bound=False)
    simulated = {(row.hardware, row.expert_memory, row.strategy): row for row in matrix.run(progress)}
    rows = []
    for machine in machines:
        for text, total in budgets.items():
            assert isinstance(total, int)
            found = [simulated[machine.name, text, name] for name in names]
            rows.append(_row(setting, machine, text, total, shape, curves, found))
    return rows, matrix.notes


def longest_block(reader: TraceReader) -> int:
    """Iterations of the block of a trace that took most. Reads all of it."""
    longest, running = 1, 1
    watch = IterationWatch()
    for record in reader:
        iteration = watch.begin_forward(span_inputs(record))
        if iteration.denoising:
            running = 1 if iteration.first else running + 1
            longest = max(longest, running)
        watch.end_forward(record.spans)
    return longest


def _row(
    setting: Setting,
    machine: Hardware,
    text: str,
    total: int,
    shape: ExpertShape,
    curves: RefreshCurves,
    found: Sequence[SimulationRow],
) -> IntervalRow:
    assert setting.work is not None
    costs = RefreshCosts.of(machine, setting.work, curves)
    slots = np.array(uniform(total, shape))
    solved = solve_interval(curves, costs, slots)
    layers, solve_s = _timed_layers(curves, costs, total, shape)
    outside_s = outside_experts_s(machine, setting.work, curves)
    *each, tide, by_layer = found
    times = [known(row.decoding_ms) for row in each]
    curve = [known(row.iteration_ms) for row in each]
    predicted = [1000 * (outside_s + seconds) for seconds in solved.curve]
    errors = [model / clock - 1.0 for model, clock in zip(predicted, curve, strict=True)]
    interval, published = solved.intervals[0], solve_published(curves, costs, slots)
    best = int(np.argmin(times))
    at = interval - int(INTERVALS[0])
    return IntervalRow(
        trace=str(setting.path),
        hardware=machine.name,
        expert_memory=text,
        slots_per_layer=total / shape.num_layers,
        solved_interval=interval,
        solved_ms=times[at],
        best_interval=int(INTERVALS[best]),
        best_ms=times[best],
        excess=times[at] / times[best] - 1.0,
        model_ms=predicted[at],
        clock_ms=curve[at],
        model_error=errors[at],
        largest_error=max(errors, key=abs),
        published_interval=published,
        published_ms=times[published - int(INTERVALS[0])],
        tide_ms=known(tide.decoding_ms),
        layers_ms=known(by_layer.decoding_ms),
        layers_gain=1.0 - known(by_layer.decoding_ms) / times[at],
        layer_intervals=layers.intervals,
        layer_slots=layers.slots,
        solve_s=solve_s,
        gap=layers.gap,
        curve_ms=tuple(curve),
        predicted_ms=tuple(predicted),
    )


def _timed_layers(
    curves: RefreshCurves, costs: RefreshCosts, total: int, shape: ExpertShape
) -> tuple[RefreshPlan, float]:
    """The program over layers, solved afresh, and how long that took."""
    started = time.perf_counter()
    plan = solve_layers.__wrapped__(curves, costs, total, shape)
    return plan, time.perf_counter() - started


def known(milliseconds: float | None) -> float:
    """A time; raises `RelumeError` if there is none, since nothing was decoded."""
    require(milliseconds is not None, "the trace decodes no block: nothing can be compared")
    assert milliseconds is not None
    return milliseconds
