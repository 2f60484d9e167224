"""From counts to the need for each expert in what comes next."""

from __future__ import annotations

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
_LARGEST = 0.999


class NeedModel:
    """Predicts how likely each expert is used by a request's next denoising forward.

    Every position contributes a probability for every expert, and positions are taken as independent: the need
    for an expert is `1 - prod_i (1 - q_i)`. A position that stays as it is keeps its choices, by rank; one whose
    token is known to change, or expected to, chooses as that token does; a new block's masks choose as masks do.
    """

    def __init__(self, statistics: TokenStatistics) -> None:
        self.statistics = statistics

    def before_logits(self, layer: int, span: SpanInput, expert_ids: np.ndarray) -> np.ndarray:
        """`[tokens, E]` probabilities in a layer, as soon as its routing `[tokens, k]` is known.

        A mask that had a candidate in the iteration before takes it with the frequency of its confidence.
        """
        if span.phase is not Phase.DENOISE:
            return self._of_new(layer, span.next_token_ids)
        counts = self.statistics
        masked = span.masked
        distances = mask_distances(masked)
        stays = self._of_unchanged(layer, span.token_ids, masked, distances, expert_ids)
        before = counts.latest(span.request, span.start)
        if before is None:
            chance = (counts.opened_commits + _COMMIT)[distances] / (counts.opened + 1.0)[distances]
            fresh = (counts.fresh_experts[layer] + self._mean(layer)) / (counts.fresh_uses + 1.0)
            taken = np.broadcast_to(fresh, stays.shape)
        else:
            bins = confidence_bins(before.span.confidences)
            chance = (counts.awaited_commits + _COMMIT)[bins] / (counts.awaited + 1.0)[bins]
            taken = self._of_tokens(layer, before.span.candidates)
        chance = np.where(masked, chance, 0.0)[:, None]
        mixed: np.ndarray = stays * (1.0 - chance) + taken * chance
        return mixed

    def after_logits(self, layer: int, span: SpanSignals, expert_ids: np.ndarray) -> np.ndarray:
        """The same once the next input is known; `expert_ids` `[tokens, k]` are those of the past forward."""
        following = span.next_token_ids
        if span.phase is not Phase.DENOISE or span.next_start != span.start:
            return self._of_new(layer, following)
        masked = span.masked & ~span.committed & (following == self.statistics.mask_token)
        distances = mask_distances(masked)
        stays = self._of_unchanged(layer, following, masked, distances, expert_ids)
        same = (following == span.token_ids)[:, None]
        found: np.ndarray = np.where(same, stays, self._of_tokens(layer, following))
        return found

    def typical(self, layer: int) -> np.ndarray:
        """`[E]` small amounts: what the first iteration of a block needs as a rule."""
        found: np.ndarray = _TYPICAL * self._first(layer)
        return found

    def _first(self, layer: int) -> np.ndarray:
        counts = self.statistics
        found: np.ndarray = (counts.first_experts[layer] + self._mean(layer)) / (counts.first_uses + 1.0)
        return found

    def _of_new(self, layer: int, token_ids: np.ndarray) -> np.ndarray:
        """Of an input whose routing was never seen; without masks it is a prompt's, and what follows it counts."""
        masked = token_ids == self.statistics.mask_token
        if not masked.any():
            return self._first(layer)[None]
        distances = mask_distances(masked)
        found: np.ndarray = np.where(
            masked[:, None], self._of_masks(layer, distances), self._of_tokens(layer, token_ids)
        )
        return found

    def _of_unchanged(
        self, layer: int, token_ids: np.ndarray, masked: np.ndarray, distances: np.ndarray, expert_ids: np.ndarray
    ) -> np.ndarray:
        counts = self.statistics
        ranks = np.linspace(*_KEPT, expert_ids.shape[1])
        kept = (counts.kept[:, layer] + _KEPT_USES * ranks) / (counts.kept_uses[:, None] + _KEPT_USES)
        by_position = kept[np.where(masked, 0, 1)]
        habits = np.where(masked[:, None], self._of_masks(layer, distances), self._of_tokens(layer, token_ids))
        found = habits * (1.0 - by_position.mean(axis=1, keepdims=True))
        np.put_along_axis(found, expert_ids.astype(np.int64), by_position, axis=1)
        assert isinstance(found, np.ndarray)
        return found

    def _of_tokens(self, layer: int, token_ids: np.ndarray) -> np.ndarray:
        counts = self.statistics
        rows = counts.rows(token_ids)
        known = (rows >= 0)[:, None]
        own = np.where(known, counts.experts[layer, rows], 0.0)
        uses = np.where(known, counts.uses[rows][:, None], 0.0)
        found: np.ndarray = (own + _PRIOR_USES * self._mean(layer)) / (uses + _PRIOR_USES)
        return found

    def _of_masks(self, layer: int, distances: np.ndarray) -> np.ndarray:
        counts = self.statistics
        own, uses = counts.mask_experts[layer, distances], counts.mask_uses[distances][:, None]
        found: np.ndarray = (own + _PRIOR_USES * self._mean(layer)) / (uses + _PRIOR_USES)
        return found

    def _mean(self, layer: int) -> np.ndarray:
        counts = self.statistics
        even = counts.shape.top_k / counts.shape.num_experts
        found: np.ndarray = (counts.all_experts[layer] + even) / (counts.all_uses + 1.0)
        return found


def joined(probabilities: list[np.ndarray], num_experts: int) -> np.ndarray:
    """`[E]` the chance that any position uses an expert, from `[tokens, E]` of each request."""
    absent = np.zeros(num_experts)
    for part in probabilities:
        absent += np.log1p(-np.minimum(part, _LARGEST)).sum(axis=0)
    need: np.ndarray = 1.0 - np.exp(absent)
    return need
