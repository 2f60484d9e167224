"""From a checkpoint and a budget to an expert memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.checkpoint.files import direct_read_problem
from relume.checkpoint.folder import Checkpoint
from relume.config import ModelConfig
from relume.experts.arena import Arena
from relume.experts.formats import DenseFormat
from relume.experts.loader import Loader
from relume.experts.memory import ExpertMemory
from relume.experts.source import CheckpointExperts
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
    """

    slots: tuple[int, ...] | int
    retention: Retention
    num_transit: int
    num_readers: int
    direct: bool

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
) -> tuple[ExpertMemory, list[str]]:
    """Allocate the arena and start the readers; returns also what could not be had as asked.

    Args:
        checkpoint: in the official layout.
        prefixes: official name of each MoE layer's experts, up to `.experts`.
        config: the model's shape.
        dtype, device: of the slots.
        settings: how experts are kept.
    """
    fallbacks = []
    direct = settings.direct
    if direct and prefixes:
        path = checkpoint.expert(prefixes[0], 0)[0].path
        problem = direct_read_problem(path)
        if problem is not None:
            direct = False
            fallbacks.append(f"experts are read through the page cache, because direct reads failed: {problem}")
    shape = expert_shape(config)
    expert_format = DenseFormat(config.hidden_size, config.expert_size, dtype)
    source = CheckpointExperts(checkpoint, prefixes, shape.num_experts, expert_format, direct)
    # An expert that is resident is never on its way: no more slots than experts.
    num_slots = min(settings.num_slots + settings.num_transit, shape.num_layers * shape.num_experts)
    arena = Arena(num_slots, expert_format, device)
    loader = Loader(source, arena, settings.num_readers)
    return ExpertMemory(arena, loader, ResidentPool(shape, settings.slots), settings.retention), fallbacks
