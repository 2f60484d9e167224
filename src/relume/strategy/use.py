"""What strategies see of a model and of each layer's routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from relume.core import SpanInput


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a model: `num_layers` MoE layers, counted from 0, of `num_experts` each, `top_k` a token."""

    num_layers: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class LayerUse:
    """Which experts the tokens of one forward use in one layer.

    Attributes:
        layer: MoE layer, from 0.
        expert_ids: `[tokens, k]` integers, in routing order.
        weights: `[tokens, k]` float32.
        votes: `[tokens]` bool: whether a token says what is worth keeping. All tokens of a block do; of a
            prompt's prefill, which touches nearly every expert, only the last block does.
        num_experts: of the layer.
        used: `[tokens, k]` bool, which entries count, where tokens have different numbers of experts.
    """

    layer: int
    expert_ids: np.ndarray
    weights: np.ndarray
    votes: np.ndarray
    num_experts: int
    used: np.ndarray | None = None

    @cached_property
    def all_vote(self) -> bool:
        """Whether every token votes, so that `active` is where `counts` is positive."""
        return bool(self.votes.all())

    @cached_property
    def counts(self) -> np.ndarray:
        """`[E]` int64: voting tokens that use each expert."""
        return self._count(slice(None) if self.all_vote else self.votes)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """`[E]` int64: tokens that use each expert, whether they vote or not."""
        if self.all_vote:
            return self.counts
        return self._count(slice(None))

    def _count(self, tokens: slice | np.ndarray) -> np.ndarray:
        chosen = self.expert_ids[tokens]
        counted = chosen.ravel() if self.used is None else chosen[self.used[tokens]]
        return np.bincount(counted, minlength=self.num_experts)

    @cached_property
    def active(self) -> np.ndarray:
        """`[E]` bool: experts that any token uses."""
        return self.token_counts > 0


def span_slices(spans: Sequence[SpanInput]) -> list[slice]:
    """Where each request's tokens are among those of a forward."""
    ends = np.cumsum([len(span.token_ids) for span in spans]).tolist()
    return [slice(end - len(span.token_ids), end) for span, end in zip(spans, ends, strict=True)]


def last_block_votes(span_lengths: list[int], block_lengths: list[int]) -> np.ndarray:
    """`[tokens]` bool: the last block of each span, the spans one after the other."""
    votes = np.zeros(sum(span_lengths), dtype=bool)
    end = 0
    for num_tokens, block_length in zip(span_lengths, block_lengths, strict=True):
        end += num_tokens
        votes[max(end - num_tokens, end - block_length) : end] = True
    return votes
