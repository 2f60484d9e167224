"""What a routing may know of the tokens it routes, besides their scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relume.core import Phase


@dataclass(frozen=True)
class RoutedTokens:
    """Consecutive tokens of one request, whole blocks from the first; the last may be partial.

    The tensors may lie on another device than the scores.

    Attributes:
        block_length: of the request.
        phase: what the forward is for.
        masked: `[tokens]` bool, positions that await a token; `None` if there are none.
        confidences: `[tokens]` float32 of the candidates in the block's last iteration, NaN where none was asked
            for; `None` if there was no such iteration.
        residents: `[experts]` bool, experts of the layer that are resident; `None` counts as none.
    """

    block_length: int
    phase: Phase = Phase.DENOISE
    masked: torch.Tensor | None = None
    confidences: torch.Tensor | None = None
    residents: torch.Tensor | None = None
