"""From a checkpoint and a budget to an expert memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.checkpoint.folder import Checkpoint
from relume.config import ModelConfig
from relume.experts.arena import Arena
from relume.experts.formats import DenseFormat
from relume.experts.host import HostExperts, spread
from relume.experts.loader import Loader
from relume.experts.memory import ExpertMemory
from relume.experts.packed import PackedExperts, slot_format
from relume.experts.source import CheckpointExperts, ExpertSource
from relume.machine.memory import pin
from relume.strategy.pool import ResidentPool
from relume.strategy.retention.base import Retention
from relume.strategy.use import ExpertShape


@dataclass(frozen=True)
class ExpertSettings:
    """How experts are kept.

    Attributes:
        slots: resident experts of each MoE layer, or one number for a pool that all layers share.
        retention: ranks them.
        num_transit: further slots, for experts on their way.
        num_readers: reads in flight.
        direct: read past the page cache, where the file system allows it.
        num_host: experts that are held in host memory too.
    """

    slots: tuple[int, ...] | int
    retention: Retention
    num_transit: int
    num_readers: int
    direct: bool
    num_host: int = 0

    @property
    def num_slots(self) -> int:
        """Experts that may be resident, over all layers."""
        return self.slots if isinstance(self.slots, int) else sum(self.slots)


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
        source = HostExperts(source, expert_format, chosen, None if device.type == "cpu" else pin)
    # An expert that is resident is never on its way: no more slots than experts.
    num_slots = min(settings.num_slots + settings.num_transit, shape.num_layers * shape.num_experts)
    try:
        arena = Arena(num_slots, expert_format, device)
        loader = Loader(source, arena, settings.num_readers)
    except BaseException:
        source.close()
        raise
    return ExpertMemory(arena, loader, ResidentPool(shape, settings.slots), settings.retention)
