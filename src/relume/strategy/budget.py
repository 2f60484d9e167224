"""How much memory experts get, and how many slots that makes of each layer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from relume.core import RelumeError
from relume.strategy.use import ExpertShape

_UNITS = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[a-z]+)?", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertMemory:
    """How much of the experts may be resident; one of the three is given, or none for `auto`.

    Attributes:
        share: of all experts, above 0 and at most 1.
        num_bytes: of memory.
        slots: experts of each layer.
    """

    share: float | None = None
    num_bytes: int | None = None
    slots: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `auto`, `40%`, `8GiB` or `100` (experts of each layer)."""
        if text.strip().lower() == "auto":
            return cls()
        found = _AMOUNT.fullmatch(text.strip())
        unit = (found[2] or "").lower() if found else ""
        if found is None or (unit not in {"", "%"} and unit not in _UNITS):
            raise RelumeError(
                f"expert memory {text!r} is no amount: write auto, a share as 40%, a size as 8GiB, or a number of "
                "experts per layer as 100"
            )
        value = float(found[1])
        if value <= 0.0 or (unit == "%" and value > 100.0) or (not unit and value != int(value)):
            raise RelumeError(
                f"expert memory {text!r} cannot be: a share lies above 0% and up to 100%, a number of experts per "
                "layer is a whole number from 1"
            )
        if unit == "%":
            return cls(share=value / 100.0)
        return cls(num_bytes=int(value * _UNITS[unit])) if unit else cls(slots=int(value))

    @property
    def is_auto(self) -> bool:
        """Whether it is to be decided from the machine."""
        return self == ExpertMemory()

    def total_slots(self, shape: ExpertShape, expert_bytes: int) -> int:
        """Experts that fit, over all layers; never more than there are.

        Raises:
            RelumeError: it is `auto`, names more experts than a layer has, or fewer than one a layer.
        """
        everything = shape.num_layers * shape.num_experts
        if self.share is not None:
            total = math.floor(self.share * everything + 1e-9)  # 0.29 * 100 is 28.999...
        elif self.num_bytes is not None:
            total = min(everything, self.num_bytes // expert_bytes)
        elif self.slots is not None:
            if self.slots > shape.num_experts:
                raise RelumeError(
                    f"expert memory of {self.slots} experts per layer: a layer has only {shape.num_experts}"
                )
            total = self.slots * shape.num_layers
        else:
            raise RelumeError("expert memory auto needs a machine to fit: give a share as 40%, a size or a number")
        if total < shape.num_layers:
            raise RelumeError(
                f"the expert memory holds {total} experts, and the model has {shape.num_layers} layers of them: "
                f"give at least 1, which is {math.ceil(1000 / shape.num_experts) / 10:g}% or "
                f"{math.ceil(shape.num_layers * expert_bytes / 2**20)}MiB"
            )
        return total


def parse_size(text: str) -> int:
    """`8GiB` in bytes. Raises `RelumeError` for anything else."""
    try:
        size = ExpertMemory.parse(text).num_bytes
    except RelumeError:
        size = None
    if not size:
        raise RelumeError(f"memory {text!r} is no size: write it as 8GiB")
    return size


def uniform(total_slots: int, shape: ExpertShape) -> list[int]:
    """The same number of slots for each layer; what is left over goes to the first layers, one each."""
    each, left = divmod(total_slots, shape.num_layers)
    return [each + (layer < left) for layer in range(shape.num_layers)]


def explicit(text: str, shape: ExpertShape) -> list[int]:
    """Read one number of slots for each MoE layer, separated by commas."""
    try:
        slots = [int(part) for part in text.split(",")]
    except ValueError:
        raise RelumeError(f"slots {text!r}: write one whole number per MoE layer, separated by commas") from None
    if len(slots) != shape.num_layers:
        raise RelumeError(f"{len(slots)} numbers of slots for {shape.num_layers} MoE layers: give one for each")
    for layer, number in enumerate(slots):
        if not 1 <= number <= shape.num_experts:
            raise RelumeError(
                f"MoE layer {layer} gets {number} slots: it must be 1 to {shape.num_experts} (all experts)"
            )
    return slots


def shared_pool_warning(num_slots: int, mean_active: np.ndarray) -> str | None:
    """What is wrong with a pool that all layers share, in one line; `None` if it holds what one pass uses.

    Layers are visited in a circle. A pool smaller than one pass's demand has, when it ranks by recency, always
    just dropped what comes next, and nothing is ever hit.

    Args:
        num_slots: of the pool.
        mean_active: `[layers]` experts that a denoising forward uses.
    """
    demand = math.ceil(float(mean_active.sum()))
    if num_slots >= demand:
        return None
    return (
        f"a shared pool of {num_slots} slots is smaller than what one pass uses ({demand} slots): ranked by "
        f"recency, as with lru, hardly anything is hit; give at least {demand} slots, or each layer its own"
    )
