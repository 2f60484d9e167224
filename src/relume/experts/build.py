"""From a checkpoint and a budget to an expert memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.checkpoint.folder import Checkpoint
from relume.clock.virtual import VirtualClock
from relume.config import ModelConfig
from relume.experts.ahead import Ahead
from relume.experts.arena import Arena
from relume.experts.copies import copy_lane
from relume.experts.formats import DenseFormat
from relume.experts.host import HostExperts, pin_for, spread
from relume.experts.lanes import LaneCosts, MachineLanes
from relume.experts.loader import Loader
from relume.experts.memory import ExpertMemory
from relume.experts.packed import PackedExperts, slot_format
from relume.experts.source import CheckpointExperts, ExpertSource
from relume.machine.hardware import Hardware
from relume.strategy.placement import Parts, Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.use import ExpertShape


@dataclass(frozen=True)
class ExpertSettings:
    """How experts are kept.

    Attributes:
        slots: resident experts of each MoE layer, or one number for a pool that all layers share.
        parts: of the strategy.
        num_transit: further slots, for experts on their way.
        num_ahead: of those, for experts that nothing has asked for yet.
        num_readers: reads in flight.
        direct: read past the page cache, where the file system allows it.
        num_host: experts that are held in host memory too.
        virtual: lanes of a machine that is simulated, instead of this one's.
        hardware: this machine's figures, to predict its lanes with, if there are any.
        link_bandwidth: bytes per second from pinned memory to the GPU, if that was measured.
    """

    slots: tuple[int, ...] | int
    parts: Parts
    num_transit: int
    num_readers: int
    direct: bool
    num_ahead: int = 0
    num_host: int = 0
    virtual: VirtualClock | None = None
    hardware: Hardware | None = None
    link_bandwidth: float | None = None

    @property
    def num_slots(self) -> int:
        """Experts that may be resident, over all layers."""
        return self.slots if isinstance(self.slots, int) else sum(self.slots)

    @property
    def num_preloaded(self) -> int:
        """Experts that are read before the first forward."""
        return self.num_host + self.num_slots * self.parts.retention.preload


def expert_shape(config: ModelConfig) -> ExpertShape:
    """A model's experts as strategies see them."""
    return ExpertShape(len(config.moe_layers), config.router.num_experts, config.router.top_k)


def build_expert_memory(
    checkpoint: Checkpoint,
    prefixes: Sequence[str],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    settings: ExpertSettings,
) -> ExpertMemory:
    """Allocate the arena and start the readers.

    Args:
        checkpoint: in the official layout, or packed.
        prefixes: official name of each MoE layer's experts, up to `.experts`.
        config: the model's shape.
        dtype, device: of the slots.
        settings: how experts are kept.
    """
    shape = expert_shape(config)
    expert_format = slot_format(checkpoint.pack, config, dtype)
    source: ExpertSource
    if checkpoint.pack is not None:
        source = PackedExperts(checkpoint.folder, checkpoint.pack, settings.direct)
    else:
        assert isinstance(expert_format, DenseFormat)
        source = CheckpointExperts(checkpoint, prefixes, shape.num_experts, expert_format, settings.direct)
    slower = expert_format.slower_because(dtype, device)
    if slower is not None:
        source.fallbacks.append(f"experts are unpacked before every product, which is slower: {slower}")
    if settings.num_host:
        chosen = spread(settings.num_host, shape.num_layers, shape.num_experts)
        source = HostExperts(source, expert_format, chosen, pin_for(device))
    # An expert that is resident is never on its way: no more slots than experts.
    num_slots = min(settings.num_slots + settings.num_transit, shape.num_layers * shape.num_experts)
    ahead = settings.num_ahead if settings.virtual is None else 0
    try:
        copies = copy_lane(source, expert_format, device)
        arena = Arena(num_slots, expert_format, device, copies.freed)
        loader = Loader(source, arena, copies, settings.num_readers, ahead > 0)
    except BaseException:
        source.close()
        raise
    bringing = Ahead(loader, arena, ahead)
    costs = LaneCosts(
        settings.hardware,
        config.parameters_per_expert,
        dtype.itemsize,
        expert_format.slot_bytes,
        copies.asynchronous,
        settings.link_bandwidth,
    )
    lanes = settings.virtual or MachineLanes(bringing, source, costs)
    placement = Placement(ResidentPool(shape, settings.slots), settings.parts, lanes)
    return ExpertMemory(arena, loader, bringing, placement, costs)
