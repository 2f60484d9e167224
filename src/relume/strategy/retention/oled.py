"""What confident tokens used stays: the retention of OLED-MoE."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import Phase, SpanInput, SpanSignals
from relume.strategy.foresight.statistics import confidence_bins
from relume.strategy.profile import DEFAULT_STABILITY
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse, span_slices

#: Requests whose last confidences are kept.
_MAX_REQUESTS = 64


class Oled(Retention):
    """Ranks by `p <- decay * p + sum_i phi(c_i) * w_i^gamma` over the voting tokens i that chose an expert.

    OLED-MoE (arXiv 2609.33385) maps token confidence c and gate weight w to a retention priority (Fig. 9); only
    its abstract and captions are public, the formula is our construction. `phi` is the share of choices that a
    token of that confidence makes again, from the model's profile. Confidences of an iteration exist only after
    its last layer, so within it those of the one before count; all layers are ranked again when they are known.

    Args:
        context: of the model; its profile gives `phi`, otherwise that of the shipped model is taken.
        decay: of what earlier forwards gave, in 0..1.
        gamma: exponent of the gate weight; 0 counts tokens alone.
        boundary: factor on all priorities when a block ends, in 0..1.
    """

    def __init__(
        self, context: RetentionContext, decay: float = 0.9, gamma: float = 0.5, boundary: float = 0.5
    ) -> None:
        super().__init__(context.shape)
        self._decay, self._gamma, self._boundary = decay, gamma, boundary
        profile = context.profile
        self._stability = np.array(DEFAULT_STABILITY) if profile is None else profile.stability
        size = (context.shape.num_layers, context.shape.num_experts)
        self._settled = np.zeros(size)  # before this forward
        self._priority = np.zeros(size)
        self._confidences: dict[int, tuple[int, np.ndarray]] = {}  # of each request: its block's start, and them
        self._uses: dict[int, LayerUse] = {}
        self._factors = np.ones(0)

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Look up what is known of each token."""
        self._factors = np.concatenate([self._expected(span) for span in spans]) if spans else np.ones(0)

    def observe(self, use: LayerUse) -> None:
        """Rank the layer by the confidences of the iteration before."""
        self._uses[use.layer] = use
        factors = self._factors if len(self._factors) else np.ones(len(use.expert_ids))
        self._rank(use, factors)

    def priority(self, layers: slice) -> np.ndarray:
        """See the class."""
        return self._priority[layers]

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Rank all layers by this iteration's confidences."""
        factors = np.ones(sum(len(span.token_ids) for span in spans))
        for span, place in zip(spans, span_slices(spans), strict=True):
            factors[place] = self._stability[confidence_bins(span.confidences)]
            if span.phase is Phase.DENOISE and span.next_start == span.start and len(span.next_token_ids):
                self._confidences[span.request] = span.start, span.confidences
            else:
                self._confidences.pop(span.request, None)
        while len(self._confidences) > _MAX_REQUESTS:  # a cancelled request never ends
            self._confidences.pop(next(iter(self._confidences)))
        for use in self._uses.values():
            self._rank(use, factors)
        if any(span.next_start != span.start for span in spans):
            self._priority *= self._boundary
        self._settled = self._priority.copy()
        self._uses = {}

    def _rank(self, use: LayerUse, factors: np.ndarray) -> None:
        gains = (factors[:, None] * use.weights**self._gamma)[use.votes]
        gained = np.bincount(use.expert_ids[use.votes].ravel(), gains.ravel(), minlength=self.shape.num_experts)
        self._priority[use.layer] = self._decay * self._settled[use.layer] + gained

    def _expected(self, span: SpanInput) -> np.ndarray:
        """Phi of each token by the last confidences of its block; a fresh mask has the lowest one."""
        start, confidences = self._confidences.get(span.request, (-1, np.ones(0)))
        if span.phase is not Phase.DENOISE or start != span.start:
            confidences = np.where(span.masked, 0.0, 1.0)
        found: np.ndarray = self._stability[confidence_bins(confidences)]
        return found
