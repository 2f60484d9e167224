"""Expert choice in a window of tokens: each expert takes the tokens that it fits best (EC-DLM)."""

from __future__ import annotations

import torch

from relume.config import RouterConfig
from relume.core import Routing
from relume.routing.choice import RoutingChoice
from relume.routing.coreset import windows_of
from relume.routing.token_choice import top_indices
from relume.routing.tokens import RoutedTokens


def tokens_per_expert(
    sizes: torch.Tensor, masked: torch.Tensor, choice: RoutingChoice, num_experts: int
) -> torch.Tensor:
    """How many tokens each expert takes, `[windows]` int64.

    It is `max(1, round(k N / E))` with `k = least + (most - least) (1 - r)`, of `N` tokens a share `r` of which is
    masked.

    Args:
        sizes, masked: `[windows]`, tokens of each window and how many of them are masked.
        choice: resolved, so that it has `least` and `most`.
        num_experts: of the layer.
    """
    assert choice.least is not None and choice.most is not None, "the choice was not resolved"
    mean = choice.least + (choice.most - choice.least) * (1.0 - masked.double() / sizes)
    taken = (mean * sizes / num_experts + 0.5).floor().long()
    return torch.minimum(taken.clamp(min=1), sizes)


def expert_choice(
    scores: torch.Tensor,
    selection: torch.Tensor,
    config: RouterConfig,
    choice: RoutingChoice,
    tokens: RoutedTokens,
) -> Routing:
    """Routing in which a token has any number of experts, also none.

    Its width is the most that a token has. A token that has fewer is filled up with other experts of weight 0,
    which `Routing.used` leaves out: every expert is active in every window, so they add none. The weights are the
    model's: scores without the bias, normalised over a token's own experts, and scaled.
    """
    num_tokens, num_experts = selection.shape
    window = choice.window(tokens.block_length)
    ones = selection.new_ones(num_tokens)
    masked = torch.zeros_like(ones) if tokens.masked is None else tokens.masked.to(ones)
    sizes = windows_of(ones, window).sum(dim=1).long()
    counts = tokens_per_expert(sizes, windows_of(masked, window).sum(dim=1), choice.resolved(config), num_experts)
    present = windows_of(ones, window).bool().unsqueeze(-1)
    by_expert = windows_of(selection.detach(), window).masked_fill(~present, float("-inf")).transpose(1, 2)
    order = top_indices(by_expert, window)
    ranks = torch.arange(window, device=selection.device).expand_as(order)
    inside = ranks < counts.view(-1, 1, 1)
    taken = torch.zeros_like(inside).scatter_(-1, order, inside).transpose(1, 2).flatten(0, 1)[:num_tokens]
    width = max(1, int(taken.sum(dim=-1).max()))
    expert_ids = top_indices(selection.masked_fill(~taken, float("-inf")), width)
    used = taken.gather(-1, expert_ids)
    weights = scores.gather(-1, expert_ids) * used
    if config.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_ids, weights * config.scale, used)
