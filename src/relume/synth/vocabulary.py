"""Embeddings and output head, drawn piece by piece: neither is ever whole in memory here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from relume.config import ModelConfig
from relume.synth.attention import context_size
from relume.synth.random_weights import WeightSource

_OWN, _OWN_OF_MASK, _COMMON = 0.95, 0.14, 0.45  # parts of an embedding: the token's own, the mask's, of all tokens
_SPECIAL_LOGIT = -30.0

#: (first token id, rows `[n, hidden]`)
Piece = tuple[int, torch.Tensor]


@dataclass(frozen=True)
class HeadShape:
    """What was fitted for the output head.

    Attributes:
        spread: standard deviation of the logits that a unit state would give.
        ignored: orthonormal `[hidden]` directions that the head does not read, so that masks differ in what
            they predict.
        level: mean of the states along the direction that all share; gives the special tokens their low logit.
    """

    spread: float
    ignored: Sequence[torch.Tensor]
    level: float


class Vocabulary:
    """The two large matrices of a model. The head's row of a token is its embedding's own part, scaled.

    A committed token therefore predicts itself, as in trained models: editing decoders come to rest.

    Attributes:
        common: `[hidden]` unit vector that all embeddings share.
        special: ids that are never predicted.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, special: Sequence[int]) -> None:
        self.special = special
        self._config = config
        self._source = source
        direction = source.normal("common", (config.hidden_size,), 1.0, torch.float32)
        self.common = direction / direction.norm()

    def embeddings(self) -> Iterator[Piece]:
        """Pieces of the embeddings."""
        offset = self.common * (_COMMON * self._config.hidden_size**0.5)
        for first, rows in self._own_rows():
            share = torch.full((len(rows), 1), _OWN)
            share[self._here((self._config.mask_token_id or 0,), first, rows)] = _OWN_OF_MASK
            yield first, (rows * share + offset).to(self._source.dtype)

    def logits(self, x: torch.Tensor, ignored: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Pieces `[tokens, n]` of the logits of final states `[tokens, hidden]` for a spread of 1."""
        x = self._readable(x, ignored) / self._config.hidden_size**0.5
        for first, rows in self._own_rows():
            found = x @ rows.T
            found[:, self._here(self.special, first, rows)] = float("-inf")
            yield found

    def head(self, shape: HeadShape) -> Iterator[Piece]:
        """Pieces of the output head."""
        for first, rows in self._own_rows():
            weight = self._readable(rows, shape.ignored) * (shape.spread / self._config.hidden_size**0.5)
            weight[self._here(self.special, first, rows)] = self.common * (_SPECIAL_LOGIT / shape.level)
            yield first, weight.to(self._source.dtype)

    def _own_rows(self) -> Iterator[Piece]:
        for first, rows in self._source.row_chunks(
            "vocabulary", self._config.vocab_size, self._config.hidden_size
        ):
            yield first, rows.float()

    def _readable(self, x: torch.Tensor, ignored: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part of `x` that the head reads: without the context's dimensions and the ignored directions."""
        x = x.clone()
        x[:, : context_size(self._config.hidden_size)] = 0.0
        for direction in ignored:
            x -= torch.outer(x @ direction, direction)
        return x

    @staticmethod
    def _here(token_ids: Sequence[int], first: int, rows: torch.Tensor) -> list[int]:
        return [token - first for token in token_ids if 0 <= token - first < len(rows)]
