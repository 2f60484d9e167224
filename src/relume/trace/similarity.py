"""How alike the iterations of a block are."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from relume.core import SpanSignals
from relume.trace.views import expert_counts

#: The second gap, in iterations, at which similarity is published.
FAR = 5


@dataclass(frozen=True)
class _Iteration:
    """One request's part of a denoising forward: its signals, `[layers, tokens, k]` ids and counts by expert."""

    span: SpanSignals
    expert_ids: np.ndarray
    counts: np.ndarray


class IterationPairs:
    """Compares each iteration of a block with earlier ones of the same block; see `means` for what comes out."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._recent: dict[int, deque[_Iteration]] = defaultdict(lambda: deque(maxlen=FAR))
        self._similarity: list[float] = []
        self._similarity_far: list[float] = []
        self._overlap: list[float] = []
        self._kept: dict[str, list[float]] = {"kept_masked": [], "kept_committed": [], "kept_committing": []}

    @property
    def means(self) -> dict[str, float | None]:
        """Each figure by the name it has in `TraceSummary`; `None` where nothing was to compare."""
        lists = {
            "similarity": self._similarity,
            "similarity_far": self._similarity_far,
            "overlap": self._overlap,
            **self._kept,
        }
        return {name: sum(values) / len(values) if values else None for name, values in lists.items()}

    def take(self, span: SpanSignals, expert_ids: np.ndarray) -> None:
        """Compare a denoised span, of which `expert_ids` are `[layers, tokens, k]`."""
        now = _Iteration(span, expert_ids, expert_counts(expert_ids, self._num_experts))
        before = self._recent[span.request]
        if before and before[-1].span.start != span.start:
            before.clear()
        if len(before) == FAR:
            self._similarity_far.append(_cosine(before[0].counts, now.counts))
        if before:
            self._compare(before[-1], now)
        before.append(now)

    def _compare(self, last: _Iteration, now: _Iteration) -> None:
        self._similarity.append(_cosine(last.counts, now.counts))
        were, are = last.counts > 0, now.counts > 0
        self._overlap.append(float(((were & are).sum(axis=1) / were.sum(axis=1)).mean()))
        again = (last.expert_ids[..., :, None] == now.expert_ids[..., None, :]).any(axis=-1).mean(axis=(0, 2))
        changed = last.span.token_ids != now.span.token_ids
        masked = last.span.masked & now.span.masked
        self._kept["kept_masked"] += again[masked].tolist()
        self._kept["kept_committed"] += again[~masked & ~changed].tolist()
        self._kept["kept_committing"] += again[~masked & changed].tolist()


def _cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Mean over layers."""
    norms = np.sqrt((left * left).sum(axis=1) * (right * right).sum(axis=1))
    return float(((left * right).sum(axis=1) / norms).mean())
