"""What is known of a model's habits before its first forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relume.core import RelumeError
from relume.strategy.foresight.statistics import NUM_BINS, TokenStatistics
from relume.strategy.refresh.curves import RefreshCurves
from relume.strategy.use import ExpertShape

#: Share of choices that are made again in the next iteration, by `confidence_bins`; measured on the shipped model
#: over 1,000 prompts. Used where a model has no profile of its own.
DEFAULT_STABILITY = (0.8, 0.67, 0.62, 0.65, 0.72, 0.79, 0.76, 0.76, 0.74, 0.49, 0.91)
assert len(DEFAULT_STABILITY) == NUM_BINS + 1


@dataclass(frozen=True)
class Profile:
    """Habits of a model's routing, as gathered from traces.

    Attributes:
        shape: of the model.
        popularity: `[layers, E]` float64, voting tokens of a forward that use each expert, mean over all forwards.
        mean_active: `[layers]` float64, distinct experts of a denoising forward.
        reuse: `[layers, E]` float64: how often the expert with the r-th most voting tokens of a forward is active
            in the next denoising one.
        stability: `[NUM_BINS + 1]` float64: the share of a position's choices that it makes again in the next
            iteration, by the confidence of its candidate (OLED-MoE, Fig. 10).
        statistics: counts from which `foresight` predicts; not to be changed.
        refresh: what interval refresh does to the residents; `None` if too few iterations were seen.
        model: the name that the trace had of it; empty if that is not known.
    """

    shape: ExpertShape
    popularity: np.ndarray
    mean_active: np.ndarray
    reuse: np.ndarray
    stability: np.ndarray
    statistics: TokenStatistics
    refresh: RefreshCurves | None = None
    model: str = ""

    def check(self, shape: ExpertShape) -> None:
        """Raise `RelumeError` unless it is of a model of this shape."""
        if self.shape != shape:
            raise RelumeError(
                f"a profile of {_words(self.shape)}, the model has {_words(shape)}: make one for this model with "
                "`relume trace profile`"
            )


def _words(shape: ExpertShape) -> str:
    return f"{shape.num_layers} layers of {shape.num_experts} experts, {shape.top_k} a token"
