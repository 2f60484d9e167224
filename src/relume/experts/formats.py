"""How an expert lies in a slot, and how it is computed from there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from relume.experts.kernels import swiglu

#: Slots begin at multiples of this, so that a product never depends on which slot an expert got.
SLOT_ALIGNMENT = 64

Views = tuple[torch.Tensor, ...]
#: Shape and type of one tensor in a slot.
Part = tuple[tuple[int, ...], torch.dtype]


class ExpertFormat(ABC):
    """The bytes of one expert in a slot: tensors one after the other.

    Args:
        parts: the tensors.
        alignment: each begins at a multiple of it.

    Attributes:
        name: as in `relume pack --experts`.
        slot_bytes: of one expert, a multiple of `SLOT_ALIGNMENT`.
    """

    name: ClassVar[str]

    def __init__(self, parts: Sequence[Part], alignment: int = SLOT_ALIGNMENT) -> None:
        self._places: list[tuple[int, int, Part]] = []
        end = 0
        for shape, dtype in parts:
            begin = -(-end // alignment) * alignment
            end = begin + math.prod(shape) * dtype.itemsize
            self._places.append((begin, end, (shape, dtype)))
        self.slot_bytes = -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def views(self, slot: torch.Tensor) -> Views:
        """The tensors that lie in a slot of `slot_bytes` uint8."""
        return tuple(slot[begin:end].view(dtype).view(shape) for begin, end, (shape, dtype) in self._places)

    @abstractmethod
    def fill(self, gate_up: torch.Tensor, down: torch.Tensor, views: Views) -> None:
        """Put an expert's weights, `[2I, H]` and `[H, I]`, into a slot's tensors, in this format.

        Raises:
            RelumeError: they cannot be represented.
        """

    @abstractmethod
    def compute(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """The expert's output `[n, H]` for tokens `[n, H]`."""

    def slower_because(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """What makes computing in `dtype` on `device` slower than this format can be; `None` if nothing does."""
        del dtype, device
        return None


class DenseFormat(ExpertFormat):
    """Unquantised: gate and up stacked `[2I, H]`, then down `[H, I]`."""

    name = "dense"

    def __init__(self, hidden: int, size: int, dtype: torch.dtype) -> None:
        super().__init__((((2 * size, hidden), dtype), ((hidden, size), dtype)), dtype.itemsize)
        self._size, self.dtype = size, dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the weights' rows: H and I."""
        return tuple(shape[-1] for _, _, (shape, _) in self._places)

    def stacks(self, memory: torch.Tensor, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of neighbouring slots in place: `[slots, 2I, H]` and `[slots, H, I]`."""
        values = memory.view(self.dtype)
        stride = self.slot_bytes // self.dtype.itemsize
        gate_up, down = (
            values[begin // self.dtype.itemsize :].as_strided((num_slots, *shape), (stride, shape[1], 1))
            if num_slots
            else values.new_empty(0, *shape)
            for begin, _, (shape, _) in self._places
        )
        return gate_up, down

    def parts(self, views: Views) -> Views:
        """Gate `[I, H]`, up `[I, H]` and down `[H, I]`, as checkpoints store them."""
        gate_up, down = views
        return gate_up[: self._size], gate_up[self._size :], down

    def fill(self, gate_up: torch.Tensor, down: torch.Tensor, views: Views) -> None:
        """See `ExpertFormat.fill`."""
        for weight, view in zip((gate_up, down), views, strict=True):
            view.copy_(weight)

    def compute(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """See `ExpertFormat.compute`."""
        gate_up, down = views
        return swiglu(x, gate_up, down)
