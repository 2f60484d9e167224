"""Keys and values of one request, preallocated for its whole canvas."""

from __future__ import annotations

import torch

from relume.config import ModelConfig


class KVCache:
    """K/V of all layers for `capacity` positions.

    Positions before `length` are final. A forward writes the K/V of its tokens behind them; they are
    overwritten by the next forward unless `commit` declares them final.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self.capacity = capacity
        shape = (config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache."""
        return self._values.numel() * self._values.element_size()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put K and V `[kv_heads, n, head_dim]` behind the final positions; return all up to them."""
        end = self.length + key.shape[1]
        assert end <= self.capacity
        keys, values = self._values[layer]
        keys[:, self.length : end] = key
        values[:, self.length : end] = value
        return keys[:, :end], values[:, :end]

    def commit(self, num_tokens: int) -> None:
        """Declare the K/V of the last forward's first `num_tokens` tokens final."""
        assert self.length + num_tokens <= self.capacity
        self.length += num_tokens
