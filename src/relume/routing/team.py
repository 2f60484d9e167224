"""TEAM's restriction: tokens that will not commit soon use the experts that the others need anyway."""

from __future__ import annotations

import torch

from relume.config import RouterConfig
from relume.routing.choice import RoutingChoice
from relume.routing.coreset import best_experts, extended, limit_groups, normalised_votes, restrict, windows_of
from relume.routing.tokens import RoutedTokens


def hot_tokens(num_tokens: int, choice: RoutingChoice, tokens: RoutedTokens, device: torch.device) -> torch.Tensor:
    """`[tokens]` bool: committed ones, likely ones, and masks near their block's first."""
    if tokens.masked is None:
        return torch.ones(num_tokens, dtype=torch.bool, device=device)
    assert choice.distance is not None and choice.confidence is not None
    masked = windows_of(tokens.masked.to(device), tokens.block_length)
    places = torch.arange(tokens.block_length, device=device)
    first = masked.int().argmax(dim=-1, keepdim=True)
    hot = (~masked | (places - first < choice.distance)).flatten()[:num_tokens]
    return hot if tokens.confidences is None else hot | (tokens.confidences.to(device) > choice.confidence)


@torch.no_grad()
def team_selection(
    selection: torch.Tensor, config: RouterConfig, choice: RoutingChoice, tokens: RoutedTokens
) -> torch.Tensor:
    """`selection` `[tokens, experts]`, for cold tokens -inf outside the experts that their block's hot ones use.

    Hot tokens keep theirs. Where that would leave a cold token too few legal experts, the set is filled up to the
    guard by the cold tokens' votes. After the idea of TEAM as others describe it; its caching of decoded tokens
    and its speculative branches are not part of this.
    """
    window = tokens.block_length
    hot = hot_tokens(len(selection), choice, tokens, selection.device)
    chosen = best_experts(limit_groups(selection, config), config.top_k)
    used = windows_of(chosen & hot.unsqueeze(-1), window).any(dim=1)
    legal = limit_groups(restrict(selection, used, window), config).isfinite().sum(dim=-1)
    lacking = windows_of(~hot & (legal < config.top_k), window).any(dim=1)
    cold_votes = selection.masked_fill(hot.unsqueeze(-1), 0.0)
    shares = normalised_votes(cold_votes, config.top_k, window, None)
    filled = torch.where(lacking.unsqueeze(-1), extended(used, shares, choice.smallest(config)), used)
    return torch.where(hot.unsqueeze(-1), selection, restrict(selection, filled, window))
