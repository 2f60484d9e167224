"""From a training's weights to a checkpoint folder in the official layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from relume.checkpoint.folder import PROJECTIONS
from relume.checkpoint.writer import CheckpointWriter, TensorSpec
from relume.config import ModelConfig
from relume.model.family import Family
from relume.routing.choice import NATIVE, RoutingChoice


def export_checkpoint(
    out: Path,
    family: Family,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    config_json: Mapping[str, Any],
    files: Mapping[str, str | Mapping[str, Any]],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `out`, replacing a checkpoint that an earlier export left there.

    Args:
        out: the folder; it changes only when the new one is complete.
        family, config: what the model is.
        weights: by relume's names, the experts stacked.
        config_json: content of config.json; its dtype is set to `dtype`.
        files: tokenizer files and the like.
        dtype: of all tensors but the router's bias, which stays float32.

    Raises:
        RelumeError: the disk is full or fails.
    """
    tensors = dict(official_tensors(family, config, weights, dtype))
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    restore_export(out)
    fresh, old = _siblings(out)
    values = dict(config_json) | {"dtype": str(dtype).removeprefix("torch.")}
    values.pop("torch_dtype", None)
    with CheckpointWriter(fresh, specs, values, files) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def routing_keys(config_json: Mapping[str, Any], routing: RoutingChoice) -> dict[str, Any]:
    """A config.json that names the routing that a model was trained with, instead of any that it named.

    `routing` is relume's text; readers of published dMoE models know `core_threshold`, its p (arXiv 2605.30876).
    """
    values = {key: value for key, value in config_json.items() if key not in {"routing", "core_threshold"}}
    if routing != NATIVE:
        values["routing"] = str(routing)
    if routing.p is not None:
        values["core_threshold"] = routing.p
    return values


def restore_export(out: Path) -> None:
    """Put right what an export that was killed left: the old checkpoint under its name, nothing beside it."""
    fresh, old = _siblings(out)
    if old.exists() and not out.exists():
        old.rename(out)
    for leftover in (fresh, old, *out.parent.glob(f".{fresh.name}.partial-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def _siblings(out: Path) -> tuple[Path, Path]:
    return out.with_name(f"{out.name}.new"), out.with_name(f"{out.name}.old")


def official_tensors(
    family: Family, config: ModelConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors under their official names, experts one by one."""
    for name, parts in family.weights(config).items():
        kept = torch.float32 if name.endswith(".router_bias") else dtype
        pieces = weights[name].detach().cpu().split([shape[0] for _, shape in parts])
        for (official, _), piece in zip(parts, pieces, strict=True):
            yield official, piece.to(kept).clone()
    for layer in config.moe_layers:
        prefix = family.experts_prefix.format(layer=layer)
        gate_up = weights[f"layers.{layer}.expert_gate_up"].detach().cpu()
        down = weights[f"layers.{layer}.expert_down"].detach().cpu()
        for expert in range(config.router.num_experts):
            matrices = (*gate_up[expert].chunk(2), down[expert])
            for projection, matrix in zip(PROJECTIONS, matrices, strict=True):
                yield f"{prefix}.{expert}.{projection}.weight", matrix.to(dtype).clone()
