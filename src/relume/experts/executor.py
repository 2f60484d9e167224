"""Runs the routed experts of one layer over the tokens of all requests in a forward.

Matrix products of torch depend in the last bit on the number of rows. So that a request's result does not
depend on its neighbours, tokens that must not influence each other are computed in separate calls: each
(expert, span) pair is one call, over the span's tokens in order. Each token's outputs are then multiplied
and added one by one in routing order; both are exactly rounded, so no grouping changes them, nor does the order
in which experts are computed.

On a GPU the spans are kept apart likewise, all experts of one in a grouped product. There kernels are only
launched here: the one place where this thread waits for the device is where it fetches a layer's routing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from relume.core import Routing
from relume.experts.access import Leased
from relume.experts.arena import Lease
from relume.experts.formats import ExpertFormat, Views
from relume.experts.grouped import GroupedExperts, window_ends
from relume.experts.host_lane import HostLane, Rows
from relume.experts.kernels import combine
from relume.experts.memory import ExpertMemory
from relume.experts.usage import Batch
from relume.machine.workers import Workers
from relume.strategy.use import LayerUse

#: Experts smaller than this are computed by the calling thread: handing them to another costs more.
SMALLEST_SHARED_BYTES = 1 << 18

#: Rows of a layer's outputs, by expert and span.
PairsOf = dict[int, dict[int, torch.Tensor]]


class ExpertExecutor:
    """Computes the MoE output of a layer from its routing.

    Args:
        memory: of the experts.
        num_experts: of a layer.
        first_layer: the model's first MoE layer.
        workers: compute experts side by side.
        host: computes experts that are not brought, at the same time.
        grouped: computes many at once, where that is possible; only beside copies that are asynchronous.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        num_experts: int,
        first_layer: int,
        workers: Workers,
        host: HostLane,
        grouped: GroupedExperts | None = None,
    ) -> None:
        self.memory = memory
        self._host = host
        self._num_experts = num_experts
        self._first_layer = first_layer
        self._workers = workers
        self._copies = memory.loader.copies
        self._grouped = grouped
        self._format: ExpertFormat = memory.arena.format
        self._shared = self._format.slot_bytes >= SMALLEST_SHARED_BYTES

    def residents(self, layer: int) -> torch.Tensor:
        """`[experts]` bool, on the CPU: which experts of a layer of the model are resident now."""
        return torch.from_numpy(self.memory.pool.resident[layer - self._first_layer].copy())

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
        copies = self._copies
        expert_ids, weights = routing.expert_ids.cpu(), routing.weights.cpu()
        # While the device is awaited anyway: the host lane must not wait for what is launched from now on.
        host_x = x.cpu() if self.memory.loader.source.holds_any else x
        num_tokens, top_k = expert_ids.shape
        num_spans = len(batch.span_lengths)
        span_of_token = torch.repeat_interleave(torch.tensor(batch.span_lengths))
        keys = (expert_ids * num_spans + span_of_token.unsqueeze(1)).flatten()
        num_keys = self._num_experts * num_spans
        if routing.used is not None:
            keys[~routing.used.cpu().flatten()] = num_keys  # behind all others, and cut off
        counts = torch.bincount(keys, minlength=num_keys)[:num_keys]
        order = torch.argsort(keys, stable=True)[: int(counts.sum())]
        used = counts.nonzero().flatten().tolist()
        lengths = counts[counts > 0].tolist()

        def split(order: torch.Tensor) -> PairsOf:
            found: PairsOf = {}
            for key, pairs in zip(used, order.split(lengths), strict=True):
                found.setdefault(key // num_spans, {})[key % num_spans] = pairs
            return found

        pairs_of = split(order)
        placed = split(copies.to_device(order)) if copies.asynchronous and self._grouped is None else pairs_of
        batch.usage.active_by_span.update(key % num_spans for key in used)

        make = torch.empty if routing.used is None else torch.zeros
        outputs = make(num_tokens * top_k, x.shape[1], dtype=torch.float32, device=x.device)

        def compute(leased: Iterable[Leased]) -> None:
            started = time.perf_counter()
            if copies.asynchronous:
                self._launch(x, top_k, placed, list(leased), outputs)
                batch.usage.compute_s += time.perf_counter() - started
                return
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
            weights.numpy(),
            batch.votes,
            self._num_experts,
            None if routing.used is None else routing.used.cpu().numpy(),
        )
        with self.memory.access(use, batch.usage) as access:
            hosted = [
                partial(self._compute_hosted, host_x, top_k, pairs_of[e], views) for e, views in access.hosted
            ]
            with self._host.computing(hosted) as results:
                with copies.timing("device", self._predicted("device", use, [e for e, _ in access.hits])):
                    compute(access.hits)
                for arrived in access.arrivals():
                    compute(arrived)
            self._put(results.rows, outputs)
            batch.usage.host_s += results.seconds
        if copies.asynchronous:
            self._learn(self._predicted("host", use, [e for e, _ in access.hosted]), results.seconds)
        copies.join()
        total = combine(outputs.view(num_tokens, top_k, -1), routing.weights).to(x.dtype)
        batch.usage.moe_s += time.perf_counter() - began
        return total

    def _compute_hosted(
        self, x: torch.Tensor, top_k: int, spans: dict[int, torch.Tensor], views: Views
    ) -> list[Rows]:
        """Rows of `outputs` and what belongs there, of an expert in host memory; all of it there."""
        found = []
        for pairs in spans.values():
            rows = x.index_select(0, pairs // top_k)
            found.append((pairs, self._format.compute(rows, views).float()))
        return found

    def _put(self, found: Sequence[Rows], outputs: torch.Tensor) -> None:
        """What the host computed, into `outputs`."""
        if self._copies.asynchronous and found:
            pairs, rows = (self._copies.to_device(torch.cat(parts)) for parts in zip(*found, strict=True))
            self._copies.launch(partial(outputs.index_copy_, 0, pairs, rows))
            return
        for pairs, rows in found:
            outputs.index_copy_(0, pairs, rows)

    def _compute_expert(
        self, x: torch.Tensor, top_k: int, spans: dict[int, torch.Tensor], lease: Lease, outputs: torch.Tensor
    ) -> None:
        views = self.memory.arena.views(lease)
        self._compute_views(x, top_k, spans, views, outputs)
        self.memory.arena.check(lease)  # the weights were the same until the end

    def _compute_views(
        self, x: torch.Tensor, top_k: int, spans: dict[int, torch.Tensor], views: Views, outputs: torch.Tensor
    ) -> None:
        for pairs in spans.values():
            rows = x.index_select(0, pairs // top_k)
            outputs.index_copy_(0, pairs, self._format.compute(rows, views).float())

    def _launch(
        self, x: torch.Tensor, top_k: int, pairs_of: PairsOf, leased: Sequence[Leased], outputs: torch.Tensor
    ) -> None:
        """Launch the kernels of some experts, behind the copies that bring them."""
        copies = self._copies
        for _, lease in leased:
            copies.use(lease.slot)
        if self._grouped is None:
            for expert, lease in leased:
                views = self.memory.arena.views(lease)
                copies.launch(partial(self._compute_views, x, top_k, pairs_of[expert], views, outputs))
            return
        expert_in = {lease.slot: expert for expert, lease in leased}
        for span in sorted({span for expert, _ in leased for span in pairs_of[expert]}):
            slots = sorted(slot for slot, expert in expert_in.items() if span in pairs_of[expert])
            for window in self._grouped.windows(slots):
                inside = [slot for slot in slots if slot in window]
                parts = [pairs_of[expert_in[slot]][span] for slot in inside]
                pairs = copies.to_device(torch.cat(parts))
                ends = copies.to_device(window_ends(window, inside, [len(part) for part in parts]))
                copies.launch(partial(_compute_grouped, self._grouped, x, top_k, pairs, ends, window, outputs))

    def _predicted(self, lane: str, use: LayerUse, experts: Sequence[int]) -> float:
        """Seconds of these experts on a lane, where that is learned."""
        if not self._copies.asynchronous or not experts:
            return 0.0
        return float(self.memory.costs.kernel_s(use.token_counts[list(experts)], lane).sum())

    def _learn(self, predicted_s: float, host_s: float) -> None:
        """What the lanes took: the host's just now, the others' as far as it is known."""
        costs = self.memory.costs
        costs.learn("host", predicted_s, host_s)
        for lane, predicted, seconds in self._copies.measured():
            costs.learn(lane, costs.transfer_s() if lane == "transfer" else predicted, seconds)


def _compute_grouped(
    grouped: GroupedExperts,
    x: torch.Tensor,
    top_k: int,
    pairs: torch.Tensor,
    ends: torch.Tensor,
    window: range,
    outputs: torch.Tensor,
) -> None:
    rows = x.index_select(0, pairs // top_k)
    outputs.index_copy_(0, pairs, grouped.compute(rows, ends, window).float())
