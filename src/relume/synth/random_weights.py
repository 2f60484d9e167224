"""Seeded random weights; each tensor has its own seed, so that the order of drawing does not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

_CHUNK_ROWS = 8192


class WeightSource:
    """Draws weights by name.

    Args:
        seed: of the whole checkpoint.
        dtype: of the weights.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.seed = seed
        self.dtype = dtype

    def generator(self, name: str) -> torch.Generator:
        """A generator that depends on the seed and the name only."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(
        self, name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal numbers of mean 0, drawn in `dtype` (the checkpoint's by default)."""
        return torch.empty(shape, dtype=dtype or self.dtype).normal_(0.0, std, generator=self.generator(name))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """`[rows, columns]` that maps unit inputs to outputs of standard deviation `gain`."""
        return self.normal(name, (rows, columns), gain / columns**0.5)

    def norm(self, name: str, size: int, spread: float = 0.05) -> torch.Tensor:
        """A norm's weight around 1."""
        return (1.0 + self.normal(name, (size,), spread, torch.float32)).to(self.dtype)

    def row_chunks(self, name: str, rows: int, columns: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A large unit-normal matrix piece by piece: (first row, `[n, columns]`). Each call gives the same."""
        for start in range(0, rows, _CHUNK_ROWS):
            count = min(_CHUNK_ROWS, rows - start)
            yield start, self.normal(f"{name}/{start}", (count, columns), 1.0)
