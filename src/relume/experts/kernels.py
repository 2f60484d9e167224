"""The arithmetic of one expert, and of joining what several give for a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor], torch.Tensor]


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, linear: Linear = F.linear) -> torch.Tensor:
    """`(silu(x Wg) * (x Wu)) Wd` for tokens `[n, H]`, gate-up `[2I, H]`, down `[H, I]`; returns `[n, H]`."""
    return swiglu_of(x, lambda rows: linear(rows, gate_up), lambda rows: linear(rows, down))


def swiglu_of(x: torch.Tensor, gate_up: Product, down: Product) -> torch.Tensor:
    """`swiglu` of weights in any form, given what multiplies rows by them."""
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(F.silu(gate) * up)


def combine(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's expert outputs, `[n, k, H]` and `[n, k]` to `[n, H]`; changes `outputs`.

    One product and one sum at a time, in routing order: each is exactly rounded, so that neither vector width
    nor the number of tokens changes a bit.
    """
    outputs.mul_(weights.unsqueeze(-1))
    total = outputs[:, 0]
    for choice in range(1, outputs.shape[1]):
        total = total + outputs[:, choice]
    return total
