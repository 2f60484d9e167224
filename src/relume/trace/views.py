"""What can be read off one record."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from relume.core import Phase, SpanInput
from relume.strategy.use import LayerUse, last_block_votes
from relume.trace.record import ForwardRecord


def phase_of(record: ForwardRecord) -> Phase:
    """Prefill if any of the forward's requests was prefilled, else denoise if any was, else commit."""
    phases = {span.phase for span in record.spans}
    return next(phase for phase in (Phase.PREFILL, Phase.DENOISE, Phase.COMMIT) if phase in phases)


def span_inputs(record: ForwardRecord) -> list[SpanInput]:
    """What was known of the record's requests before the forward."""
    inputs = []
    for span in record.spans:
        known = {field.name: getattr(span, field.name) for field in fields(SpanInput)}
        if span.phase is Phase.DENOISE:
            known |= {"next_start": span.start, "next_token_ids": np.empty(0, dtype=np.int64)}
        inputs.append(SpanInput(**known))
    return inputs


def votes_of(record: ForwardRecord) -> np.ndarray:
    """`[tokens]` bool: which tokens say what is worth keeping; of a prefill only the last block's."""
    lengths = [len(span.token_ids) for span in record.spans]
    return last_block_votes(lengths, [span.block_length for span in record.spans])


def layer_uses(record: ForwardRecord, num_experts: int) -> list[LayerUse]:
    """What strategies see of each layer, in the order in which a live engine shows it."""
    votes = votes_of(record)
    pairs = zip(record.expert_ids, record.weights, strict=True)
    return [LayerUse(layer, ids, weights, votes, num_experts) for layer, (ids, weights) in enumerate(pairs)]


def expert_counts(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """`[layers, E]` int64: tokens that use each expert, from `[layers, tokens, k]`."""
    layers = len(expert_ids)
    offsets = num_experts * np.arange(layers)[:, None, None]
    return np.bincount((expert_ids + offsets).ravel(), minlength=layers * num_experts).reshape(layers, num_experts)
