"""Norm, rotary embedding and attention of one segment."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig
from relume.machine.workers import Workers


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension in float32, cast to the dtype of `x`, multiply by `weight`."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary_table(
    config: ModelConfig, start: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine `[n, rotary_dim]` of the positions `start..`, computed in float32, cast to `dtype`."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    frequencies = 1.0 / config.rope_theta**exponents
    positions = torch.arange(start, start + num_tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate the first `rotary_dim` of the last dimension of `[heads, n, head_dim]`, half against half."""
    cos, sin = table
    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


def block_causal_mask(start: int, num_tokens: int, block_length: int, device: torch.device) -> torch.Tensor | None:
    """`[n, start + n]` bool: which positions `start..start+n` may see which of `0..start+n`.

    A position sees its own block and all earlier ones. `None` if the tokens lie in one block, which sees
    everything.
    """
    if num_tokens <= block_length - start % block_length:
        return None
    positions = torch.arange(start + num_tokens, device=device) // block_length
    return positions[start:].unsqueeze(1) >= positions


#: Least rows of a weight in one of the products that `panel_linear` makes.
PANEL_ROWS = 512


def panel_linear(x: torch.Tensor, weight: torch.Tensor, workers: Workers) -> torch.Tensor:
    """`x W^T` of `[n, H]` and `[rows, H]`, the same bits for any number of workers.

    The weight's rows are divided in panels that depend on its shape alone, each multiplied by one thread.
    """
    num_rows = len(weight)
    size = max(PANEL_ROWS, -(-num_rows // 16))
    if num_rows <= size:
        return F.linear(x, weight)
    out = x.new_empty(len(x), num_rows)

    def multiply(begin: int) -> None:
        out[:, begin : begin + size] = F.linear(x, weight[begin : begin + size])

    workers.run([partial(multiply, begin) for begin in range(0, num_rows, size)])
    return out


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scaled dot-product attention of one segment with grouped queries.

    Args:
        query: `[heads, n, head_dim]`.
        key, value: `[kv_heads, length, head_dim]`; query head h uses key head h // (heads / kv_heads).
        mask: `[n, length]` bool, true where a query may look, or `None` for everywhere.

    Returns:
        `[n, heads * head_dim]`.
    """
    heads, num_tokens, head_dim = query.shape
    kv_heads = key.shape[0]
    # The queries of one key head are laid end to end, so that keys and values are never repeated.
    grouped = query.reshape(1, kv_heads, -1, head_dim)
    if mask is not None:
        mask = mask.repeat(heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(grouped, key.unsqueeze(0), value.unsqueeze(0), attn_mask=mask)
    return out.view(heads, num_tokens, head_dim).transpose(0, 1).reshape(num_tokens, -1)
