"""One owner of every byte: what lies where, and how many experts may be resident. Numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass

from relume.config import ModelConfig, require
from relume.core import RelumeError
from relume.engine.footprint import CUDA_RUNTIME_BYTES, Workload, device_parts, host_parts, margin_bytes
from relume.engine.memory_plan import MemoryPlan, mebibytes
from relume.experts.build import expert_shape
from relume.experts.formats import SLOT_ALIGNMENT
from relume.model.sizes import ModelSizes
from relume.strategy.budget import ExpertMemory, uniform
from relume.strategy.use import ExpertShape

#: Slots for experts on their way in, which are not resident yet.
TRANSIT_SLOTS = 8


@dataclass(frozen=True)
class Planner:
    """Plans one model's memory.

    Attributes:
        config, sizes: of the model.
        work: what is to run.
        transit_slots: experts on their way in at once.
        host_tier_bytes: of RAM that holds experts besides those in slots, rounded down to whole ones.
        strategy_bytes: of the tables that the strategy keeps, in RAM.
    """

    config: ModelConfig
    sizes: ModelSizes
    work: Workload
    transit_slots: int = TRANSIT_SLOTS
    host_tier_bytes: int = 0
    strategy_bytes: int = 0

    def __post_init__(self) -> None:
        require(self.transit_slots >= 0, f"transit_slots is {self.transit_slots}: it must be at least 0")
        require(self.host_tier_bytes >= 0, f"host_tier_bytes is {self.host_tier_bytes}: it must be at least 0")
        require(
            self.work.context <= self.config.max_context,
            f"a context of {self.work.context} positions: the model has {self.config.max_context}",
        )
        require(len(self.config.moe_layers) > 0, "the model has no layers with experts: there is nothing to plan")

    @property
    def shape(self) -> ExpertShape:
        """The model's experts."""
        return expert_shape(self.config)

    @property
    def slot_bytes(self) -> int:
        """One expert as it is computed with, in a slot."""
        num_bytes = self.work.slot_bytes or self.config.parameters_per_expert * self.work.compute_itemsize
        return -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def make_plan(
        self, memory_limit_bytes: int, experts: ExpertMemory | None = None, host_limit_bytes: int | None = None
    ) -> MemoryPlan:
        """Split the memory.

        Args:
            memory_limit_bytes: RAM, or on a GPU the device's memory.
            experts: resident experts; by default as many as fit.
            host_limit_bytes: RAM beside a GPU, if it is known.

        Raises:
            RelumeError: too little; names the smallest memory that works, and the most experts that fit.
        """
        experts = experts or ExpertMemory()
        most = self.most_slots(memory_limit_bytes)
        slots = most if experts.is_auto else experts.total_slots(self.shape, self.slot_bytes)
        if slots > most or slots < self.least_slots:
            raise RelumeError(self._too_small(memory_limit_bytes, experts, most))
        plan = self._plan(slots, memory_limit_bytes)
        needed = sum(plan.host_bytes.values())
        require(
            host_limit_bytes is None or needed <= host_limit_bytes,
            f"{mebibytes(needed)} of RAM are needed beside the GPU and {mebibytes(host_limit_bytes or 0)} may be "
            "used: give the host tier less, or this process more",
        )
        return plan

    @property
    def least_slots(self) -> int:
        """Slots of all layers below which one token's experts would not fit."""
        return self.shape.num_layers

    def most_slots(self, memory_limit_bytes: int) -> int:
        """Slots of all layers that fit; negative if less than nothing is left."""
        fit = (memory_limit_bytes - sum(self._outside().values())) // self.slot_bytes
        return self._everything if fit >= self._everything else fit - self.transit_slots

    def smallest_memory(self, experts: ExpertMemory | None = None) -> int:
        """The smallest limit, in bytes, with which `make_plan` succeeds."""
        slots = self.least_slots
        if experts is not None and not experts.is_auto:
            slots = experts.total_slots(self.shape, self.slot_bytes)
        return sum(self._outside().values()) + (slots + self._transit(slots)) * self.slot_bytes

    @property
    def host_experts(self) -> int:
        """Experts that are held in RAM besides those in slots."""
        return min(self.host_tier_bytes // self.slot_bytes, self._everything)

    @property
    def _everything(self) -> int:
        return self.shape.num_layers * self.shape.num_experts

    def _transit(self, slots: int) -> int:
        # An expert that is resident is never on its way.
        return min(self.transit_slots, self._everything - slots)

    def _outside(self) -> dict[str, int]:
        """Parts that do not depend on the number of slots, the margin included."""
        parts = device_parts(self.config, self.sizes, self.work)
        parts |= {"runtime": CUDA_RUNTIME_BYTES} if self.work.on_gpu else self._in_ram()
        return parts | {"safety_margin": margin_bytes(parts)}

    def _in_ram(self) -> dict[str, int]:
        """Parts that lie in RAM wherever the model runs."""
        more = {"host_experts": self.host_experts * self.slot_bytes, "strategy": self.strategy_bytes}
        return host_parts(self.config, self.work) | {name: count for name, count in more.items() if count}

    def _plan(self, slots: int, memory_limit_bytes: int) -> MemoryPlan:
        host: dict[str, int] = {}
        if self.work.on_gpu:
            host = self._in_ram()
            host |= {"safety_margin": margin_bytes(host)}
        outside = self._outside()
        margin = outside.pop("safety_margin")
        parts = outside | {
            "expert_slots": slots * self.slot_bytes,
            "transit_slots": self._transit(slots) * self.slot_bytes,
            "safety_margin": margin,
        }
        return MemoryPlan(
            bytes=parts,
            host_bytes=host,
            memory_limit_bytes=memory_limit_bytes,
            slots_per_layer=tuple(uniform(slots, self.shape)),
            bytes_per_slot=self.slot_bytes,
            resident_share=slots / self._everything,
            host_experts=self.host_experts,
        )

    def _too_small(self, limit: int, experts: ExpertMemory, most: int) -> str:
        needed = self.smallest_memory(experts)
        text = f"{mebibytes(limit, up=False)} of memory are too little: "
        if experts.is_auto:
            return (
                f"{text}with {self.work.context} positions and a batch of {self.work.batch} this model needs at "
                f"least --memory {mebibytes(needed)}, which holds --expert-memory 1"
            )
        text += f"that many experts need at least --memory {mebibytes(needed)}"
        if most >= self.least_slots:
            return f"{text}; with this memory, give at most --expert-memory {most // self.shape.num_layers}"
        least = self.smallest_memory()
        return f"{text}; the fewest, --expert-memory 1, need --memory {mebibytes(least)}"
