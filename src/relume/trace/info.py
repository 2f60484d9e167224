"""What a trace shows: how many experts are active, how alike iterations are, what was hit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from relume.core import Phase
from relume.strategy.use import ExpertShape, span_slices
from relume.trace.record import ForwardRecord
from relume.trace.similarity import IterationPairs
from relume.trace.views import expert_counts, phase_of


@dataclass(frozen=True)
class TraceSummary:
    """Figures of a trace. Those of routing are over denoising forwards; `None` where there is no such thing.

    Attributes:
        forwards: number of them by phase (`views.phase_of`).
        num_requests, num_blocks: that were denoised.
        num_tokens: masks that took a token.
        tokens_per_iteration: the same for one request's denoising forward.
        active_experts, active_sd: distinct experts of a layer, over all layers and forwards.
        active_by_layer, active_sd_by_layer: the same for each layer.
        similarity, similarity_far: cosine of a block's token counts by expert, adjacent iterations and five apart,
            mean over layers and pairs.
        overlap: share of a block's active experts that are active in its next iteration.
        kept_masked, kept_committed, kept_committing: share of a token's experts that it chooses again in the next
            iteration: if it stays masked, if it stays a token, if its input changes in between.
        top_share: share of all choices that falls on a layer's 10% most chosen experts, mean over layers.
        hit_rate: as recorded.
        bytes_loaded, wall_s: as recorded, over all forwards.
    """

    forwards: dict[str, int]
    num_requests: int
    num_blocks: int
    num_tokens: int
    tokens_per_iteration: float | None
    active_experts: float | None
    active_sd: float | None
    active_by_layer: tuple[float, ...]
    active_sd_by_layer: tuple[float, ...]
    similarity: float | None
    similarity_far: float | None
    overlap: float | None
    kept_masked: float | None
    kept_committed: float | None
    kept_committing: float | None
    top_share: float | None
    hit_rate: float | None
    bytes_loaded: int
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def summarise(records: Iterable[ForwardRecord], shape: ExpertShape) -> TraceSummary:
    """Read a whole trace once."""
    forwards = {phase.value: 0 for phase in (Phase.PREFILL, Phase.DENOISE, Phase.COMMIT)}
    active, chosen = [], np.zeros((shape.num_layers, shape.num_experts))
    blocks: set[tuple[int, int]] = set()
    pairs = IterationPairs(shape.num_experts)
    missed, num_tokens, num_iterations, bytes_loaded, wall_s = 0, 0, 0, 0, 0.0
    for record in records:
        phase = phase_of(record)
        forwards[phase.value] += 1
        bytes_loaded += record.bytes_loaded
        wall_s += record.wall_s
        if phase is Phase.DENOISE:
            counts = expert_counts(record.expert_ids, shape.num_experts)
            chosen += counts
            active.append((counts > 0).sum(axis=1))
            missed += sum(len(layer) for layer in record.misses)
        for span, place in zip(record.spans, span_slices(record.spans), strict=True):
            if span.phase is Phase.DENOISE:
                num_iterations += 1
                num_tokens += int(span.committed.sum())
                blocks.add((span.request, span.start))
                pairs.take(span, record.expert_ids[:, place])
    each = np.array(active, dtype=np.float64).reshape(-1, shape.num_layers)
    top = -(-shape.num_experts // 10)
    return TraceSummary(
        forwards=forwards,
        num_requests=len({request for request, _ in blocks}),
        num_blocks=len(blocks),
        num_tokens=num_tokens,
        tokens_per_iteration=num_tokens / num_iterations if num_iterations else None,
        active_experts=float(each.mean()) if active else None,
        active_sd=float(each.std()) if active else None,
        active_by_layer=tuple(each.mean(axis=0).tolist()) if active else (),
        active_sd_by_layer=tuple(each.std(axis=0).tolist()) if active else (),
        top_share=float((np.sort(chosen)[:, -top:].sum(axis=1) / chosen.sum(axis=1)).mean()) if active else None,
        hit_rate=1.0 - missed / float(each.sum()) if active else None,
        bytes_loaded=bytes_loaded,
        wall_s=wall_s,
        **pairs.means,
    )
