"""The most-hit experts of the active block stay, chosen anew every few iterations: TIDE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from relume.core import Phase, RelumeError, SpanInput, SpanSignals
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.dispatch.oled import Balanced
from relume.strategy.refresh.curves import INTERVALS
from relume.strategy.refresh.drift import DriftMonitor
from relume.strategy.refresh.program import solve_layers
from relume.strategy.refresh.schedule import HitCounter, Iteration, IterationWatch, RefreshTimer
from relume.strategy.refresh.solve import (
    LEAST_GAIN,
    RefreshPlan,
    plan_of,
    solve_interval,
    solve_intervals,
)
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse

#: Iterations between refreshes where neither was one given nor can one be solved.
UNSOLVED = 4


class Tide(Retention, Dispatch):
    """Interval refresh (TIDE, arXiv 2605.20179).

    Every `interval` iterations of a block, as soon as a layer's routing is known, its slots go to the experts that
    the active block's tokens hit most (`HitCounter`): of residents and active experts, the best stay or are
    brought, and as many leave. In between nothing moves, and misses are computed on the host. The placement
    carries over from block to block. Nothing is written back, as weights never change.

    As a dispatch it brings what will stay, and leaves the rest to the host. A forward that prefills leaves the
    placement alone; its misses, nearly all experts, are balanced between the lanes.

    The interval is the one of the least predicted time (`solve_interval`; one for each layer with `by_layer`), if
    a profile has curves and the machine's costs are known. It is solved again when what refreshes promote leaves
    the profile's by `margin`, and followed if that is predicted to save `LEAST_GAIN`.

    Args:
        context: of the model; without a profile the slots begin with the lowest ids, as in TIDE's code.
        interval: in iterations; 0 solves it.
        decay: of the hits with every iteration, in 0..1; 0 counts the latest one alone, as TIDE's code does.
        by_layer: 1 solves an interval for each layer.
        margin: relative difference of the drift from the profile's, from which on it is solved again.
        link: share of the time of the experts' layers for which the link may be busy with what a plan moves.

    Attributes:
        refresh_plan: that is followed; `None` where nothing can be predicted.
        notes: what a user should know of it, a line each.

    Raises:
        RelumeError: an argument that makes no sense.
    """

    preload = True

    def __init__(
        self,
        context: RetentionContext,
        interval: float = 0,
        decay: float = 0.5,
        by_layer: float = 0,
        margin: float = 0.3,
        link: float = 1.0,
    ) -> None:
        super().__init__(context.shape)
        if interval < 0 or interval != int(interval):
            raise RelumeError(f"tide: the interval is {interval:g}: give whole iterations, or 0 to solve it")
        if not 0.0 <= decay <= 1.0:
            raise RelumeError(f"tide: decay is {decay:g}: it must lie in 0..1")
        if not margin > 0.0:
            raise RelumeError(f"tide: margin is {margin:g}: it must be positive")
        if not 0.0 < link <= 1.0:
            raise RelumeError(f"tide: link is {link:g}: it must be a share above 0 and up to 1")
        self._context = context  # whose costs know of `link`, as the slots were solved with it too
        self._by_layer = bool(by_layer)
        self._given = int(interval)
        self.refresh_plan = self._plan(np.array(context.intervals) if context.intervals else self._given)
        num_layers = context.shape.num_layers
        self._timer = RefreshTimer(np.full(num_layers, int(interval) or UNSOLVED))
        self._drift = None if interval or self.refresh_plan is None else DriftMonitor(margin)
        self._expected = np.zeros(num_layers)
        if self.refresh_plan is not None:
            self._follow(self.refresh_plan)
        size = (num_layers, context.shape.num_experts)
        self._counter = HitCounter(size, decay, None if context.profile is None else context.profile.popularity)
        self._watch = IterationWatch()
        self._iteration = Iteration(False, False, False)
        self._prefilling = False
        self._due = np.zeros(num_layers, dtype=bool)
        self._layer = 0  # that was observed last
        self._promoted = 0
        self._balanced = Balanced()

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """See which layers refresh."""
        self._iteration = self._watch.begin_forward(spans)
        self._prefilling = any(span.phase is Phase.PREFILL for span in spans)
        self._due = self._timer.begin_forward(self._iteration)
        self._promoted = 0

    def observe(self, use: LayerUse) -> None:
        """Count the block's hits."""
        self._layer = use.layer
        if self._iteration.denoising:
            self._counter.take(use.layer, use.counts, self._iteration)

    def admits(self, use: LayerUse) -> np.ndarray:
        """Active experts where the layer refreshes, else none."""
        return np.asarray(use.active & self._due[use.layer])

    def priority(self, layers: slice) -> np.ndarray:
        """Hits in the active block, then in all blocks; before the first one, popularity."""
        return self._counter.ranks(layers)

    def plan(self, case: DispatchCase) -> np.ndarray:
        """What will stay crosses the link, and what the host cannot compute; a prefill's misses are balanced."""
        if self._prefilling:
            return self._balanced.plan(case)
        return np.asarray(case.must_transfer | (case.reuse > 0.0) & self._due[self._layer])

    def placed(self, layer: int, kept: np.ndarray) -> None:
        """Count promotions."""
        self._promoted += len(kept)

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """See how far the residents drifted."""
        self._watch.end_forward(spans)
        if self._drift is not None and self._due.any():
            assert self.refresh_plan is not None
            if self._drift.take(self._promoted, float(self._expected[self._due].sum())):
                best = self._plan(0, self._drift.ratio)
                kept = self._plan(self._timer.intervals, self._drift.ratio)
                assert best is not None and kept is not None
                if best.experts_s < (1.0 - LEAST_GAIN) * kept.experts_s:
                    self.refresh_plan = best
                    self._follow(best)

    def resized(self, slots: tuple[int, ...] | None) -> None:
        """Plan for other slots."""
        self._context = replace(self._context, slots=slots, intervals=())
        self.refresh_plan = self._plan(self._given)
        if self.refresh_plan is not None:
            self._follow(self.refresh_plan)

    @property
    def intervals(self) -> tuple[int, ...]:
        """As they are followed now."""
        return tuple(self._timer.intervals.tolist())

    @property
    def drift_changes(self) -> int:
        """Times that the drift was found to be another one."""
        return 0 if self._drift is None else self._drift.changes

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """See the class."""
        if self.refresh_plan is None:
            if self._given:
                return ()
            why = self._context.why_no_refresh_plan
            return (f"tide: {why}, so no interval can be solved: it refreshes every {UNSOLVED} iterations",)
        if not self.drift_changes:
            return self.refresh_plan.notes
        assert self._drift is not None
        drifted = f"tide: the residents drift {self._drift.ratio:.2f} times as fast as the profile says"
        return (*self.refresh_plan.notes, f"{drifted}; intervals are now {sorted(set(self.intervals))}")

    def _follow(self, plan: RefreshPlan) -> None:
        """Take over a plan's intervals, and what its refreshes should promote by the profile."""
        self._timer.intervals = np.array(plan.intervals)
        curves = self._context.curves
        assert curves is not None
        rows = np.minimum(self._timer.intervals, INTERVALS[-1]) - INTERVALS[0]
        promoted = curves.promoted(np.array(plan.slots))
        self._expected = promoted[rows, np.arange(len(rows))]

    def _plan(self, interval: int | np.ndarray, drift: float = 1.0) -> RefreshPlan | None:
        """Of the interval given, or with 0 of the best, for a drift of so many times the profile's."""
        context = self._context
        curves, costs, slots = context.curves, context.costs, context.slots
        if curves is None or costs is None or slots is None:
            return None
        if drift != 1.0:
            curves = curves.scaled(drift)
        if np.any(interval):
            return plan_of(curves, costs, np.array(slots), np.broadcast_to(interval, len(slots)), "given")
        if not self._by_layer:
            return solve_interval(curves, costs, np.array(slots))
        if drift == 1.0 and (plan := solve_layers(curves, costs, sum(slots), context.shape)).slots == slots:
            return plan
        return solve_intervals(curves, costs, np.array(slots))  # of slots that somebody else chose
