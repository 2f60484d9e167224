"""The routed experts of one layer over all tokens, with gradients.

Tokens are sorted by expert, so that every expert is one matrix product over consecutive rows; everything
else runs once over all rows. The backward is written out: autograd's would scatter-add rows one by one
where a permutation can be inverted, and fill a gradient of all experts for each slice of one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from relume.core import Routing


def expert_output(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's experts.

    Args:
        x: `[tokens, hidden]`.
        routing: of all tokens; its weights may carry a gradient.
        gate_up: `[experts, 2 * size, hidden]`.
        down: `[experts, hidden, size]`.

    Returns:
        `[tokens, hidden]`.
    """
    flat = routing.expert_ids.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    counts = torch.bincount(flat, minlength=len(gate_up))
    output: torch.Tensor = _ExpertCompute.apply(  # type: ignore[no-untyped-call]
        x, routing.weights, gate_up, down, order, inverse, counts
    )
    return output


def _combine(rows: torch.Tensor, inverse: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sum of each token's rows: `[tokens * top_k, width]` in sorted order give `[tokens, width]`."""
    return F.embedding_bag(inverse.view(-1, top_k), rows, mode="sum")


class _ExpertCompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        order: torch.Tensor,
        inverse: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        top_k = weights.shape[1]
        ends = counts.cumsum(0).to(torch.int32)
        tokens = order // top_k
        rows = x.index_select(0, tokens)
        gate_and_up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
        gate, up = gate_and_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        inner = silu * up
        sorted_weights = weights.flatten().index_select(0, order).unsqueeze(1).to(x.dtype)
        # Weighting the inner activation is the same sum as weighting the output, and it is narrower.
        weighted = inner * sorted_weights
        outputs = F.grouped_mm(weighted, down.transpose(1, 2), offs=ends)
        ctx.save_for_backward(
            rows, gate_and_up, silu, inner, weighted, sorted_weights, gate_up, down, tokens, inverse, ends
        )
        ctx.top_k = top_k
        return _combine(outputs, inverse, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = gradients
        rows, gate_and_up, silu, inner, weighted, sorted_weights, gate_up, down, tokens, inverse, ends = (
            ctx.saved_tensors
        )
        top_k = ctx.top_k
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_rows = grad.index_select(0, tokens)
        grad_down = F.grouped_mm(grad_rows.t(), weighted, offs=ends)
        grad_inner = F.grouped_mm(grad_rows, down, offs=ends)
        grad_weights = (
            (grad_inner * inner).sum(dim=1, dtype=torch.float32).index_select(0, inverse).view(-1, top_k)
        )
        grad_inner.mul_(sorted_weights)
        grad_gate_and_up = torch.empty_like(gate_and_up)
        size = gate.shape[1]
        torch.mul(grad_inner, silu, out=grad_gate_and_up[:, size:])
        grad_gate_and_up[:, :size] = torch.ops.aten.silu_backward(grad_inner.mul_(up), gate)
        grad_gate_up = F.grouped_mm(grad_gate_and_up.t(), rows, offs=ends)
        grad_x = _combine(F.grouped_mm(grad_gate_and_up, gate_up, offs=ends), inverse, top_k)
        return grad_x, grad_weights, grad_gate_up, grad_down, None, None, None
