"""Experts held in memory, all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from relume.checkpoint.folder import Checkpoint
from relume.checkpoint.tensor_file import TensorReader
from relume.config import ModelConfig


class ResidentExperts:
    """Every expert of every MoE layer, one contiguous slot each.

    A slot holds gate and up stacked `[2I, H]`, then down `[H, I]`: one read order, two matrix products.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._first_layer = config.num_dense_layers
        self._hidden, self._size = config.hidden_size, config.expert_size
        self._slots = [
            torch.empty(config.router.num_experts, config.parameters_per_expert, dtype=dtype, device=device)
            for _ in config.moe_layers
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.numel() * slots.element_size() for slots in self._slots)

    def weights(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate-up `[2I, H]` and down `[H, I]` of one expert, as views."""
        slot = self._slots[layer - self._first_layer][expert]
        gate_up, down = slot.split((2 * self._size * self._hidden, self._size * self._hidden))
        return gate_up.view(2 * self._size, self._hidden), down.view(self._hidden, self._size)

    def load(
        self,
        layer: int,
        prefix: str,
        checkpoint: Checkpoint,
        reader: TensorReader,
        progress: Callable[[int], None],
    ) -> None:
        """Read one layer's experts; `prefix` is their official name up to `.experts`."""
        for expert in range(len(self._slots[layer - self._first_layer])):
            gate_up, down = self.weights(layer, expert)
            gate_entry, up_entry, down_entry = checkpoint.expert(prefix, expert)
            for entry, out in (
                (gate_entry, gate_up[: self._size]),
                (up_entry, gate_up[self._size :]),
                (down_entry, down),
            ):
                reader.read(entry, out)
                progress(entry.num_bytes)
