"""Even loads without a loss: the router's selection bias follows each expert's load error."""

from __future__ import annotations

import torch

from relume.train.objective import PADDING, Batch


def expert_loads(expert_ids: torch.Tensor, batch: Batch, num_experts: int) -> torch.Tensor:
    """Tokens of each expert, `[layers, experts]` int64, from `[layers, positions, top_k]`; padding left out."""
    chosen = expert_ids[:, (batch.blocks != PADDING).flatten()].flatten(1)
    loads = torch.zeros(len(chosen), num_experts, dtype=torch.int64, device=chosen.device)
    return loads.scatter_add_(1, chosen, torch.ones_like(chosen))


def balance(bias: torch.Tensor, loads: torch.Tensor, rate: float) -> None:
    """Raise the bias `[experts]` of experts with less than the mean load by `rate`, lower the others', in place.

    The bias takes part in the selection only, so this adds no gradient and does not distort the weights.
    """
    error = loads.float().mean() - loads
    bias.add_(torch.sign(error), alpha=rate)


def active_share(expert_ids: torch.Tensor, batch: Batch, block_length: int, num_experts: int) -> torch.Tensor:
    """Mean share of distinct experts that a noisy block uses, `[layers]`."""
    noisy = (batch.copies.flatten() > 0).view(-1, block_length)[:, 0]
    blocks = expert_ids.unflatten(1, (-1, block_length))[:, noisy].flatten(2)
    used = torch.zeros(*blocks.shape[:2], num_experts, device=blocks.device)
    return used.scatter_(2, blocks, 1.0).mean(dim=(1, 2))
