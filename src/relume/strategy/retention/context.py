"""What a retention policy may be made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from relume.core import RelumeError
from relume.strategy.use import ExpertShape

if TYPE_CHECKING:
    from relume.strategy.retention.belady import Future


@dataclass(frozen=True)
class RetentionContext:
    """What is known before the first forward.

    Attributes:
        shape: of the model.
        num_slots: experts that can be resident at once, over all layers.
        popularity: `[layers, E]` mean voting tokens of a forward that use each expert, from a profile.
        future: the whole trace's uses; only a replay has it.
    """

    shape: ExpertShape
    num_slots: int
    popularity: np.ndarray | None = None
    future: Future | None = None

    def __post_init__(self) -> None:
        expected = (self.shape.num_layers, self.shape.num_experts)
        if self.popularity is not None and self.popularity.shape != expected:
            layers, experts = self.popularity.shape
            raise RelumeError(
                f"the profile is of {layers} layers of {experts} experts, the model has {expected[0]} of "
                f"{expected[1]}: make one for this model with `relume trace profile`"
            )
