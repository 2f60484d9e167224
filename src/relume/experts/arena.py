"""Fixed slots of device memory, one expert each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from relume.experts.formats import ExpertFormat, Views
from relume.machine.memory import allocate_bytes


@dataclass(frozen=True)
class Lease:
    """The right to a slot until it is given back; `generation` tells its users apart."""

    slot: int
    generation: int


class Arena:
    """Slots that are allocated once and never move.

    A slot's generation grows whenever it is handed out for writing. Whoever computes with a lease whose
    generation is no longer the slot's would read another expert: `views` refuses that.

    Args:
        num_slots: of the arena.
        expert_format: of the slots.
        device: whose memory it is.
        freed: is told of each slot that is given back, and of its tensors.
    """

    def __init__(
        self,
        num_slots: int,
        expert_format: ExpertFormat,
        device: torch.device,
        freed: Callable[[int, Views], object] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.format = expert_format
        self.memory = allocate_bytes(num_slots * expert_format.slot_bytes, device)
        self._views = [expert_format.views(slot) for slot in self.memory.view(num_slots, -1)]
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._freed = freed

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def take(self) -> Lease:
        """A free slot, to be written. There must be one."""
        slot = self._free.pop()
        self._generations[slot] += 1
        return Lease(slot, self._generations[slot])

    def give_back(self, lease: Lease) -> None:
        """The slot is free again; the lease ends."""
        self.check(lease)
        if self._freed is not None:
            self._freed(lease.slot, self._views[lease.slot])
        self._generations[lease.slot] += 1
        self._free.append(lease.slot)

    def reclaim(self, held: Iterable[Lease]) -> None:
        """Free every slot but those of `held`; all other leases end."""
        kept = {lease.slot for lease in held}
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in kept]
        for slot in self._free:
            self._generations[slot] += 1

    def check_partition(self, held: Iterable[Lease]) -> None:
        """Fail unless every slot is either free or that of exactly one of `held`."""
        slots = list(self._free)
        for lease in held:
            self.check(lease)
            slots.append(lease.slot)
        assert sorted(slots) == list(range(self.num_slots)), "slots were lost or handed out twice"

    def views(self, lease: Lease) -> Views:
        """The tensors in a leased slot."""
        self.check(lease)
        return self._views[lease.slot]

    def check(self, lease: Lease) -> None:
        """Fail if the slot has been handed on since."""
        assert self._generations[lease.slot] == lease.generation, f"slot {lease.slot} was handed on while in use"
