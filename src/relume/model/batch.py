"""The tokens of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.core import Phase
from relume.model.kv_cache import KVCache
from relume.routing.tokens import RoutedTokens


@dataclass(frozen=True)
class Segment:
    """Consecutive whole blocks of one request, starting where its cache ends.

    Attributes:
        token_ids: `[n]` int64.
        cache: the request's K/V; the forward writes this segment's behind the final ones.
        logit_rows: `[m]` indices into `token_ids` whose logits are wanted.
        block_length: of the request; sets which positions see each other.
        phase: what the forward is for.
        masked: `[n]` bool, on the CPU, positions that await a token; `None` if there are none.
        confidences: `[n]` float32, on the CPU, of the block's candidates in the iteration before; `None` if there
            was none.
    """

    token_ids: torch.Tensor
    cache: KVCache
    logit_rows: torch.Tensor
    block_length: int
    phase: Phase = Phase.DENOISE
    masked: torch.Tensor | None = None
    confidences: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment."""
        return len(self.token_ids)

    def routed(self, residents: torch.Tensor | None) -> RoutedTokens:
        """What the router of a layer may know of these tokens, whose `residents` are `[experts]` bool."""
        return RoutedTokens(self.block_length, self.phase, self.masked, self.confidences, residents)


def make_spans(segments: Sequence[Segment], exact: bool) -> list[list[Segment]]:
    """Group segments whose rows share matrix products.

    Alone in its span, a segment's results do not depend on the others, not even in the last bit. Joined, the
    dense weights are read once for all.
    """
    return [[segment] for segment in segments] if exact else [list(segments)]
