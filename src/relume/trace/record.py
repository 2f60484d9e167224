"""One forward, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relume.core import SpanSignals


@dataclass(frozen=True)
class ForwardRecord:
    """What one forward did.

    Attributes:
        spans: its requests in order; their tokens follow one another in the arrays below.
        expert_ids: `[layers, tokens, k]` uint16, over the MoE layers.
        weights: `[layers, tokens, k]` float32.
        misses: for each layer the missed expert ids, ascending.
        hosted: for each layer those of them that were computed where they lie.
        arrived: for each layer the prefetched experts that had come when it began, ascending.
        bytes_loaded: expert bytes that moved.
        wall_s, compute_s, stall_s: of the whole forward, in its experts, and waiting for them.
    """

    spans: tuple[SpanSignals, ...]
    expert_ids: np.ndarray
    weights: np.ndarray
    misses: tuple[np.ndarray, ...]
    hosted: tuple[np.ndarray, ...]
    arrived: tuple[np.ndarray, ...]
    bytes_loaded: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    stall_s: float = 0.0
