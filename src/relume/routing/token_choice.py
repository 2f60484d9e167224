"""Each token takes its top-k experts (LLaDA2.0 and 2.1: within its best groups; SDAR: of all)."""

from __future__ import annotations

import torch

from relume.config import RouterConfig
from relume.core import Routing


def score(logits: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """Scores `[tokens, experts]` in float32: element-wise sigmoid, or softmax over the experts."""
    return torch.sigmoid(logits) if config.score_function == "sigmoid" else torch.softmax(logits, dim=-1)


def top_indices(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices `[..., count]` of the largest values of the last dimension, descending, ties to the lower index."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def keep_groups(selection: torch.Tensor, num_groups: int, kept_groups: int) -> torch.Tensor:
    """Set `selection` `[tokens, experts]` to -inf outside each token's best groups of consecutive experts.

    A group's score is the sum of its two largest selection scores (one, if it holds only one expert).
    """
    grouped = selection.view(len(selection), num_groups, -1)
    group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    dropped = torch.ones_like(group_scores, dtype=torch.bool)
    dropped.scatter_(-1, top_indices(group_scores, kept_groups), False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)


def choose_experts(scores: torch.Tensor, selection: torch.Tensor, config: RouterConfig) -> Routing:
    """Top-k experts by `selection`, weighted by `scores` (without the bias), normalised and scaled."""
    expert_ids = top_indices(selection, config.top_k)
    weights = scores.gather(-1, expert_ids)
    if config.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_ids, weights * config.scale)
