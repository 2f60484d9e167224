"""What a model weighs, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relume.config import ModelConfig
from relume.model.family import Family

#: Parts in the order in which they are printed, and the weights that belong to each.
_PARTS = {
    "embeddings": ("embeddings", "lm_head"),
    "attention": ("qkv", "attention_out"),
    "dense_layers": ("dense_gate_up", "dense_down"),
    "norms": ("attention_norm", "query_norm", "key_norm", "mlp_norm", "final_norm"),
    "routers": ("router", "router_bias"),
    "shared_experts": ("shared_gate_up", "shared_down"),
}


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts.

    Attributes:
        parts: of everything but the routed experts, by part.
        per_expert: of one routed expert.
        experts: routed experts in all layers.
        num_tensors: official tensors, experts one by one.
    """

    parts: dict[str, int]
    per_expert: int
    experts: int
    num_tensors: int

    @property
    def outside_experts(self) -> int:
        """Parameters that every forward needs."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """All parameters."""
        return self.outside_experts + self.per_expert * self.experts


def model_sizes(family: Family, config: ModelConfig) -> ModelSizes:
    """Count parameters as the official layout stores them."""
    part_of = {weight: part for part, weights in _PARTS.items() for weight in weights}
    counts = dict.fromkeys(_PARTS, 0)
    num_tensors = 0
    for name, parts in family.weights(config).items():
        num_tensors += len(parts)
        counts[part_of[name.rsplit(".", 1)[-1]]] += sum(math.prod(shape) for _, shape in parts)
    experts = len(config.moe_layers) * config.router.num_experts
    return ModelSizes(counts, config.parameters_per_expert, experts, num_tensors + 3 * experts)
