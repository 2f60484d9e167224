"""Attention of the requests in a span, each with its own cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from relume.config import ModelConfig
from relume.experts.kernels import Linear
from relume.model.batch import Segment
from relume.model.layers import attend, block_causal_mask, rms_norm, rotary_table, rotate


@dataclass(frozen=True)
class SegmentContext:
    """What all layers share for one segment: rotary table and attention mask."""

    segment: Segment
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None


def segment_context(config: ModelConfig, segment: Segment, dtype: torch.dtype) -> SegmentContext:
    """Table and mask of a segment that follows its cache's final positions."""
    start, num_tokens = segment.cache.length, segment.num_tokens
    device = segment.token_ids.device
    return SegmentContext(
        segment,
        rotary_table(config, start, num_tokens, dtype, device),
        block_causal_mask(start, num_tokens, segment.block_length, device),
    )


def attention(
    config: ModelConfig,
    layer: int,
    weights: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    span: Sequence[SegmentContext],
    linear: Linear,
) -> torch.Tensor:
    """Attention output `[tokens, hidden]` of a span's hidden states; writes its K/V.

    Args:
        config: of the model.
        layer: whose place in the caches is used.
        weights: of the layer, by role (see `model.family`).
        x: `[tokens, hidden]`.
        span: the requests whose tokens these are, in order.
        linear: multiplies.
    """
    eps, head_dim = config.rms_norm_eps, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    qkv = linear(rms_norm(x, weights["attention_norm"], eps), weights["qkv"]).view(len(x), -1, head_dim)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    query, key = rms_norm(query, weights["query_norm"], eps), rms_norm(key, weights["key_norm"], eps)
    outputs = []
    begin = 0
    for context in span:
        end = begin + context.segment.num_tokens
        rows = [part[begin:end].transpose(0, 1) for part in (query, key, value)]
        keys, values = context.segment.cache.write(layer, rotate(rows[1], context.rotary), rows[2])
        outputs.append(attend(rotate(rows[0], context.rotary), keys, values, context.mask))
        begin = end
    return linear(torch.cat(outputs), weights["attention_out"])
