"""Which weights change, how fast, and by which rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from relume.config import require
from relume.train.config import OptimizerConfig, RunConfig, Trained

# The quintic Newton-Schulz step that takes singular values from 0..1 close to 1 (Jordan et al., Muon).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def trained_names(weights: Mapping[str, torch.Tensor], config: OptimizerConfig) -> list[str]:
    """Names of the weights that the optimiser changes; the router's bias is never among them."""
    chosen: dict[Trained, Callable[[str], bool]] = {
        "all": lambda role: role != "router_bias",
        "experts": lambda role: role.startswith("expert_"),
        "experts+router": lambda role: role.startswith("expert_") or role == "router",
        "router": lambda role: role == "router",
    }
    names = [name for name in weights if chosen[config.parameters](name.rsplit(".", 1)[-1])]
    require(bool(names), f"[optimizer] parameters is {config.parameters!r}, and the model has no such weights")
    return names


def learning_rate_scale(step: int, optimizer: OptimizerConfig, run: RunConfig) -> float:
    """Share of the peak learning rate at optimiser step `step` (from 0): linear warm-up, then a cosine."""
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / max(1, run.steps - optimizer.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return optimizer.final_lr_ratio + (1.0 - optimizer.final_lr_ratio) * cosine


class Optimizer:
    """AdamW, or Muon for the inner matrices and AdamW for the rest, over named float32 weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: OptimizerConfig) -> None:
        self.config = config
        self.names = trained_names(weights, config)
        self.weights = [weights[name] for name in self.names]
        inner = {name for name in self.names if config.name == "muon" and _is_inner_matrix(name, weights[name])}
        self._muon = Muon([weights[name] for name in self.names if name in inner])
        rest = [weights[name] for name in self.names if name not in inner]
        groups = [
            {"params": [weight for weight in rest if weight.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [weight for weight in rest if weight.dim() == 1], "weight_decay": 0.0},
        ]
        groups = [group | {"betas": config.betas} for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=config.lr, fused=True) if groups else None

    def step(self, scale: float) -> float:
        """Clip the gradients, apply them with `scale` times the peak rate, drop them; returns their norm."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            return norm
        if 0 < self.config.clip_norm < norm:
            torch._foreach_mul_(gradients, self.config.clip_norm / norm)
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = scale * self.config.lr
            self._adamw.step()
        self._muon.step(scale * self.config.muon_lr, self.config.weight_decay)
        for weight in self.weights:
            weight.grad = None
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "adamw": None if self._adamw is None else self._adamw.state_dict(),
            "muon": self._muon.momenta,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`'s content, with the configuration's own rates, decay and betas."""
        if self._adamw is not None:
            own_values = [
                {key: group[key] for key in ("weight_decay", "betas")} for group in self._adamw.param_groups
            ]
            self._adamw.load_state_dict(state["adamw"])
            for group, own in zip(self._adamw.param_groups, own_values, strict=True):
                group.update(own)
        for momentum, saved in zip(self._muon.momenta, state["muon"], strict=True):
            momentum.copy_(saved)


class Muon:
    """Momentum whose every matrix is made orthogonal before it is applied.

    Stacked weights `[experts, a, b]` are as many matrices. The step has the size that keeps the root mean
    square of an update the same for all shapes.
    """

    def __init__(self, weights: list[torch.Tensor], momentum: float = 0.95) -> None:
        self._weights = weights
        self._momentum = momentum
        self.momenta = [torch.zeros_like(weight, requires_grad=False) for weight in weights]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """Apply the gradients."""
        for weight, momentum in zip(self._weights, self.momenta, strict=True):
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 1.0 - self._momentum)
            update = orthogonalise(weight.grad.lerp(momentum, self._momentum))
            weight.mul_(1.0 - lr * weight_decay)
            rows, columns = weight.shape[-2:]
            weight.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """The nearly orthogonal matrices next to `[..., a, b]`, by Newton-Schulz iterations in bfloat16."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    result: torch.Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


def _is_inner_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() > 1 and name.startswith("layers.") and not name.endswith(".router")
