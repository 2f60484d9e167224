"""Weights to start from: random ones, or a checkpoint's."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from relume.checkpoint.folder import Checkpoint, open_checkpoint
from relume.checkpoint.tensor_file import TensorReader
from relume.config import ModelConfig
from relume.model.families import identify
from relume.model.family import Family


def random_weights(family: Family, config: ModelConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights by relume's names, float32. Outputs of residual branches are scaled down with the depth."""
    depth = 1.0 / math.sqrt(2.0 * config.num_layers)
    weights: dict[str, torch.Tensor] = {}
    shapes = {name: _joined(parts) for name, parts in family.weights(config).items()} | expert_shapes(config)
    for name, shape in shapes.items():
        role = name.rsplit(".", 1)[-1]
        if role.endswith("norm"):
            weights[name] = torch.ones(shape)
        elif role == "router_bias":
            weights[name] = torch.zeros(shape)
        else:
            scale = 1.0 if role == "embeddings" else shape[-1] ** -0.5
            scale *= depth if role in {"attention_out", "dense_down", "shared_down", "expert_down"} else 1.0
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Shapes of the stacked experts, by relume's names."""
    experts, size, hidden = config.router.num_experts, config.expert_size, config.hidden_size
    return {
        f"layers.{layer}.{role}": shape
        for layer in config.moe_layers
        for role, shape in (
            ("expert_gate_up", (experts, 2 * size, hidden)),
            ("expert_down", (experts, hidden, size)),
        )
    }


def read_weights(folder: Path) -> tuple[Checkpoint, Family, ModelConfig, dict[str, torch.Tensor]]:
    """A checkpoint's weights by relume's names, float32. Raises `RelumeError` as `open_checkpoint` does."""
    checkpoint = open_checkpoint(folder)
    family, config = identify(checkpoint)
    reader = TensorReader()
    weights = {}
    try:
        for name, parts in family.weights(config).items():
            weights[name] = weight = torch.empty(_joined(parts))
            for (official, shape), out in zip(parts, weight.split([part[1][0] for part in parts]), strict=True):
                assert out.shape == shape
                reader.read(checkpoint.tensors[official], out)
        for name, shape in expert_shapes(config).items():
            weights[name] = torch.empty(shape)
        for layer in config.moe_layers:
            prefix = family.experts_prefix.format(layer=layer)
            gate_up, down = weights[f"layers.{layer}.expert_gate_up"], weights[f"layers.{layer}.expert_down"]
            for expert in range(config.router.num_experts):
                targets = (*gate_up[expert].chunk(2), down[expert])
                for entry, out in zip(checkpoint.expert(prefix, expert), targets, strict=True):
                    reader.read(entry, out)
    finally:
        reader.close()
    return checkpoint, family, config, weights


def _joined(parts: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[int, ...]:
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])
