"""A trace through a strategy: what would have been hit, moved and computed where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from relume.core import Phase
from relume.strategy.lanes import Lanes, TimelessLanes
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.retention.belady import Future
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.strategy.use import ExpertShape, LayerUse
from relume.trace.record import ForwardRecord
from relume.trace.views import expert_counts, layer_uses, phase_of, span_inputs


@dataclass(frozen=True)
class ReplayResult:
    """What a strategy made of a trace.

    Attributes:
        hits, misses: `[forwards, layers]` int64, active experts that were and were not resident.
        hosted: `[forwards, layers]` int64, misses that were computed where they lie.
        resident: `[forwards, layers]` int64, experts that were resident when the layer began.
        denoising: `[forwards]` bool, which forwards are iterations of a block.
        num_tokens: masks that took a token.
        evictions: experts that left.
        preloads: experts that were loaded before the first forward.
        prefetches: experts that were brought unasked; `useful` of them were hit, `wasted` left before that.
        prefetch_stopped: whether too many were wasted.
    """

    hits: np.ndarray
    misses: np.ndarray
    hosted: np.ndarray
    resident: np.ndarray
    denoising: np.ndarray
    num_tokens: int
    evictions: int
    preloads: int
    prefetches: int
    useful: int
    wasted: int
    prefetch_stopped: bool

    @property
    def hit_rate(self) -> float | None:
        """Hits / active experts over the denoising forwards; `None` if there are none."""
        return _ratio(self.hits[self.denoising], self.hits[self.denoising] + self.misses[self.denoising])

    @property
    def hit_rate_all(self) -> float | None:
        """The same over all forwards."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def utilisation(self) -> float | None:
        """Resident and active / resident experts over the denoising forwards; `None` if none was resident."""
        return _ratio(self.hits[self.denoising], self.resident[self.denoising])

    @property
    def loads(self) -> int:
        """Experts that moved, those before the first forward apart: transferred misses, and prefetches."""
        return int(self.misses.sum() - self.hosted.sum()) + self.prefetches

    def bytes_per_token(self, expert_bytes: int) -> float | None:
        """Bytes that moved per token; `None` if no mask took one."""
        return expert_bytes * self.loads / self.num_tokens if self.num_tokens else None


class Replay:
    """A strategy on the way through a trace, one forward after the other.

    Args:
        placement: fresh.
        follow: called with each record before it is taken, if the lanes repeat what was recorded.

    Attributes:
        placement: at work.
    """

    def __init__(self, placement: Placement, follow: Callable[[ForwardRecord], None] | None = None) -> None:
        self.placement = placement
        self._follow = follow
        self._preloads = len(placement.fill())
        self._counts: list[list[tuple[int, int, int, int]]] = []  # hits, misses, hosted, resident
        self._denoising: list[bool] = []
        self._num_tokens = 0
        self._evictions = 0
        self._prefetches = 0

    def forward(self, record: ForwardRecord, uses: Sequence[LayerUse]) -> None:
        """Take one forward, of which `uses` are the layers."""
        placement = self.placement
        if self._follow is not None:
            self._follow(record)
        placement.begin_forward(span_inputs(record))
        counts = []
        for use in uses:
            decision = placement.decide(use)
            counts.append((len(decision.hits), decision.num_misses, len(decision.hosted), decision.resident))
            self._evictions += len(decision.evicted)
            self._prefetches += len(decision.arrived)
        placement.end_forward(record.spans)
        self._counts.append(counts)
        self._denoising.append(phase_of(record) is Phase.DENOISE)
        self._num_tokens += sum(int(span.committed.sum()) for span in record.spans)

    def result(self) -> ReplayResult:
        """What came of it so far."""
        size = (-1, self.placement.pool.shape.num_layers, 4)
        hits, misses, hosted, resident = np.moveaxis(np.array(self._counts, dtype=np.int64).reshape(size), -1, 0)
        monitor = self.placement.monitor
        return ReplayResult(
            hits=hits,
            misses=misses,
            hosted=hosted,
            resident=resident,
            denoising=np.array(self._denoising, dtype=bool),
            num_tokens=self._num_tokens,
            evictions=self._evictions,
            preloads=self._preloads,
            prefetches=self._prefetches,
            useful=monitor.useful,
            wasted=monitor.wasted,
            prefetch_stopped=monitor.stopped,
        )


def replay(
    records: Iterable[ForwardRecord],
    strategy: Strategy,
    context: RetentionContext,
    slots: Sequence[int] | int,
    lanes: Lanes | None = None,
) -> ReplayResult:
    """Replay a trace. A function of its arguments alone: it gives a live run's hits and misses exactly.

    Args:
        records: of the trace, in order.
        strategy: what decides; its budget has been turned into `slots`.
        context: of the model.
        slots: of each layer, or one number for a pool that all layers share.
        lanes: what time things take; by default none.
    """
    pool = ResidentPool(context.shape, slots)
    run = Replay(Placement(pool, strategy.make(context), lanes or TimelessLanes()))
    replay_together(records, [run], context.shape)
    return run.result()


class TakesForwards(Protocol):
    """Something on its way through a trace."""

    def forward(self, record: ForwardRecord, uses: Sequence[LayerUse]) -> None:
        """Take one forward, of which `uses` are the layers."""


def replay_together(
    records: Iterable[ForwardRecord],
    runs: Sequence[TakesForwards],
    shape: ExpertShape,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Take several strategies through one reading of a trace; `progress` is called after each forward."""
    for record in records:
        uses = layer_uses(record, shape.num_experts)
        for run in runs:
            run.forward(record, uses)
        progress()


def foresee(records: Iterable[ForwardRecord], shape: ExpertShape) -> Future:
    """The future that Belady's bound needs; reads the whole trace."""
    active = (expert_counts(record.expert_ids, shape.num_experts) > 0 for record in records)
    return Future.from_active(shape, active)


def _ratio(part: np.ndarray, whole: np.ndarray) -> float | None:
    return float(part.sum() / whole.sum()) if whole.sum() else None
