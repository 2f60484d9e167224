"""Host memory between disk and device: a copy of some experts, ready for a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from relume.checkpoint.files import Pause
from relume.experts.formats import ExpertFormat, Views
from relume.experts.source import ExpertSource
from relume.machine.memory import PinError, allocate_bytes

#: Pins memory that is filled; raises `PinError`.
Pin = Callable[[torch.Tensor], None]


class HostExperts(ExpertSource):
    """Holds chosen experts as slots do; the others come from below.

    Args:
        below: where experts come from.
        expert_format: of the slots.
        chosen: (layer, expert) pairs to hold.
        pin: makes the memory fit for fast transfers, or `None` where there is no device to transfer to.
    """

    def __init__(
        self, below: ExpertSource, expert_format: ExpertFormat, chosen: Iterable[tuple[int, int]], pin: Pin | None
    ) -> None:
        super().__init__()
        self._below = below
        self.fallbacks = below.fallbacks
        self._pin = pin
        keys = list(chosen)
        self._memory = allocate_bytes(len(keys) * expert_format.slot_bytes, torch.device("cpu"))
        slots = self._memory.view(len(keys), expert_format.slot_bytes)
        self._held: dict[tuple[int, int], Views] = {
            key: expert_format.views(slot) for key, slot in zip(keys, slots, strict=True)
        }

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Read the chosen experts, one at a time, then pin them; `progress` is told of bytes read.

        Raises as `ExpertSource.read`.
        """
        for (layer, expert), views in sorted(self._held.items(), key=lambda item: item[0]):
            progress(self._below.read(layer, expert, views))
        if self._pin is not None and self._held:
            try:
                self._pin(self._memory)
            except PinError as error:
                self.fallbacks.append(
                    f"experts in host memory are not pinned, so their transfers are slower: {error}"
                )

    def read(self, layer: int, expert: int, views: Views, pause: Pause | None = None) -> int:
        """See `ExpertSource.read`; what is held takes no bytes from disk."""
        held = self._held.get((layer, expert))
        if held is None:
            return self._below.read(layer, expert, views, pause)
        for part, out in zip(held, views, strict=True):
            out.copy_(part)
        return 0

    def held(self, layer: int, expert: int) -> Views | None:
        """See `ExpertSource.held`."""
        return self._held.get((layer, expert))

    def place(self, layer: int, expert: int) -> str:
        """See `ExpertSource.place`."""
        return self._below.place(layer, expert)

    def close(self) -> None:
        """Close what is below."""
        self._below.close()


def spread(num_held: int, num_layers: int, num_experts: int) -> list[tuple[int, int]]:
    """As many (layer, expert) pairs as may be held, the same number of each layer."""
    everything = [(layer, expert) for expert in range(num_experts) for layer in range(num_layers)]
    return everything[:num_held]
