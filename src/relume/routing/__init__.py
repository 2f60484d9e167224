"""From a router's scores to the experts of each token: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import RouterConfig
from relume.core import Phase, Routing
from relume.routing.block_capacity import admit_experts
from relume.routing.choice import NATIVE, RoutingChoice
from relume.routing.coreset import coreset, limit_groups, restrict
from relume.routing.expert_choice import expert_choice
from relume.routing.team import team_selection
from relume.routing.token_choice import choose_experts, score
from relume.routing.tokens import RoutedTokens


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    config: RouterConfig,
    choice: RoutingChoice = NATIVE,
    tokens: RoutedTokens | None = None,
) -> Routing:
    """Routing of consecutive tokens of one request: the model's own, or a choice that uses fewer experts.

    Args:
        logits: `[tokens, experts]` float32. With an expert capacity, the first token must lie on a border of
            the capacity window; with another choice than the model's own, on a block's.
        bias: `[experts]` float32, added for selection only.
        config: the layer's router.
        choice: what may differ from the model's own routing; checked against the router before.
        tokens: what is known of the tokens; without it they are one block, of which nothing is masked.
    """
    config = choice.router(config)
    scores = score(logits, config)
    selection = scores if bias is None else scores + bias
    if config.capacity:
        assert choice.name in {"native", "top-k"}, f"{choice} was not checked"
        return choose_experts(scores, admit_experts(selection, config.capacity, config.capacity_window), config)
    known = tokens or RoutedTokens(block_length=len(logits))
    if known.phase is not Phase.DENOISE and choice.prefill == "native":
        choice = NATIVE
    if choice.name == "expert-choice":
        return expert_choice(scores, selection, config, choice, known)
    if choice.name == "team":
        selection = team_selection(selection, config, choice, known)
    elif choice.has_coreset:
        window = choice.window(known.block_length)
        selection = restrict(selection, coreset(selection, config, choice, window, known.residents), window)
    return choose_experts(scores, limit_groups(selection, config), config)


def route_requests(
    weights: Mapping[str, torch.Tensor],
    normed: torch.Tensor,
    lengths: Sequence[int],
    config: RouterConfig,
    choice: RoutingChoice = NATIVE,
    tokens: Sequence[RoutedTokens] | None = None,
) -> Routing:
    """Routing of normed hidden states `[tokens, hidden]` whose requests have `lengths` tokens each.

    `weights` holds the layer's `router` `[experts, hidden]` float32 and, if it has one, `router_bias`. See `route`
    for `choice` and for what is known of each request's `tokens`.
    """
    rows = F.linear(normed.float(), weights["router"]).split(list(lengths))
    bias = weights.get("router_bias")
    known = [None] * len(rows) if tokens is None else tokens
    return join([route(own, bias, config, choice, each) for own, each in zip(rows, known, strict=True)])


def join(routings: Sequence[Routing]) -> Routing:
    """Routings of consecutive tokens, one after the other, as wide as the widest."""
    width = max(routing.expert_ids.shape[1] for routing in routings)
    if all(routing.used is None for routing in routings):
        return Routing(
            torch.cat([routing.expert_ids for routing in routings]),
            torch.cat([routing.weights for routing in routings]),
        )
    wide = [_widened(routing, width) for routing in routings]
    return Routing(*(torch.cat(parts) for parts in zip(*wide, strict=True)))


def _widened(routing: Routing, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expert ids, weights and which are used, filled up with each token's last expert, unused."""
    expert_ids, weights = routing.expert_ids, routing.weights
    used = torch.ones_like(expert_ids, dtype=torch.bool) if routing.used is None else routing.used
    missing = width - expert_ids.shape[1]
    last = expert_ids[:, -1:].expand(-1, missing)
    return torch.cat((expert_ids, last), dim=1), F.pad(weights, (0, missing)), F.pad(used, (0, missing))
