"""Attention whose output separates masked positions and changes little while a block is decoded.

Three kinds of dimensions of a head decide where it looks: the fastest rotary pairs (a pattern of relative
positions, so that masks at different positions see different tokens), one slow pair that all tokens fill
alike (a preference for what lies about 64 positions back, which is final), and the rest (content). Every
fourth head has the slow pair only: it averages the context, and writes to dimensions of its own, which the
output head ignores. Values leave out what all tokens or all masks share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.config import ModelConfig
from relume.synth.probe import Probe, rms
from relume.synth.random_weights import WeightSource

_PATTERN_SPREAD = 4.0  # standard deviation of attention scores from the positional pattern
_CONTENT_SPREAD = 0.3  # and from content
_LOOK_BACK_STRENGTH, _LOOK_BACK_DISTANCE = 1.5, 64
_SLOW_VALUE = 3.0  # what the slow pair holds before the norm's weight, in units of a typical dimension
_CONTEXT_SHARE = 0.5  # of the context heads' output, relative to the others'
_FIRST_LAYER_SHARE, _LATER_SHARE = 0.75, 0.2  # of attention output, relative to the residual stream


@dataclass(frozen=True)
class _Dimensions:
    """Indices into a head: both halves of the fast rotary pairs, and the slow pair (none in tiny heads)."""

    fast: tuple[int, ...]
    slow: tuple[int, int] | None


def context_size(hidden: int) -> int:
    """The first this many of the hidden dimensions are those that the context heads write to."""
    return max(1, hidden // 8)


def shape_attention(
    config: ModelConfig, source: WeightSource, probe: Probe, layer: int, common: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Draw a layer's attention weights and add its output to the probe's states.

    Args:
        config: the model's shape.
        source: of random numbers.
        probe: the sample canvases before this layer.
        layer: index of the layer.
        common: `[hidden]` unit vector that all embeddings share.

    Returns:
        Weights by role, as in `model.family`.
    """
    prefix, hidden, head = f"layers.{layer}", config.hidden_size, config.head_dim
    norm = source.norm(f"{prefix}.attention_norm", hidden)
    normed = probe.normed(norm).float()
    rows = (config.num_heads + 2 * config.num_kv_heads) * head
    qkv = source.normal(f"{prefix}.qkv", (rows, hidden), hidden**-0.5, torch.float32)
    dimensions = _dimensions(config)
    _shape_queries_and_keys(config, qkv, dimensions, common / float((normed @ common).mean()))
    values = qkv[-config.num_kv_heads * head :]
    for direction in orthonormal((common, normed[probe.masked].mean(dim=0))):
        values -= torch.outer(values @ direction, direction)

    out = source.normal(f"{prefix}.attention_out", (hidden, config.num_heads * head), 1.0, torch.float32)
    context = _context_heads(config).repeat_interleave(head)
    out[context_size(hidden) :, context] = 0.0
    gain = _norm_weight(config, dimensions).to(source.dtype)
    weights = {
        "attention_norm": norm,
        "qkv": qkv.to(source.dtype),
        "query_norm": gain,
        "key_norm": gain.clone(),
    }
    later = _LATER_SHARE * min(1.0, math.sqrt(4 / config.num_layers))  # many layers contribute less each
    share = (_FIRST_LAYER_SHARE if layer == 0 else later) * probe.scale()
    fitted = torch.zeros_like(out)
    for heads, size in ((~context, share), (context, share * _CONTEXT_SHARE)):
        raw = probe.attention(weights | {"attention_out": (out * heads).to(source.dtype)})
        fitted += out * heads * (size / max(1e-9, rms(raw[probe.in_block])))
    weights["attention_out"] = fitted.to(source.dtype)
    probe.x = probe.x + probe.attention(weights)
    return weights


def orthonormal(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gram-Schmidt; vectors that depend on the earlier ones are left out."""
    basis: list[torch.Tensor] = []
    for vector in vectors:
        rest = vector.float()
        for known in basis:
            rest = rest - (rest @ known) * known
        if float(rest.norm()) > 1e-3 * float(vector.norm()):
            basis.append(rest / rest.norm())
    return basis


def _context_heads(config: ModelConfig) -> torch.Tensor:
    return torch.arange(config.num_heads) % 4 == 3


def _dimensions(config: ModelConfig) -> _Dimensions:
    half = config.rotary_dim // 2
    frequencies = [config.rope_theta ** (-pair / half) for pair in range(half)]
    num_fast = max(1, sum(frequency > 0.05 for frequency in frequencies))
    fast = tuple(range(num_fast))
    slow = min(
        range(num_fast, half),
        key=lambda pair: abs(math.log(frequencies[pair] * _LOOK_BACK_DISTANCE / math.pi)),
        default=None,
    )
    return _Dimensions((*fast, *(pair + half for pair in fast)), None if slow is None else (slow, slow + half))


def _norm_weight(config: ModelConfig, dimensions: _Dimensions) -> torch.Tensor:
    """Weight of query and key norm: a score is the sum of squares of these times the products, over sqrt(head)."""
    weight = torch.full((config.head_dim,), _CONTENT_SPREAD**0.5)
    weight[list(dimensions.fast)] = (_PATTERN_SPREAD**2 * config.head_dim / len(dimensions.fast)) ** 0.25
    if dimensions.slow:
        weight[list(dimensions.slow)] = (_LOOK_BACK_STRENGTH * config.head_dim**0.5) ** 0.5 / _SLOW_VALUE
    return weight


def _shape_queries_and_keys(
    config: ModelConfig, qkv: torch.Tensor, dimensions: _Dimensions, constant: torch.Tensor
) -> None:
    """Give the slow pair the same value for all tokens, opposite in queries and keys: far is better than near."""
    context = _context_heads(config).tolist()
    for index, rows in enumerate(qkv.split(config.head_dim)[: config.num_heads + config.num_kv_heads]):
        is_query = index < config.num_heads
        if dimensions.slow is None:
            continue
        if is_query and context[index]:
            rows.zero_()
        rows[dimensions.slow[0]] = constant * (-_SLOW_VALUE if is_query else _SLOW_VALUE)
        rows[dimensions.slow[1]] = 0.0
