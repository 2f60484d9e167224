"""Runs the routed experts of one layer over the tokens of all requests in a forward.

Matrix products of torch depend in the last bit on the number of rows. So that a request's result does not
depend on its neighbours, tokens that must not influence each other are computed in separate calls: each
(expert, span) pair is one call, over the span's tokens in order. Each token's outputs are then multiplied
and added one by one in routing order; both are exactly rounded, so no grouping changes them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from relume.core import Routing
from relume.experts.kernels import combine, swiglu
from relume.experts.store import ResidentExperts


@dataclass
class ExpertUsage:
    """What one forward used, summed over its MoE layers.

    Attributes:
        layers: MoE layers.
        active: distinct experts of each layer, over all tokens.
        active_by_span: the same over each span's tokens.
        compute_s: seconds in the experts.
    """

    layers: int = 0
    active: int = 0
    active_by_span: Counter[int] = field(default_factory=Counter)
    compute_s: float = 0.0


class ExpertExecutor:
    """Computes the MoE output of a layer from its routing."""

    def __init__(self, experts: ResidentExperts, num_experts: int) -> None:
        self._experts = experts
        self._num_experts = num_experts

    def forward(
        self, layer: int, x: torch.Tensor, routing: Routing, span_lengths: Sequence[int], usage: ExpertUsage
    ) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            layer: index of the layer.
            x: `[tokens, hidden]`, the spans one after the other, no padding.
            routing: of all tokens.
            span_lengths: tokens of each span; they add up to `tokens`.
            usage: is added to.

        Returns:
            `[tokens, hidden]` in the dtype of `x`; products and sums are float32.
        """
        started = time.perf_counter()
        num_tokens, top_k = routing.expert_ids.shape
        num_spans = len(span_lengths)
        span_of_token = torch.repeat_interleave(torch.tensor(span_lengths))
        keys = (routing.expert_ids.cpu() * num_spans + span_of_token.unsqueeze(1)).flatten()
        order = torch.argsort(keys, stable=True)
        counts = torch.bincount(keys, minlength=self._num_experts * num_spans)
        order = order.to(x.device)

        outputs = torch.empty(num_tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)
        begin = 0
        used = counts.nonzero().flatten().tolist()
        for key, count in zip(used, counts[counts > 0].tolist(), strict=True):
            pairs = order[begin : begin + count]
            rows = x.index_select(0, pairs // top_k)
            outputs.index_copy_(0, pairs, swiglu(rows, *self._experts.weights(layer, key // num_spans)).float())
            begin += count
        total = combine(outputs.view(num_tokens, top_k, -1), routing.weights)
        usage.layers += 1
        usage.active += len({key // num_spans for key in used})
        usage.active_by_span.update(key % num_spans for key in used)
        usage.compute_s += time.perf_counter() - started
        return total.to(x.dtype)
