"""Routers whose blocks use as many distinct experts as those of trained models."""

from __future__ import annotations

import math

import torch

from relume.config import ModelConfig, RouterConfig
from relume.synth.measure import mean_active
from relume.synth.probe import Probe
from relume.synth.random_weights import WeightSource

#: Distinct experts of 256 that LLaDA2.0-mini uses in a 32-token block (dMoE, tables 1 and 2).
TRAINED_ACTIVE = 70.0
#: The same by block length (dMoE, table 4, mean of four tasks), divided by what choosing at random would use.
_TRAINED_SHARE = {1: 1.0, 8: 31.3 / 57.4, 16: 48.5 / 102.0, 24: 60.7 / 136.5, 32: TRAINED_ACTIVE / 163.3}
_LOGIT_SPREAD = {"sigmoid": 1.0, "softmax": 1.5}
_BIAS_SPREAD = 0.01
_STEPS = 12
_LARGEST_EMPHASIS = 16.0


def random_active(num_experts: int, top_k: int, block_length: int) -> float:
    """Distinct experts in a block whose tokens choose at random: `E (1 - (1 - k/E)^B)`."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** block_length)


def trained_share(block_length: int) -> float:
    """Active experts of a trained model over `random_active`: measured lengths, linear in their logarithm."""
    known = sorted(_TRAINED_SHARE)
    right = next((length for length in known[1:] if length >= block_length), known[-1])
    left = known[known.index(right) - 1]
    part = math.log(block_length / left) / math.log(right / left)
    share = _TRAINED_SHARE[left] + part * (_TRAINED_SHARE[right] - _TRAINED_SHARE[left])
    return max(share, _TRAINED_SHARE[32] / 2)  # far beyond what was measured


def target_active(router: RouterConfig, block_length: int) -> float:
    """Distinct experts of a block that the router is fitted to; a capacity may then admit fewer."""
    at_random = random_active(router.num_experts, router.top_k, block_length)
    return max(router.top_k, trained_share(block_length) * at_random)


def bias_dtype(router: RouterConfig, dtype: torch.dtype) -> torch.dtype:
    """As published: float32 since LLaDA2.1 (here: with a capacity), before that the weights' type."""
    return torch.float32 if router.capacity else dtype


def shape_router(
    config: ModelConfig, source: WeightSource, probe: Probe, layer: int, normed: torch.Tensor, common: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw a layer's router and fit it to the sample canvases.

    The one scalar that is solved for is how much the router reads what all tokens share: more of it makes
    tokens agree. What a masked position has from being masked is read as it is.

    Args:
        config: the model's shape.
        source: of random numbers.
        probe: the sample canvases at this layer.
        layer: index of the layer.
        normed: `[tokens, hidden]` what the router reads.
        common: `[hidden]` unit vector that all embeddings share.

    Returns:
        `[experts, hidden]`, and `[experts]` if the model has a bias.
    """
    router = config.router
    x = normed.float()
    drawn = source.linear(f"layers.{layer}.router", router.num_experts, config.hidden_size).float()
    bias = None
    if router.has_bias:
        kept = bias_dtype(router, source.dtype)
        bias = source.normal(f"layers.{layer}.router_bias", (router.num_experts,), _BIAS_SPREAD, kept)

    def emphasise(emphasis: float) -> torch.Tensor:
        weight = drawn + (emphasis - 1.0) * torch.outer(drawn @ common, common)
        spread = float((x @ weight.T).std())
        return (weight * (_LOGIT_SPREAD[router.score_function] / spread)).to(source.dtype)

    target = target_active(router, config.block_length)
    low, high = 0.0, _LARGEST_EMPHASIS
    for step in range(_STEPS):
        emphasis = 1.0 if step == 0 else (low + high) / 2.0
        expert_ids = probe.route(normed, emphasise(emphasis), bias, free=True).expert_ids
        if mean_active(probe.snapshots(expert_ids), router.num_experts) > target:
            low = emphasis
        else:
            high = emphasis
    return emphasise(high), bias
