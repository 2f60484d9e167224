"""A block-diffusion transformer with mixture-of-experts layers, over ragged segments of many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig
from relume.core import Routing
from relume.experts.executor import ExpertExecutor, ExpertUsage
from relume.experts.kernels import swiglu
from relume.model.batch import Segment, make_spans
from relume.model.layers import attend, block_causal_mask, rms_norm, rotary_table, rotate
from relume.routing import join, route


@dataclass(frozen=True)
class SegmentContext:
    """What all layers share for one segment: rotary table and attention mask."""

    segment: Segment
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None


class Transformer:
    """Pre-norm transformer; its experts are computed by an executor that may hold them anywhere.

    Args:
        config: the model's shape.
        weights: by relume's name (see `model.family`), all but the routed experts; the router in float32.
        executor: computes the routed experts of a layer.
        exact_batches: keep every request in matrix products of its own; see `EngineConfig`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        executor: ExpertExecutor,
        exact_batches: bool = True,
    ) -> None:
        self.config = config
        self._weights = weights
        self._executor = executor
        self.exact_batches = exact_batches
        self.dtype = weights["embeddings"].dtype
        self.device = weights["embeddings"].device

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], usage: ExpertUsage) -> list[torch.Tensor]:
        """One forward of all segments together.

        Each segment attends to its request's final positions and to itself, strictly block-causally, and
        its K/V are written behind those positions. What the experts do is added to `usage`.

        Returns:
            For each segment the logits `[m, vocab]` in float32 of its `logit_rows`.
        """
        spans = [[self._context(segment) for segment in span] for span in make_spans(segments, self.exact_batches)]
        xs = [
            F.embedding(torch.cat([context.segment.token_ids for context in span]), self._weights["embeddings"])
            for span in spans
        ]
        for layer in range(self.config.num_layers):
            xs = [x + self.attention(layer, x, span) for x, span in zip(xs, spans, strict=True)]
            xs = self._feed_forward(layer, xs, spans, usage)
        return [
            logits
            for x, span in zip(xs, spans, strict=True)
            for logits in self._logits(x, [context.segment for context in span])
        ]

    def _context(self, segment: Segment) -> SegmentContext:
        start, num_tokens = segment.cache.length, segment.num_tokens
        return SegmentContext(
            segment,
            rotary_table(self.config, start, num_tokens, self.dtype, self.device),
            block_causal_mask(start, num_tokens, segment.block_length, self.device),
        )

    def attention(self, layer: int, x: torch.Tensor, span: Sequence[SegmentContext]) -> torch.Tensor:
        """Attention output `[tokens, hidden]` of a span's hidden states; writes its K/V."""
        weight, eps, head_dim = self._weight, self.config.rms_norm_eps, self.config.head_dim
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = F.linear(self._norm(layer, "attention_norm", x), weight(layer, "qkv"))
        qkv = qkv.view(len(x), -1, head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        query = rms_norm(query, weight(layer, "query_norm"), eps)
        key = rms_norm(key, weight(layer, "key_norm"), eps)
        outputs = []
        begin = 0
        for context in span:
            end = begin + context.segment.num_tokens
            rows = [part[begin:end].transpose(0, 1) for part in (query, key, value)]
            keys, values = context.segment.cache.write(layer, rotate(rows[1], context.rotary), rows[2])
            outputs.append(attend(rotate(rows[0], context.rotary), keys, values, context.mask))
            begin = end
        return F.linear(torch.cat(outputs), weight(layer, "attention_out"))

    def route(self, layer: int, normed: torch.Tensor, lengths: Sequence[int]) -> Routing:
        """Routing of normed hidden states `[tokens, hidden]` whose requests have `lengths` tokens each."""
        logits = F.linear(normed.float(), self._weight(layer, "router"))
        bias = self._weights.get(f"layers.{layer}.router_bias")
        return join([route(rows, bias, self.config.router) for rows in logits.split(list(lengths))])

    def _feed_forward(
        self, layer: int, xs: list[torch.Tensor], spans: Sequence[Sequence[SegmentContext]], usage: ExpertUsage
    ) -> list[torch.Tensor]:
        normed = [self._norm(layer, "mlp_norm", x) for x in xs]
        if layer < self.config.num_dense_layers:
            return [x + self._swiglu(layer, "dense", rows) for x, rows in zip(xs, normed, strict=True)]
        routings = [
            self.route(layer, rows, [context.segment.num_tokens for context in span])
            for rows, span in zip(normed, spans, strict=True)
        ]
        lengths = [len(x) for x in xs]
        routed = self._executor.forward(layer, torch.cat(normed), join(routings), lengths, usage).split(lengths)
        if not self.config.shared_size:
            return [x + out for x, out in zip(xs, routed, strict=True)]
        return [
            x + (out + self._swiglu(layer, "shared", rows))
            for x, out, rows in zip(xs, routed, normed, strict=True)
        ]

    def _logits(self, x: torch.Tensor, span: Sequence[Segment]) -> list[torch.Tensor]:
        head = self._weights.get("lm_head", self._weights["embeddings"])
        found = []
        for rows, segment in zip(x.split([segment.num_tokens for segment in span]), span, strict=True):
            wanted = rms_norm(rows[segment.logit_rows], self._weights["final_norm"], self.config.rms_norm_eps)
            found.append(F.linear(wanted, head).float())
        return found

    def _norm(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight(layer, name), self.config.rms_norm_eps)

    def _swiglu(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, self._weight(layer, f"{name}_gate_up"), self._weight(layer, f"{name}_down"))

    def _weight(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"layers.{layer}.{name}"]
