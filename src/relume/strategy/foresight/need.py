"""From counts to the need for each expert in what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relume.core import Phase, SpanInput, SpanSignals
from relume.strategy.foresight.statistics import TokenStatistics, confidence_bins, mask_distances

#: Uses that the mean of all tokens counts for in a token's own habits.
_PRIOR_USES = 3.0
#: Kept choices by rank, from the first to the last, as measured on a small model, and the uses they count for.
_KEPT, _KEPT_USES = (0.98, 0.75), 10.0
#: A mask's chance to take a token where nothing was counted yet; it counts for one use.
_COMMIT = 0.3
#: Weight of what blocks need as a rule, beside what this one is seen to need.
_TYPICAL = 0.1


@dataclass(frozen=True)
class Outlook:
    """What is known of one request's next input, the same for all layers. Positions are those of that input.

    Attributes:
        masks, tokens: positions that will hold a mask, and a token, if they stay or are new.
        distances: of the masks, see `mask_distances`.
        rows: of the tokens in the table of `TokenStatistics`.
        stays: `[tokens]` bool, positions whose last choices are kept; `None` if none is, as in a new block.
        chance: of each mask to take a token before that input; `None` if that is decided.
        guesses: rows of the tokens that masks would take; `None` if nothing is known of them.
        is_prompt: the next input is more of a prompt, and what comes after it counts.
    """

    masks: np.ndarray
    tokens: np.ndarray
    distances: np.ndarray
    rows: np.ndarray
    stays: np.ndarray | None = None
    chance: np.ndarray | None = None
    guesses: np.ndarray | None = None
    is_prompt: bool = False


class NeedModel:
    """Predicts how likely each expert is used by a request's next denoising forward.

    Every position contributes a probability for every expert, and positions are taken as independent: the need
    for an expert is `1 - prod_i (1 - q_i)`. A position that stays as it is keeps its choices, by rank; one whose
    token is known to change, or expected to, chooses as that token does; a new block's masks choose as masks do.
    """

    def __init__(self, statistics: TokenStatistics) -> None:
        self.statistics = statistics

    def before_logits(self, span: SpanInput) -> Outlook:
        """Before a forward. A mask that had a candidate takes it with the frequency of its last confidence."""
        if span.phase is not Phase.DENOISE:
            return self._new(span.next_token_ids)
        counts = self.statistics
        found = self._split(span.token_ids, span.masked, np.ones(len(span.masked), dtype=bool))
        before = counts.latest(span.request, span.start)
        if before is None:
            taken, seen = counts.opened_commits[found.distances], counts.opened[found.distances]
            guesses = None
        else:
            bins = confidence_bins(before.span.confidences[found.masks])
            taken, seen = counts.awaited_commits[bins], counts.awaited[bins]
            guesses = counts.rows(before.span.candidates[found.masks])
        chance = ((taken + _COMMIT) / (seen + 1.0)).astype(np.float32)
        return Outlook(found.masks, found.tokens, found.distances, found.rows, found.stays, chance, guesses)

    def after_logits(self, span: SpanSignals) -> Outlook:
        """After a forward: the next input is known."""
        following = span.next_token_ids
        if span.phase is not Phase.DENOISE or span.next_start != span.start:
            return self._new(following)
        masked = span.masked & ~span.committed & (following == self.statistics.mask_token)
        return self._split(following, masked, following == span.token_ids)

    def needs(self, layer: int, outlooks: Sequence[tuple[Outlook, np.ndarray]]) -> np.ndarray:
        """`[E]` need in a layer, of requests with the expert ids `[tokens, k]` that their last forward chose."""
        absent = np.ones(self.statistics.shape.num_experts, dtype=np.float32)
        for outlook, expert_ids in outlooks:
            if outlook.is_prompt:
                absent *= 1.0 - self._first(layer)
            else:
                absent *= (1.0 - self._probabilities(layer, outlook, expert_ids)).prod(axis=0)
        need: np.ndarray = 1.0 - absent
        return need

    def typical(self, layer: int) -> np.ndarray:
        """`[E]` small amounts: what the first iteration of a block needs as a rule."""
        found: np.ndarray = _TYPICAL * self._first(layer)
        return found

    def _probabilities(self, layer: int, outlook: Outlook, expert_ids: np.ndarray) -> np.ndarray:
        """`[positions, E]` that each position uses each expert."""
        counts = self.statistics
        mean = self._mean(layer)
        size = len(outlook.masks) + len(outlook.tokens)
        found = np.empty((size, counts.shape.num_experts), dtype=np.float32)
        found[outlook.tokens] = _habits(counts.experts[layer], counts.uses, outlook.rows, mean)
        found[outlook.masks] = _habits(counts.mask_experts[layer], counts.mask_uses, outlook.distances, mean)
        if outlook.stays is not None:
            ranks = np.linspace(*_KEPT, counts.shape.top_k)
            kept = (counts.kept[:, layer] + _KEPT_USES * ranks) / (counts.kept_uses[:, None] + _KEPT_USES)
            for kind, positions in enumerate((outlook.masks, outlook.tokens)):
                staying = positions[outlook.stays[positions]]
                found[staying] *= np.float32(1.0 - kept[kind].mean())
                found[staying[:, None], expert_ids[staying]] = kept[kind]
        if outlook.chance is not None and len(outlook.masks):
            if outlook.guesses is None:
                fresh = (counts.fresh_experts[layer] + mean) / (counts.fresh_uses + 1.0)
                taken = fresh.astype(np.float32)[None]
            else:
                taken = _habits(counts.experts[layer], counts.uses, outlook.guesses, mean)
            chance = outlook.chance[:, None]
            found[outlook.masks] = found[outlook.masks] * (1.0 - chance) + taken * chance
        return found

    def _new(self, token_ids: np.ndarray) -> Outlook:
        """Of an input whose routing was never seen."""
        masked = token_ids == self.statistics.mask_token
        if not masked.any():
            nothing = np.empty(0, dtype=np.int64)
            return Outlook(nothing, nothing, nothing, nothing, is_prompt=True)
        return self._split(token_ids, masked, None)

    def _split(self, token_ids: np.ndarray, masked: np.ndarray, stays: np.ndarray | None) -> Outlook:
        tokens = (~masked).nonzero()[0]
        rows = self.statistics.rows(token_ids[tokens])
        return Outlook(masked.nonzero()[0], tokens, mask_distances(masked)[masked], rows, stays)

    def _first(self, layer: int) -> np.ndarray:
        counts = self.statistics
        found: np.ndarray = (counts.first_experts[layer] + self._mean(layer)) / (counts.first_uses + 1.0)
        return found

    def _mean(self, layer: int) -> np.ndarray:
        """`[E]` float32: how often a token uses each expert."""
        counts = self.statistics
        even = counts.shape.top_k / counts.shape.num_experts
        found: np.ndarray = ((counts.all_experts[layer] + even) / (counts.all_uses + 1.0)).astype(np.float32)
        return found


def _habits(experts: np.ndarray, uses: np.ndarray, rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """`[n, E]` float32 shares from counts by row; a row of -1, or of few uses, is mostly the mean."""
    found = experts.take(rows, axis=0)
    known = uses.take(rows).astype(np.float32)
    unknown = rows < 0
    if unknown.any():
        found[unknown], known[unknown] = 0.0, 0.0
    found += np.float32(_PRIOR_USES) * mean
    found /= (known + np.float32(_PRIOR_USES))[:, None]
    return found
