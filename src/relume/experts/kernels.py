"""The arithmetic of one expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """`(silu(x Wg) * (x Wu)) Wd` for tokens `[n, H]`, gate-up `[2I, H]`, down `[H, I]`; returns `[n, H]`."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
