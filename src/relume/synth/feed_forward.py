"""Dense layers, shared experts and routed experts of a size that the residual stream sets."""

from __future__ import annotations

import math

import torch

from relume.config import ModelConfig
from relume.experts.kernels import swiglu
from relume.synth.probe import Probe, rms
from relume.synth.random_weights import WeightSource

_SHARE = 0.1  # of a feed-forward's output, relative to the residual stream
_SWIGLU_GAIN = 0.596  # root mean square of silu(g) u for independent standard normal g and u


def share_of(config: ModelConfig) -> float:
    """Size of a feed-forward's output relative to the residual stream; many layers contribute less each."""
    return _SHARE * min(1.0, math.sqrt(4 / config.num_layers))


def dense_swiglu(
    config: ModelConfig, source: WeightSource, probe: Probe, name: str, normed: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A feed-forward that all tokens use.

    Returns:
        Gate-up `[2 size, hidden]`, down `[hidden, size]`, and their output for `normed` `[tokens, hidden]`.
    """
    hidden = config.hidden_size
    gate_up = source.linear(f"{name}_gate_up", 2 * size, hidden)
    down = source.normal(f"{name}_down", (hidden, size), size**-0.5, torch.float32)
    raw = rms(swiglu(normed, gate_up, down.to(source.dtype)))
    fitted = (down * (share_of(config) * probe.scale() / max(1e-9, raw))).to(source.dtype)
    return gate_up, fitted, swiglu(normed, gate_up, fitted)


class LayerExperts:
    """Draws the routed experts of one layer, each projection by itself and always the same.

    Args:
        scale: root mean square of the residual stream at this layer.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, layer: int, scale: float) -> None:
        router = config.router
        weight_sum = router.scale if router.normalise else 1.0
        combined = _SWIGLU_GAIN * weight_sum / router.top_k**0.5
        self._source = source
        self._prefix = f"layers.{layer}.experts"
        self._shapes = {
            "gate_proj": (config.expert_size, config.hidden_size, 1.0),
            "up_proj": (config.expert_size, config.hidden_size, 1.0),
            "down_proj": (config.hidden_size, config.expert_size, share_of(config) * scale / combined),
        }

    def draw(self, expert: int, projection: str) -> torch.Tensor:
        """`gate_proj` or `up_proj` `[size, hidden]`, or `down_proj` `[hidden, size]`."""
        rows, columns, gain = self._shapes[projection]
        return self._source.linear(f"{self._prefix}.{expert}.{projection}", rows, columns, gain)
