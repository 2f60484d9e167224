"""Scores that fade, except of those that matter just now: HybriMoE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relume.config import require
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.retention.base import Retention
from relume.strategy.retention.bringing import whole_number, worth_bringing
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool


class HybriMoE(Retention, Prefetch):
    """Ranks by `S <- alpha * TopP(s) + (1 - alpha) * S`, "minus recent score"; it is its own prefetch.

    HybriMoE (arXiv 2504.05897, `KScoreAwareCache` in `experts.py`): s are a layer's gate scores, TopP keeps the p
    highest, and what is not among them fades. The lowest S of the layer leaves. After each layer those of the
    next one with the highest S are brought. The paper's simulation of what a prefetch would change is not in
    its code, and not here.

    Our choices:

    - s is the sum of the voting tokens' gate weights, where the code takes the first token; experts that a token
      did not choose have none, as traces hold only the chosen ones' (the code has all). Equals by id;
    - the code takes the n highest of the next layer and skips those that are resident. A block uses dozens of
      experts, so none would be left: here they are the n highest of the absent ones that the pool would let in.
      An absent expert outranks a resident only if it could not come when it was used, which is when the host
      computed it, as this system's dispatch has it: where everything is transferred, prefetching fills free slots
      and no more;
    - after the last layer the first one of the next forward follows.

    Args:
        context: of the model.
        alpha: weight of the latest forward, in 0..1.
        p: experts whose score counts; by default all that any token chose. There it is `2 * top_k`, of one token's
            scores: each token of a block has its `top_k` among those. With `2 * top_k` for a whole block most of
            what it uses would fade.
        n: experts that are asked for at once, `top_k` by default.

    Raises:
        RelumeError: a parameter is out of range.
    """

    def __init__(
        self, context: RetentionContext, alpha: float = 0.5, p: float | None = None, n: float | None = None
    ) -> None:
        super().__init__(context.shape)
        shape = context.shape
        require(0.0 <= alpha <= 1.0, f"hybrimoe: alpha is {alpha:g}: it must be in 0..1")
        self._alpha = alpha
        self._num_counting = shape.num_experts if p is None else whole_number("hybrimoe", "p", p)
        self._most = shape.top_k if n is None else whole_number("hybrimoe", "n", n, least=0)
        self._scores = np.zeros((shape.num_layers, shape.num_experts))

    def observe(self, use: LayerUse) -> None:
        """Let the layer's scores fade, and add the highest of the latest ones."""
        chosen, weights = use.expert_ids[use.votes].ravel(), use.weights[use.votes].ravel()
        latest = np.bincount(chosen, weights, minlength=self.shape.num_experts)
        counting = (-latest).argsort(kind="stable")[: self._num_counting]
        scores = self._scores[use.layer]
        scores *= 1.0 - self._alpha
        scores[counting] += self._alpha * latest[counting]

    def priority(self, layers: slice) -> np.ndarray:
        """S."""
        return self._scores[layers]

    def wanted(self, layer: int | None, pool: ResidentPool, retention: Retention) -> list[Key]:
        """The next layer's absent experts of the highest S; see `Prefetch`."""
        following = 0 if layer is None else (layer + 1) % self.shape.num_layers
        scores = np.zeros_like(self._scores)
        scores[following] = self._scores[following]
        return worth_bringing(scores, retention.priority(slice(0, len(scores))), pool, self._most)
