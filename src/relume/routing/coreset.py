"""Experts that a window of tokens shares: votes, an order, and how many of it (dMoE, arXiv 2605.30876; DES).

Votes are summed in float64: of float32 scores of like size the sum is then exact, so that it does not depend on
how many windows are worked on together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import RouterConfig
from relume.routing.choice import RoutingChoice
from relume.routing.token_choice import keep_groups, top_indices


def windows_of(values: torch.Tensor, window: int) -> torch.Tensor:
    """`[tokens, ...]` as `[windows, window, ...]`; a partial last window is filled with zeros, no votes."""
    missing = -len(values) % window
    padded = F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing))
    return padded.view(-1, window, *values.shape[1:])


def best_experts(selection: torch.Tensor, count: int) -> torch.Tensor:
    """`[tokens, experts]` bool: each token's `count` largest scores, ties to the lower id, without a full sort."""
    smallest = selection.topk(count, dim=-1).values[:, -1:]
    above, tied = selection > smallest, selection == smallest
    return above | (tied & (tied.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


def token_votes(selection: torch.Tensor, count: int) -> torch.Tensor:
    """Votes `[tokens, experts]` float64: a token's `count` largest biased scores, of all groups; 0 for the others.

    A negative score, which a bias can cause, votes 0: with negative votes a larger share of them could be fewer
    experts. Published scores are not, so nothing published changes.
    """
    return selection.clamp(min=0.0).masked_fill(~best_experts(selection, count), 0.0).double()


def normalised_votes(selection: torch.Tensor, count: int, window: int, aggregate: str | None) -> torch.Tensor:
    """Shares `[windows, experts]` float64 of each window's votes."""
    votes = windows_of(token_votes(selection, count), window)
    totals = votes.amax(dim=1) if aggregate == "max" else votes.sum(dim=1)
    return totals / (totals.sum(dim=-1, keepdim=True) + 1e-20)


def vote_order(shares: torch.Tensor) -> torch.Tensor:
    """Experts `[windows, experts]` by descending votes, ties to the lower id."""
    return top_indices(shares, shares.shape[-1])


def first_of(order: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """`[windows, experts]` bool: the first `sizes` `[windows]` experts of each window's order."""
    ranks = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    inside = ranks < sizes.unsqueeze(-1)
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def smallest_share(shares: torch.Tensor, order: torch.Tensor, p: float) -> torch.Tensor:
    """How many experts of each order hold `p` of the votes, `[windows]`: those up to it and the first beyond."""
    num_experts = order.shape[-1]
    if p >= 1.0:
        return torch.full((len(order),), num_experts, device=order.device)
    reached = shares.gather(-1, order).cumsum(dim=-1) <= p
    return (reached.sum(dim=-1) + 1).clamp(max=num_experts)


@torch.no_grad()
def coreset(
    selection: torch.Tensor,
    config: RouterConfig,
    choice: RoutingChoice,
    window: int,
    residents: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts that each window's tokens may use, `[windows, experts]` bool.

    Args:
        selection: `[tokens, experts]` biased scores of consecutive tokens, whole windows from the first.
        config: of the router.
        choice: `dmoe`, `des-vote` or `des-seq`.
        window: tokens that share a coreset.
        residents: `[experts]` bool.
    """
    shares = normalised_votes(selection, config.top_k, window, choice.aggregate)
    if choice.name == "des-seq":
        assert choice.n is not None
        united = windows_of(best_experts(selection, choice.n), window).any(dim=1)
        return extended(united, shares, choice.smallest(config))
    order = vote_order(shares)
    if choice.share is not None:
        sizes = torch.full((len(order),), round(choice.share * config.num_experts), device=order.device)
    else:
        assert choice.p is not None, "a coreset by votes is a share of the experts or of the votes"
        sizes = smallest_share(shares, order, choice.p)
    if choice.residents and residents is not None:  # other members, but no more of them
        order = vote_order(shares + choice.residents * residents.to(shares.device))
    return first_of(order, sizes.clamp(min=choice.smallest(config)))


def extended(inside: torch.Tensor, shares: torch.Tensor, least: int) -> torch.Tensor:
    """Sets `[windows, experts]`, those smaller than `least` filled up to it by votes."""
    order = vote_order(shares + 2.0 * inside)  # shares are at most 1: members come first
    return first_of(order, inside.sum(dim=-1).clamp(min=least))


def restrict(selection: torch.Tensor, inside: torch.Tensor, window: int) -> torch.Tensor:
    """Set `selection` `[tokens, experts]` to -inf outside each token's window's experts `[windows, experts]`."""
    allowed = inside.repeat_interleave(window, dim=0)[: len(selection)]
    return selection.masked_fill(~allowed, float("-inf"))


def limit_groups(selection: torch.Tensor, config: RouterConfig) -> torch.Tensor:
    """`keep_groups`, if the router has groups."""
    return keep_groups(selection, config.num_groups, config.kept_groups) if config.num_groups > 1 else selection
