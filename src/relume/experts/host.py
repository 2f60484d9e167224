"""Host memory between disk and device: a copy of some experts, ready for a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from relume.checkpoint.files import Pause
from relume.experts.formats import ExpertFormat, Views
from relume.experts.source import ExpertSource
from relume.machine.memory import PinError, allocate_bytes, pin, unpin

#: Pins memory that is filled; raises `PinError`.
Pin = Callable[[torch.Tensor], None]


def pin_for(device: torch.device) -> Pin | None:
    """What pins memory for transfers to a device; `None` where there are none."""
    return None if device.type == "cpu" else pin


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
        self._slot_bytes = expert_format.slot_bytes
        self._pinned_memory: torch.Tensor | None = None
        self._pinned: set[tuple[int, int]] = set()

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Read the chosen experts, one at a time, then pin them; `progress` is told of bytes read.

        Raises as `ExpertSource.read`.
        """
        for (layer, expert), views in sorted(self._held.items(), key=lambda item: item[0]):
            progress(self._below.read(layer, expert, views))
        if self._pin is not None and self._held:
            self._pin_as_many_as_allowed(self._pin)

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

    def pinned(self, layer: int, expert: int) -> bool:
        """See `ExpertSource.pinned`."""
        return (layer, expert) in self._pinned

    @property
    def holds_any(self) -> bool:
        """See `ExpertSource.holds_any`."""
        return bool(self._held)

    def place(self, layer: int, expert: int) -> str:
        """See `ExpertSource.place`."""
        return self._below.place(layer, expert)

    def close(self) -> None:
        """Unpin the memory and close what is below."""
        self._pinned.clear()
        if self._pinned_memory is not None:
            unpin(self._pinned_memory)
            self._pinned_memory = None
        self._below.close()

    def _pin_as_many_as_allowed(self, pin: Pin) -> None:
        """All of them, or those under the cap; the others stay pageable, which is said."""
        everything = count = len(self._held)
        line = ""
        while count:
            try:
                pin(self._memory[: count * self._slot_bytes])
                break
            except PinError as error:
                count = min(count - 1, error.left_bytes // self._slot_bytes)
                which = f"{everything - count} of {everything} experts" if count else "experts"
                line = f"{which} in host memory are not pinned, so their transfers are slower: {error}"
        if count < everything:
            self.fallbacks.append(line)
        self._pinned_memory = self._memory[: count * self._slot_bytes]
        self._pinned.update(list(self._held)[:count])


def spread(num_held: int, num_layers: int, num_experts: int) -> list[tuple[int, int]]:
    """As many (layer, expert) pairs as may be held, the same number of each layer."""
    everything = [(layer, expert) for expert in range(num_experts) for layer in range(num_layers)]
    return everything[:num_held]
