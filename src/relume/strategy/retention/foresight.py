"""What the decoder's next forward needs stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.foresight.need import NeedModel, Outlook
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse, span_slices


class Foresight(Retention):
    """Ranks by the predicted need of the next denoising forward, and by recent use for what lies beyond it.

    Within a forward a layer is ranked as soon as its routing is known; the tokens that masks are about to take
    are then guessed from the iteration before. When the logits are known, so is the next input, and all layers
    are ranked again (see `NeedModel`). Of a prompt any expert may stay, as all of them pass by. With a profile the
    slots are filled beforehand, by what blocks need as a rule.

    Args:
        context: of the model; its profile's counts are where the prediction starts from.
        recent: weight of recent use, an exponential mean of whether voting tokens used an expert.
        decay: of that mean, in 0..1.
    """

    def __init__(self, context: RetentionContext, recent: float = 0.8, decay: float = 0.7) -> None:
        super().__init__(context.shape)
        self.preload = context.profile is not None
        self._model = NeedModel(context.statistics())
        self._weight, self._decay = recent, decay
        layers = range(context.shape.num_layers)
        self._typical = np.stack([self._model.typical(layer) for layer in layers])
        self._recent = np.zeros_like(self._typical)
        self._ranks = self._typical.copy()
        self._outlooks: list[Outlook] = []
        self._places: list[slice] = []
        self._routings: dict[int, np.ndarray] = {}

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Look out for what follows; the layers come one by one."""
        self._outlooks = [self._model.before_logits(span) for span in spans]
        self._places = span_slices(spans)

    def observe(self, use: LayerUse) -> None:
        """Rank the layer for the next forward."""
        layer = use.layer
        self._routings[layer] = use.expert_ids
        self._recent[layer] *= self._decay
        self._recent[layer] += (1.0 - self._decay) * (use.counts > 0)
        ids = [use.expert_ids[place] for place in self._places]
        outlooks = list(zip(self._outlooks, ids, strict=True))
        self._rank(layer, self._model.needs(layer, outlooks) if outlooks else use.active)

    def admits(self, use: LayerUse) -> np.ndarray:
        """Every active expert."""
        return use.active

    def priority(self, layers: slice) -> np.ndarray:
        """Need, recent use, and a little of what blocks need as a rule."""
        return self._ranks[layers]

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Learn from the forward, and rank every layer for the next input."""
        if not spans:
            return
        ids = np.stack([self._routings[layer] for layer in range(self.shape.num_layers)])
        pairs = list(zip(spans, span_slices(spans), strict=True))
        for span, place in pairs:
            self._model.statistics.take(span, ids[:, place])
        going_on = [(self._model.after_logits(s), place) for s, place in pairs if len(s.next_token_ids)]
        for layer in range(self.shape.num_layers if going_on else 0):
            self._typical[layer] = self._model.typical(layer)
            self._rank(layer, self._model.needs(layer, [(outlook, ids[layer, p]) for outlook, p in going_on]))

    def _rank(self, layer: int, need: np.ndarray) -> None:
        self._ranks[layer] = need + self._typical[layer] + self._weight * self._recent[layer]
