"""From a router's scores to the experts of each token: pure functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import RouterConfig
from relume.core import Routing
from relume.routing.block_capacity import admit_experts
from relume.routing.token_choice import choose_experts, keep_groups, score


def route(logits: torch.Tensor, bias: torch.Tensor | None, config: RouterConfig) -> Routing:
    """The model's own routing for consecutive tokens of one request.

    Args:
        logits: `[tokens, experts]` float32. With an expert capacity, the first token must lie on a border of
            the capacity window.
        bias: `[experts]` float32, added for selection only.
        config: the layer's router.
    """
    scores = score(logits, config)
    selection = scores if bias is None else scores + bias
    if config.capacity:
        selection = admit_experts(selection, config.capacity, config.capacity_window)
    elif config.num_groups > 1:
        selection = keep_groups(selection, config.num_groups, config.kept_groups)
    return choose_experts(scores, selection, config)


def route_requests(
    weights: Mapping[str, torch.Tensor], normed: torch.Tensor, lengths: Sequence[int], config: RouterConfig
) -> Routing:
    """Routing of normed hidden states `[tokens, hidden]` whose requests have `lengths` tokens each.

    `weights` holds the layer's `router` `[experts, hidden]` float32 and, if it has one, `router_bias`.
    """
    logits = F.linear(normed.float(), weights["router"])
    return join([route(rows, weights.get("router_bias"), config) for rows in logits.split(list(lengths))])


def join(routings: Sequence[Routing]) -> Routing:
    """Routings of consecutive tokens, one after the other."""
    return Routing(
        torch.cat([routing.expert_ids for routing in routings]),
        torch.cat([routing.weights for routing in routings]),
    )
