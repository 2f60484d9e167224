"""The tokens of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from relume.model.kv_cache import KVCache


@dataclass(frozen=True)
class Segment:
    """Consecutive whole blocks of one request, starting where its cache ends.

    Attributes:
        token_ids: `[n]` int64.
        cache: the request's K/V; the forward writes this segment's behind the final ones.
        logit_rows: `[m]` indices into `token_ids` whose logits are wanted.
        block_length: of the request; sets which positions see each other.
    """

    token_ids: torch.Tensor
    cache: KVCache
    logit_rows: torch.Tensor
    block_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the segment."""
        return len(self.token_ids)


def make_spans(segments: Sequence[Segment], exact: bool) -> list[list[Segment]]:
    """Group segments whose rows share matrix products.

    Alone in its span, a segment's results do not depend on the others, not even in the last bit. Joined, the
    dense weights are read once for all.
    """
    return [[segment] for segment in segments] if exact else [list(segments)]
