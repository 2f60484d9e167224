"""The outcome of planning: a place for every byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Where every byte goes.

    Attributes:
        bytes: by part, of the memory that `memory_limit_bytes` limits: RAM, or on a GPU the device's.
        host_bytes: by part, of RAM beside a GPU; empty without one.
        memory_limit_bytes: what `bytes` has to fit in.
        slots_per_layer: resident experts of each MoE layer.
        bytes_per_slot: one expert as it is computed with.
        resident_share: of all experts.
        host_experts: experts that are held in RAM besides.
    """

    bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    memory_limit_bytes: int
    slots_per_layer: tuple[int, ...]
    bytes_per_slot: int
    resident_share: float
    host_experts: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of `bytes`."""
        return sum(self.bytes.values())

    @property
    def expert_memory_bytes(self) -> int:
        """Memory that holds resident experts."""
        return self.bytes["expert_slots"]


def mebibytes(num_bytes: int, up: bool = True) -> str:
    """`1500MiB`, as options are written: rounded up, so that what is named suffices, or down."""
    return f"{(num_bytes + (MIB - 1) * up) // MIB}MiB"
