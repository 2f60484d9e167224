"""LLaDA2.2: a window of tokens admits a bounded number of experts, and each token chooses among those."""

from __future__ import annotations

import torch

from relume.routing.token_choice import top_indices


def admit_experts(selection: torch.Tensor, capacity: int, window: int) -> torch.Tensor:
    """Set `selection` to -inf outside each window's admitted experts.

    Args:
        selection: `[tokens, experts]` biased scores of consecutive tokens of one request, the first on a
            window border; the last window may be partial.
        capacity: experts admitted per window: those with the largest score of any token in it, ties to the
            lower id.
        window: tokens per window.
    """
    admitted = []
    for tokens in selection.split(window):
        dropped = torch.ones(tokens.shape[-1], dtype=torch.bool, device=tokens.device)
        dropped[top_indices(tokens.amax(dim=0), capacity)] = False
        admitted.append(tokens.masked_fill(dropped, float("-inf")))
    return torch.cat(admitted)
