"""What is counted of a model's decoding, so that its need for experts can be predicted.

The same counts are gathered from a trace beforehand and go on growing while an engine decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from relume.core import Phase, SpanSignals
from relume.strategy.use import ExpertShape

#: Masks are told apart by how far they are from the last token before them, up to this.
MAX_DISTANCE = 64
#: Bins of confidence, from 0 to 1; exactly 1 has its own.
NUM_BINS = 10
#: What the table of tokens may take.
MAX_TABLE_BYTES = 32 * 2**20
_UNKNOWN = -1
#: Requests whose last iteration is kept.
_MAX_REQUESTS = 64


def mask_distances(masked: np.ndarray) -> np.ndarray:
    """`[n]` for each mask how many positions ago the last token stood, at most `MAX_DISTANCE`; 0 for tokens."""
    places = np.arange(len(masked))
    last = np.maximum.accumulate(np.where(masked, -1, places))
    distances: np.ndarray = np.minimum(places - last, MAX_DISTANCE)
    return distances


def confidence_bins(confidences: np.ndarray) -> np.ndarray:
    """`[n]` in 0..NUM_BINS."""
    return (confidences * NUM_BINS).astype(np.int64)


class Decoded:
    """One request's latest denoising forward: its signals, and expert ids `[layers, tokens, k]`."""

    def __init__(self, span: SpanSignals, expert_ids: np.ndarray) -> None:
        self.span = span
        self.expert_ids = expert_ids


class TokenStatistics:
    """Counts of a model's decoding. Tokens beyond the table's size share their mean.

    Attributes:
        shape: of the model.
        tokens: `[T]` token id of each row of the table, -1 for a row that is free.
        uses: `[T]` forwards in which the token stood at a position; `experts` `[layers, T, E]`, its choices.
        mask_uses, mask_experts: `[D]` and `[layers, D, E]`, the same of masks by `mask_distances`.
        all_uses, all_experts: a number and `[layers, E]`, of all tokens that were no masks.
        kept, kept_uses: `[2, layers, k]` and `[2]`: how often the choice of a rank was chosen again in the next
            iteration, by positions that stayed masked, and by tokens.
        opened, opened_commits: `[D]` masks in the first iteration of a block, and how many of them took a token.
        awaited, awaited_commits: `[NUM_BINS + 1]` masks by the confidence they had in the iteration before.
        fresh_uses, fresh_experts: of tokens in the iteration after they took the place of a mask.
        first_uses, first_experts: `[layers, E]` blocks' first iterations, and those that used an expert.
        mask_token: id of the mask token, -1 before one was seen.
    """

    _ARRAYS = (
        "tokens",
        "uses",
        "experts",
        "mask_uses",
        "mask_experts",
        "all_uses",
        "all_experts",
        "kept",
        "kept_uses",
        "opened",
        "opened_commits",
        "awaited",
        "awaited_commits",
        "fresh_uses",
        "fresh_experts",
        "first_uses",
        "first_experts",
    )

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        layers, experts = shape.num_layers, shape.num_experts
        rows = max(1, MAX_TABLE_BYTES // (4 * layers * experts))
        self.tokens = np.full(rows, _UNKNOWN, dtype=np.int64)
        self.uses = np.zeros(rows, dtype=np.float32)
        self.experts = np.zeros((layers, rows, experts), dtype=np.float32)
        self.mask_uses = np.zeros(MAX_DISTANCE + 1)
        self.mask_experts = np.zeros((layers, MAX_DISTANCE + 1, experts), dtype=np.float32)
        self.all_uses = np.zeros(())
        self.all_experts = np.zeros((layers, experts))
        self.kept, self.kept_uses = np.zeros((2, layers, shape.top_k)), np.zeros(2)
        self.opened, self.opened_commits = np.zeros(MAX_DISTANCE + 1), np.zeros(MAX_DISTANCE + 1)
        self.awaited, self.awaited_commits = np.zeros(NUM_BINS + 1), np.zeros(NUM_BINS + 1)
        self.fresh_uses, self.fresh_experts = np.zeros(()), np.zeros((layers, experts))
        self.first_uses, self.first_experts = np.zeros(()), np.zeros((layers, experts))
        self.mask_token = _UNKNOWN
        self._row_of = np.full(1024, _UNKNOWN, dtype=np.int32)
        self._latest: dict[int, Decoded] = {}

    @staticmethod
    def num_bytes(shape: ExpertShape) -> int:
        """Of the tables: that of tokens, and that of masks."""
        return MAX_TABLE_BYTES + 4 * (MAX_DISTANCE + 1) * shape.num_layers * shape.num_experts

    def latest(self, request: int, start: int) -> Decoded | None:
        """The last denoising forward of a request's block that begins at `start`, if it had one."""
        found = self._latest.get(request)
        return found if found is not None and found.span.start == start else None

    def rows(self, token_ids: np.ndarray) -> np.ndarray:
        """Row of each token in the table; -1 if it has none."""
        known = self._row_of
        rows: np.ndarray = np.where(token_ids < len(known), known[np.minimum(token_ids, len(known) - 1)], _UNKNOWN)
        return rows

    def take(self, span: SpanSignals, expert_ids: np.ndarray) -> None:
        """Count one request's part of a forward, of which `expert_ids` are `[layers, tokens, k]`."""
        layers = np.arange(self.shape.num_layers)[:, None, None]
        masked, distances = span.masked, mask_distances(span.masked)
        if masked.any():
            self.mask_token = int(span.token_ids[masked][0])
            np.add.at(self.mask_uses, distances[masked], 1)
            np.add.at(self.mask_experts, (layers, distances[masked][:, None], expert_ids[:, masked]), 1)
        if not masked.all():
            self._take_tokens(span.token_ids[~masked], expert_ids[:, ~masked])
        if span.phase is Phase.DENOISE:
            self._take_iteration(span, expert_ids, distances)
        if not len(span.next_token_ids):
            self._latest.pop(span.request, None)
        elif len(self._latest) > _MAX_REQUESTS:  # a cancelled request never ends: the longest unseen is forgotten
            self._latest.pop(next(iter(self._latest)))

    def _take_tokens(self, token_ids: np.ndarray, expert_ids: np.ndarray) -> None:
        layers = np.arange(self.shape.num_layers)[:, None, None]
        self.all_uses += len(token_ids)
        np.add.at(self.all_experts, (layers, expert_ids), 1)
        rows = self.rows(token_ids)
        self._add_rows(np.unique(token_ids[rows < 0]), rows[rows >= 0])
        rows = self.rows(token_ids)
        here = rows >= 0  # more new tokens than rows have none
        np.add.at(self.uses, rows[here], 1)
        np.add.at(self.experts, (layers, rows[here][:, None], expert_ids[:, here]), 1)

    def _add_rows(self, tokens: np.ndarray, in_use: np.ndarray) -> None:
        """Give new tokens the rows that have been used least, none of those `in_use`."""
        if not len(tokens):
            return
        uses = self.uses.copy()
        uses[in_use] = np.inf
        order = uses.argsort(kind="stable")[: len(tokens)]
        for row, token in zip(order.tolist(), tokens.tolist(), strict=False):
            if np.isinf(uses[row]):
                return
            if self.tokens[row] != _UNKNOWN:
                self._row_of[self.tokens[row]] = _UNKNOWN
            self.uses[row] = 0
            self.experts[:, row] = 0
            self._name_row(row, token)

    def _name_row(self, row: int, token: int) -> None:
        if token >= len(self._row_of):
            more = np.full(2 * token - len(self._row_of) + 1, _UNKNOWN, dtype=np.int32)
            self._row_of = np.concatenate((self._row_of, more))
        self.tokens[row] = token
        self._row_of[token] = row

    def _take_iteration(self, span: SpanSignals, expert_ids: np.ndarray, distances: np.ndarray) -> None:
        masked, before = span.masked, self.latest(span.request, span.start)
        self._latest.pop(span.request, None)  # the latest one comes last
        self._latest[span.request] = Decoded(span, expert_ids)
        if before is None:
            np.add.at(self.opened, distances[masked], 1)
            np.add.at(self.opened_commits, distances[masked & span.committed], 1)
            self.first_uses += 1
            used = np.zeros(self.first_experts.shape, dtype=bool)
            used[np.arange(len(used))[:, None, None], expert_ids] = True
            self.first_experts += used
            return
        bins = confidence_bins(before.span.confidences)
        np.add.at(self.awaited, bins[masked], 1)
        np.add.at(self.awaited_commits, bins[masked & span.committed], 1)
        same = before.span.token_ids == span.token_ids
        again = (before.expert_ids[..., :, None] == expert_ids[..., None, :]).any(axis=-1)
        for kind, which in enumerate((same & masked, same & ~masked)):
            self.kept[kind] += again[:, which].sum(axis=1)
            self.kept_uses[kind] += np.count_nonzero(which)
        fresh = before.span.masked & ~masked
        self.fresh_uses += np.count_nonzero(fresh)
        layers = np.arange(self.shape.num_layers)[:, None, None]
        np.add.at(self.fresh_experts, (layers, expert_ids[:, fresh]), 1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All counts, the table without its free rows."""
        arrays = {name: getattr(self, name) for name in self._ARRAYS}
        held = self.tokens >= 0
        arrays |= {"tokens": self.tokens[held], "uses": self.uses[held], "experts": self.experts[:, held]}
        return arrays | {"mask_token": np.array(self.mask_token)}

    @classmethod
    def from_arrays(cls, shape: ExpertShape, arrays: Mapping[str, np.ndarray]) -> Self:
        """The reverse of `to_arrays`; the arrays are copied.

        Raises:
            KeyError, ValueError: an array is missing or has another shape.
        """
        made = cls(shape)
        for name in cls._ARRAYS:
            whole, found = getattr(made, name), np.asarray(arrays[name])
            if name in {"tokens", "uses", "experts"}:
                axis = 1 if name == "experts" else 0
                whole = whole[:, : found.shape[1]] if axis else whole[: len(found)]
            if whole.shape != found.shape:
                raise ValueError(f"{name} has the shape {found.shape}, not {whole.shape}")
            whole[...] = found
        for row, token in enumerate(np.asarray(arrays["tokens"]).tolist()):
            made._name_row(row, token)
        made.mask_token = int(arrays["mask_token"])
        return made
