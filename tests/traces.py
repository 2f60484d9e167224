"""Small traces for the tests: the committed one, random ones, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relume.core import Phase, SpanSignals
from relume.simulate.replay import ReplayResult, replay
from relume.strategy.profile import Profile
from relume.strategy.retention.belady import Future
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.strategy.use import ExpertShape
from relume.trace.calibrated import CalibratedConfig, synthesise_trace
from relume.trace.file import TraceWriter
from relume.trace.metadata import TraceMetadata
from relume.trace.record import ForwardRecord

SMALL_TRACE = Path(__file__).parent / "data" / "small.trace.parquet"
SMALL_CONFIG = CalibratedConfig(
    ExpertShape(4, 24, 2),
    groups=(4, 2),
    block_length=16,
    num_requests=3,
    blocks=4,
    prompt_tokens=60,
    vocab_size=60,
    num_topics=2,
)
SMALL_SEED = 7


def small_records() -> list[ForwardRecord]:
    """The records of the committed trace, made anew."""
    return list(synthesise_trace(SMALL_CONFIG, np.random.default_rng(SMALL_SEED)))


def played(
    records: Iterable[ForwardRecord],
    strategy: str,
    shape: ExpertShape,
    budget: Sequence[int],
    shared: bool = False,
    profile: Profile | None = None,
    future: Future | None = None,
) -> ReplayResult:
    """A replay of a strategy, by its name, with slots for each layer or all of them shared."""
    context = RetentionContext(shape, sum(budget), profile, future)
    return replay(records, Strategy.parse(strategy), context, sum(budget) if shared else budget)


def write_trace(
    path: Path, records: Iterable[ForwardRecord], metadata: TraceMetadata, row_group: int = 64
) -> Path:
    with TraceWriter(path, metadata, row_group) as writer:
        for record in records:
            writer.write(record)
    return path


def make_span(num_tokens: int, phase: Phase = Phase.DENOISE, request: int = 0, **changes: Any) -> SpanSignals:
    """A span of one block whose tokens are all masked and of which the first commits."""
    first = np.arange(num_tokens) == 0
    values: dict[str, Any] = {
        "request": request,
        "phase": phase,
        "start": 0,
        "block_length": num_tokens,
        "token_ids": np.full(num_tokens, 9, dtype=np.int64),
        "masked": np.ones(num_tokens, dtype=bool),
        "candidates": np.full(num_tokens, 9, dtype=np.int64),
        "confidences": np.full(num_tokens, 0.5, dtype=np.float32),
        "committed": first & (phase is Phase.DENOISE),
        "edited": np.zeros(num_tokens, dtype=bool),
        "next_start": 0,
        "next_token_ids": np.full(num_tokens, 9, dtype=np.int64),
    }
    return SpanSignals(**(values | changes))


def make_record(expert_ids: Any, spans: Sequence[SpanSignals] | None = None) -> ForwardRecord:
    """A forward from its expert ids `[layers, tokens, k]`; by default of one denoised block."""
    ids = np.asarray(expert_ids, dtype=np.uint16)
    nothing = tuple(np.empty(0, dtype=np.uint16) for _ in ids)
    chosen = (make_span(ids.shape[1]),) if spans is None else tuple(spans)
    return ForwardRecord(chosen, ids, np.ones(ids.shape, dtype=np.float32), nothing, nothing, nothing)


def random_records(
    shape: ExpertShape, num_forwards: int, num_tokens: int, generator: np.random.Generator
) -> list[ForwardRecord]:
    """Skewed random routing; some forwards are prefills of three blocks, of which only the last one votes."""
    popular = 2.0 * generator.random((shape.num_layers, 1, shape.num_experts))
    records = []
    for _ in range(num_forwards):
        prefill = generator.random() < 0.2
        count = num_tokens * (3 if prefill else 1)
        scores = popular + generator.gumbel(size=(shape.num_layers, count, shape.num_experts))
        ids = np.argsort(-scores, axis=-1)[..., : shape.top_k]
        phase = Phase.PREFILL if prefill else Phase.DENOISE
        records.append(make_record(ids, [make_span(count, phase, block_length=num_tokens)]))
    return records


def joined(left: ForwardRecord, right: ForwardRecord) -> ForwardRecord:
    """Two requests in one forward."""
    return ForwardRecord(
        left.spans + right.spans,
        np.concatenate((left.expert_ids, right.expert_ids), axis=1),
        np.concatenate((left.weights, right.weights), axis=1),
        left.misses,
        left.hosted,
        left.arrived,
    )


if __name__ == "__main__":
    write_trace(SMALL_TRACE, small_records(), SMALL_CONFIG.metadata())
