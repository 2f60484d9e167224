"""A block-diffusion transformer with mixture-of-experts layers, over ragged segments of many requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig
from relume.core import RelumeError, Routing
from relume.experts.executor import ExpertExecutor
from relume.experts.kernels import swiglu
from relume.experts.usage import Batch, ExpertUsage
from relume.machine.memory import is_out_of_memory
from relume.machine.workers import Workers, one_thread
from relume.model.attention import SegmentContext, attention, segment_context
from relume.model.batch import Segment, make_spans
from relume.model.layers import panel_linear, rms_norm
from relume.routing import join, route_requests
from relume.routing.choice import NATIVE, RoutingChoice


class Transformer:
    """Pre-norm transformer; its experts are computed by an executor that may hold them anywhere.

    Args:
        config: the model's shape.
        weights: by relume's name (see `model.family`), all but the routed experts; the router in float32.
        executor: computes the routed experts of a layer.
        workers: multiply for float32 on a CPU, where the number of threads must not change a bit.
        exact_batches: keep every request in matrix products of its own; see `EngineConfig`.
        routing: with which tokens choose experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        executor: ExpertExecutor,
        workers: Workers,
        exact_batches: bool = True,
        routing: RoutingChoice = NATIVE,
    ) -> None:
        self.config = config
        self._weights = weights
        self._layers = [layer_weights(weights, layer) for layer in range(config.num_layers)]
        self.executor = executor
        self.exact_batches = exact_batches
        self.routing = routing
        self.dtype = weights["embeddings"].dtype
        self.device = weights["embeddings"].device
        self._workers = workers
        self._bit_exact = self.dtype == torch.float32 and self.device.type == "cpu"

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], usage: ExpertUsage) -> list[torch.Tensor]:
        """One forward of all segments together.

        Each segment attends to its request's final positions and to itself, strictly block-causally, and
        its K/V are written behind those positions. What the experts do is added to `usage`.

        Returns:
            For each segment the logits `[m, vocab]` in float32 of its `logit_rows`.

        Raises:
            RelumeError: an expert could not be read, or memory ran out.
        """
        try:
            with one_thread() if self._bit_exact else nullcontext():
                return self._forward(segments, usage)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            num_tokens = sum(segment.num_tokens for segment in segments)
            reason = str(error).strip().partition("\n")[0]
            raise RelumeError(
                f"memory ran out in a forward of {num_tokens} tokens ({reason}): give the experts less with "
                "--expert-memory, or a prompt fewer --prefill-blocks"
            ) from None

    def _forward(self, segments: Sequence[Segment], usage: ExpertUsage) -> list[torch.Tensor]:
        spans = [
            [segment_context(self.config, segment, self.dtype) for segment in span]
            for span in make_spans(segments, self.exact_batches)
        ]
        xs = [
            F.embedding(torch.cat([context.segment.token_ids for context in span]), self._weights["embeddings"])
            for span in spans
        ]
        batch = Batch(
            [len(x) for x in xs],
            [segment.num_tokens for segment in segments],
            [segment.block_length for segment in segments],
            usage,
        )
        for layer in range(self.config.num_layers):
            xs = [
                x + attention(self.config, layer, self._layers[layer], x, span, self._linear)
                for x, span in zip(xs, spans, strict=True)
            ]
            xs = self._feed_forward(layer, xs, spans, batch)
        return [
            logits
            for x, span in zip(xs, spans, strict=True)
            for logits in self._logits(x, [context.segment for context in span])
        ]

    def _feed_forward(
        self, layer: int, xs: list[torch.Tensor], spans: Sequence[Sequence[SegmentContext]], batch: Batch
    ) -> list[torch.Tensor]:
        normed = [self._norm(layer, "mlp_norm", x) for x in xs]
        if layer < self.config.num_dense_layers:
            return [x + self._swiglu(layer, "dense", rows) for x, rows in zip(xs, normed, strict=True)]
        routings = [self._route(layer, rows, span) for rows, span in zip(normed, spans, strict=True)]
        lengths = batch.span_lengths
        routed = self.executor.forward(layer, torch.cat(normed), join(routings), batch).split(lengths)
        if not self.config.shared_size:
            return [x + out for x, out in zip(xs, routed, strict=True)]
        return [
            x + (out + self._swiglu(layer, "shared", rows))
            for x, out, rows in zip(xs, routed, normed, strict=True)
        ]

    def _route(self, layer: int, normed: torch.Tensor, span: Sequence[SegmentContext]) -> Routing:
        residents = self.executor.residents(layer) if self.routing.uses_residents else None
        segments = [context.segment for context in span]
        return route_requests(
            self._layers[layer],
            normed,
            [segment.num_tokens for segment in segments],
            self.config.router,
            self.routing,
            [segment.routed(residents) for segment in segments],
        )

    def _logits(self, x: torch.Tensor, span: Sequence[Segment]) -> list[torch.Tensor]:
        head = self._weights.get("lm_head", self._weights["embeddings"])
        found = []
        for rows, segment in zip(x.split([segment.num_tokens for segment in span]), span, strict=True):
            wanted = rms_norm(rows[segment.logit_rows], self._weights["final_norm"], self.config.rms_norm_eps)
            found.append(self._linear(wanted, head).float())
        return found

    def _norm(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._layers[layer][name], self.config.rms_norm_eps)

    def _swiglu(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        weights = self._layers[layer][f"{name}_gate_up"], self._layers[layer][f"{name}_down"]
        return swiglu(x, *weights, self._linear)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return panel_linear(x, weight, self._workers) if self._bit_exact else F.linear(x, weight)


def layer_weights(weights: Mapping[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """One layer's weights by role."""
    prefix = f"layers.{layer}."
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
