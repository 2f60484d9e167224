"""A trace through a retention policy: what would have been hit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from relume.core import Phase
from relume.strategy.pool import ResidentPool
from relume.strategy.retention import RetentionFactory
from relume.strategy.retention.base import Retention
from relume.strategy.retention.belady import Belady, Future
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import ExpertShape, LayerUse
from relume.trace.record import ForwardRecord
from relume.trace.views import expert_counts, layer_uses, phase_of, span_inputs


@dataclass(frozen=True)
class ReplayResult:
    """What a policy made of a trace.

    Attributes:
        hits, misses: `[forwards, layers]` int64, active experts that were and were not resident.
        resident: `[forwards, layers]` int64, experts that were resident when the layer began.
        denoising: `[forwards]` bool, which forwards are iterations of a block.
        num_tokens: masks that took a token.
        evictions: experts that left.
        preloads: experts that were loaded before the first forward.
    """

    hits: np.ndarray
    misses: np.ndarray
    resident: np.ndarray
    denoising: np.ndarray
    num_tokens: int
    evictions: int
    preloads: int

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
        """Experts that moved, those before the first forward apart; every miss is one."""
        return int(self.misses.sum())

    def bytes_per_token(self, expert_bytes: int) -> float | None:
        """Bytes that moved per token; `None` if no mask took one."""
        return expert_bytes * self.loads / self.num_tokens if self.num_tokens else None


class Replay:
    """A policy and its pool on the way through a trace, one forward after the other.

    Args:
        retention: a fresh policy.
        slots: as for `ResidentPool`.
    """

    def __init__(self, retention: Retention, slots: Sequence[int] | int) -> None:
        self._retention = retention
        self._pool = ResidentPool(retention.shape, slots)
        # The bound must hold whatever others may keep, so nothing that it misses is withheld from it.
        self.everything_votes = isinstance(retention, Belady)
        self._preloads = len(self._pool.fill(retention)) if retention.preload else 0
        self._hits: list[list[int]] = []
        self._misses: list[list[int]] = []
        self._resident: list[np.ndarray] = []
        self._denoising: list[bool] = []
        self._num_tokens = 0
        self._evictions = 0

    def forward(self, record: ForwardRecord, uses: Sequence[LayerUse]) -> None:
        """Take one forward, of which `uses` are the layers."""
        pool, retention = self._pool, self._retention
        hits, misses = [], []
        resident = np.empty(len(uses), dtype=np.int64)
        retention.begin_forward(span_inputs(record))
        for use in uses:
            retention.observe(use)
            resident[use.layer] = np.count_nonzero(pool.resident[use.layer])
            decision = pool.decide(use, retention)
            hits.append(len(decision.hits))
            misses.append(len(decision.misses))
            self._evictions += len(decision.evicted)
        retention.end_forward(record.spans)
        self._hits.append(hits)
        self._misses.append(misses)
        self._resident.append(resident)
        self._denoising.append(phase_of(record) is Phase.DENOISE)
        self._num_tokens += sum(int(span.committed.sum()) for span in record.spans)

    def result(self) -> ReplayResult:
        """What came of it so far."""
        size = (-1, self._retention.shape.num_layers)
        return ReplayResult(
            hits=np.array(self._hits, dtype=np.int64).reshape(size),
            misses=np.array(self._misses, dtype=np.int64).reshape(size),
            resident=np.array(self._resident, dtype=np.int64).reshape(size),
            denoising=np.array(self._denoising, dtype=bool),
            num_tokens=self._num_tokens,
            evictions=self._evictions,
            preloads=self._preloads,
        )


def replay(
    records: Iterable[ForwardRecord],
    factory: RetentionFactory,
    shape: ExpertShape,
    budget: Sequence[int],
    shared: bool = False,
    popularity: np.ndarray | None = None,
    future: Future | None = None,
) -> ReplayResult:
    """Replay a trace. A function of its arguments alone: it gives a live run's hits and misses exactly.

    Args:
        records: of the trace, in order.
        factory: of the policy, one of `RETENTIONS`.
        shape: of the model.
        budget: slots of each layer.
        shared: whether all layers share the sum of them as one pool.
        popularity, future: what some policies need; see `RetentionContext`.
    """
    context = RetentionContext(shape, sum(budget), popularity, future)
    run = Replay(factory(context), sum(budget) if shared else budget)
    replay_together(records, [run], shape)
    return run.result()


def replay_together(
    records: Iterable[ForwardRecord],
    runs: Sequence[Replay],
    shape: ExpertShape,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Take several policies through one reading of a trace; `progress` is called after each forward."""
    for record in records:
        uses = layer_uses(record, shape.num_experts)
        all_vote = uses[0].all_vote or not any(run.everything_votes for run in runs)
        votes = np.ones(record.expert_ids.shape[1], dtype=bool)
        every_use = uses if all_vote else layer_uses(record, shape.num_experts, votes)
        for run in runs:
            run.forward(record, every_use if run.everything_votes else uses)
        progress()


def foresee(records: Iterable[ForwardRecord], shape: ExpertShape) -> Future:
    """The future that Belady's bound needs; reads the whole trace."""
    active = (expert_counts(record.expert_ids, shape.num_experts) > 0 for record in records)
    return Future.from_active(shape, active)


def _ratio(part: np.ndarray, whole: np.ndarray) -> float | None:
    return float(part.sum() / whole.sum()) if whole.sum() else None
