"""Runs the routed experts of one layer over the tokens of all requests in a forward.

Matrix products of torch depend in the last bit on the number of rows. So that a request's result does not
depend on its neighbours, tokens that must not influence each other are computed in separate calls: each
(expert, span) pair is one call, over the span's tokens in order. Each token's outputs are then multiplied
and added one by one in routing order; both are exactly rounded, so no grouping changes them, nor does the order
in which experts are computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

import torch

from relume.core import Routing
from relume.experts.access import Leased
from relume.experts.arena import Lease
from relume.experts.formats import ExpertFormat, Views
from relume.experts.host_lane import HostLane
from relume.experts.kernels import combine
from relume.experts.memory import ExpertMemory
from relume.experts.usage import Batch
from relume.machine.workers import Workers
from relume.strategy.use import LayerUse

#: Experts smaller than this are computed by the calling thread: handing them to another costs more.
SMALLEST_SHARED_BYTES = 1 << 18


class ExpertExecutor:
    """Computes the MoE output of a layer from its routing.

    Args:
        memory: of the experts.
        num_experts: of a layer.
        first_layer: the model's first MoE layer.
        workers: compute experts side by side.
        host: computes experts that are not brought, at the same time.
    """

    def __init__(
        self, memory: ExpertMemory, num_experts: int, first_layer: int, workers: Workers, host: HostLane
    ) -> None:
        self.memory = memory
        self._host = host
        self._num_experts = num_experts
        self._first_layer = first_layer
        self._workers = workers
        self._format: ExpertFormat = memory.arena.format
        self._shared = self._format.slot_bytes >= SMALLEST_SHARED_BYTES

    def forward(self, layer: int, x: torch.Tensor, routing: Routing, batch: Batch) -> torch.Tensor:
        """Weighted sum of each token's experts.

        Args:
            layer: index of the layer in the model.
            x: `[tokens, hidden]`.
            routing: of all tokens.
            batch: which tokens belong together; its usage is added to.

        Returns:
            `[tokens, hidden]` in the dtype of `x`; products and sums are float32.
        """
        began = time.perf_counter()
        expert_ids = routing.expert_ids.cpu()
        num_tokens, top_k = expert_ids.shape
        num_spans = len(batch.span_lengths)
        span_of_token = torch.repeat_interleave(torch.tensor(batch.span_lengths))
        keys = (expert_ids * num_spans + span_of_token.unsqueeze(1)).flatten()
        order = torch.argsort(keys, stable=True).to(x.device)
        counts = torch.bincount(keys, minlength=self._num_experts * num_spans)
        used = counts.nonzero().flatten().tolist()
        pairs_of: dict[int, list[torch.Tensor]] = {}  # rows of `outputs`, by expert and span
        for key, pairs in zip(used, order.split(counts[counts > 0].tolist()), strict=True):
            pairs_of.setdefault(key // num_spans, []).append(pairs)
        batch.usage.active_by_span.update(key % num_spans for key in used)

        outputs = torch.empty(num_tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)

        def compute(leased: Iterable[Leased]) -> None:
            started = time.perf_counter()
            tasks = [partial(self._compute_expert, x, top_k, pairs_of[e], lease, outputs) for e, lease in leased]
            if self._shared:
                self._workers.run(tasks)
            else:
                for task in tasks:
                    task()
            batch.usage.compute_s += time.perf_counter() - started

        use = LayerUse(
            layer - self._first_layer,
            expert_ids.numpy(),
            routing.weights.cpu().numpy(),
            batch.votes,
            self._num_experts,
        )
        with self.memory.access(use, batch.usage) as access:
            hosted = [partial(self._compute_hosted, x, top_k, pairs_of[e], views) for e, views in access.hosted]
            with self._host.computing(hosted) as results:
                compute(access.hits)
                for arrived in access.arrivals():
                    compute(arrived)
            for pairs, rows in results.rows:
                outputs.index_copy_(0, pairs, rows)
            batch.usage.host_s += results.seconds
        total = combine(outputs.view(num_tokens, top_k, -1), routing.weights).to(x.dtype)
        batch.usage.moe_s += time.perf_counter() - began
        return total

    def _compute_hosted(
        self, x: torch.Tensor, top_k: int, spans: list[torch.Tensor], views: Views
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of `outputs` and what belongs there, of an expert in host memory."""
        found = []
        for pairs in spans:
            rows = x.index_select(0, pairs // top_k).to(views[0].device)
            found.append((pairs, self._format.compute(rows, views).float().to(x.device)))
        return found

    def _compute_expert(
        self, x: torch.Tensor, top_k: int, spans: list[torch.Tensor], lease: Lease, outputs: torch.Tensor
    ) -> None:
        views = self.memory.arena.views(lease)
        for pairs in spans:
            rows = x.index_select(0, pairs // top_k)
            outputs.index_copy_(0, pairs, self._format.compute(rows, views).float())
        self.memory.arena.check(lease)  # the weights were the same until the end
