"""Measures on a trace what interval refresh would do to a model's residents."""

from __future__ import annotations

import numpy as np

from relume.core import Phase
from relume.strategy.refresh.curves import INTERVALS, KINDS, SHARES, RefreshCurves
from relume.strategy.refresh.schedule import HitCounter, Iteration, IterationWatch, RefreshTimer
from relume.strategy.use import ExpertShape
from relume.trace.record import ForwardRecord
from relume.trace.views import expert_counts, phase_of, span_inputs, votes_of

#: Iterations that are measured; later ones are passed over.
MOST_ITERATIONS = 1000
#: Of the hit counter, as `Tide` has it by default.
_DECAY = 0.5


class RefreshGauge:
    """Follows the residents of every interval and every number of slots at once, and counts.

    They are those of `Tide` where everything can be hosted, and begin as it does without a profile.
    """

    def __init__(self, shape: ExpertShape) -> None:
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self._shape = shape
        self._slots = np.unique([round(share * num_experts) for share in SHARES])
        size = (len(INTERVALS), len(self._slots), num_layers)
        self._resident = np.zeros((*size, num_experts), dtype=bool)
        self._resident |= np.arange(num_experts) < self._slots[:, None, None]
        self._watch = IterationWatch()
        self._timer = RefreshTimer(INTERVALS)
        self._counter = HitCounter((num_layers, num_experts), _DECAY)
        self._sums = {name: np.zeros((len(KINDS), *size)) for name in ("hits", "brought", "missed")}
        self._squares = {name: np.zeros((len(KINDS), *size)) for name in ("brought", "missed")}
        self._forwards = np.zeros((len(KINDS), len(INTERVALS)))
        self._hit_tokens, self._missed_tokens = np.zeros(2), np.zeros(2)  # tokens, and experts
        self._seen = np.zeros(3)  # tokens, masked ones, and where they begin
        self._num_iterations = 0
        self._block = np.zeros(size[:2])  # misses of the block under way
        self._block_iterations = 0
        self._blocks: list[tuple[np.ndarray, int]] = []

    def take(self, record: ForwardRecord) -> None:
        """Count one forward; the next one of the trace."""
        iteration = self._watch.begin_forward(span_inputs(record))
        due = self._timer.begin_forward(iteration)
        if self._num_iterations < MOST_ITERATIONS:
            tokens = expert_counts(record.expert_ids, self._shape.num_experts)
            if iteration.denoising:
                votes = expert_counts(record.expert_ids[:, votes_of(record)], self._shape.num_experts)
                self._counter.take(slice(None), votes, iteration)
                lengths, masked = [len(s.token_ids) for s in record.spans], [s.masked.sum() for s in record.spans]
                start = np.mean([span.start for span in record.spans])
                self._seen += np.array([sum(lengths), sum(masked), start])
                self._iterate(tokens, iteration, due)
            elif phase_of(record) is Phase.COMMIT:
                kinds = np.full(len(due), KINDS.index("committing"))
                self._count(kinds, tokens, self._resident, np.zeros(self._resident.shape[:-1]))
        self._watch.end_forward(record.spans)

    def curves(self) -> RefreshCurves | None:
        """What was counted; `None` if no block was decoded by itself, without others' prompts beside it."""
        if not self._num_iterations:
            return None
        self._end_block()
        number = np.maximum(self._forwards, 1)[:, :, None, None]
        means = {name: sums / number for name, sums in self._sums.items()}
        deviations = {
            f"{name}_sd": np.sqrt(np.maximum(squares / number - means[name] ** 2, 0.0))
            for name, squares in self._squares.items()
        }
        tokens, rows, start = (self._seen / self._num_iterations).tolist()
        return RefreshCurves(
            slots=self._slots,
            share=self._forwards / self._num_iterations,
            **{name: values.astype(np.float32) for name, values in (means | deviations).items()},
            missed_error=self._standard_error(),
            hit_tokens=float(self._hit_tokens[0] / max(1.0, self._hit_tokens[1])),
            missed_tokens=float(self._missed_tokens[0] / max(1.0, self._missed_tokens[1])),
            tokens=tokens,
            rows=rows,
            start=start,
            num_iterations=self._num_iterations,
        )

    def _iterate(self, tokens: np.ndarray, iteration: Iteration, due: np.ndarray) -> None:
        if iteration.first:
            self._end_block()
        self._num_iterations += 1
        before = self._resident.copy()
        brought = np.zeros(before.shape[:-1])
        brought[due] = self._refresh(due, tokens > 0)
        refresh = KINDS.index("opening" if iteration.first else "refreshing")
        kinds = np.where(due, refresh, KINDS.index("frozen"))
        missed = self._count(kinds, tokens, before | self._resident, brought)  # who leaves is computed first
        self._block += missed.sum(axis=-1)
        self._block_iterations += 1

    def _count(
        self, kinds: np.ndarray, tokens: np.ndarray, present: np.ndarray, brought: np.ndarray
    ) -> np.ndarray:
        """Add a forward that is of `kinds` `[T]` for the intervals; returns its misses `[T, S, layers]`."""
        active = tokens > 0
        here = (kinds, np.arange(len(kinds)))
        missing = active & ~present
        missed = missing.sum(axis=-1)
        numbers = {"hits": active.sum(axis=1) - missed - brought, "brought": brought, "missed": missed}
        for name, number in numbers.items():
            self._sums[name][here] += number
            if name in self._squares:
                self._squares[name][here] += number**2
        self._forwards[here] += 1
        hit = active & present
        self._missed_tokens += np.array([(missing * tokens).sum(), missing.sum()])
        self._hit_tokens += np.array([(hit * tokens).sum(), hit.sum()])
        return np.asarray(missed)

    def _refresh(self, due: np.ndarray, active: np.ndarray) -> np.ndarray:
        """The best of residents and active experts stay, `[due, S, layers]` of which are new."""
        before = self._resident[due]
        ranks = self._counter.ranks(slice(None)) + 1e-12 * before  # of equals residents go first, then lower ids
        ranks = np.where(before | active, ranks, -1.0)
        order = np.argsort(-ranks, axis=-1, kind="stable")
        places = np.empty_like(order)
        np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
        after = (places < self._slots[:, None, None]) & (before | active)
        self._resident[due] = after
        return np.asarray((after & ~before).sum(axis=-1), dtype=np.float64)

    def _end_block(self) -> None:
        if self._block_iterations:
            self._blocks.append((self._block, self._block_iterations))
        self._block, self._block_iterations = np.zeros_like(self._block), 0

    def _standard_error(self) -> np.ndarray:
        """Of the mean misses of an iteration: a ratio of sums over blocks, whose iterations are alike."""
        if len(self._blocks) < 2:
            return np.zeros_like(self._block)
        sums = np.stack([block for block, _ in self._blocks])
        lengths = np.array([length for _, length in self._blocks])[:, None, None]
        residuals = sums - sums.sum(axis=0) / lengths.sum() * lengths
        count = len(sums)
        return np.asarray(np.sqrt((residuals**2).sum(axis=0) * count / (count - 1)) / lengths.sum())
