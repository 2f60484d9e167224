"""What the decoder's next forward needs stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.foresight.need import NeedModel, joined
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse, span_slices


class Foresight(Retention):
    """Ranks by the predicted need of the next denoising forward; see `NeedModel`.

    Within a forward a layer is ranked as soon as its routing is known; the tokens that masks are about to take
    are then guessed from the iteration before. When the logits are known, so is the next input, and all layers
    are ranked again. Of a prompt any expert may stay, as all of them pass by. With a profile the slots are filled
    beforehand, by what blocks need as a rule.
    """

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        self.preload = context.profile is not None
        self._model = NeedModel(context.statistics())
        size = (context.shape.num_layers, context.shape.num_experts)
        self._need = np.zeros(size)
        self._typical = np.stack([self._model.typical(layer) for layer in range(size[0])])
        self._need += self._typical
        self._spans: Sequence[SpanInput] = ()
        self._routings: dict[int, np.ndarray] = {}

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Keep the inputs; the layers come one by one."""
        self._spans = spans

    def observe(self, use: LayerUse) -> None:
        """Rank the layer for the next forward."""
        layer = use.layer
        self._routings[layer] = use.expert_ids
        parts = []
        for span, place in zip(self._spans, span_slices(self._spans), strict=True):
            parts.append(self._model.before_logits(layer, span, use.expert_ids[place]))
        self._need[layer] = joined(parts, self.shape.num_experts) if parts else use.active
        self._need[layer] += self._typical[layer]

    def admits(self, use: LayerUse) -> np.ndarray:
        """Every active expert."""
        return use.active

    def priority(self, layers: slice) -> np.ndarray:
        """Need, and a little of what blocks need as a rule."""
        return self._need[layers]

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Learn from the forward, and rank every layer for the next input."""
        places = span_slices(spans)
        ids = np.stack([self._routings[layer] for layer in range(self.shape.num_layers)])
        for span, place in zip(spans, places, strict=True):
            self._model.statistics.take(span, ids[:, place])
        going_on = [pair for pair in zip(spans, places, strict=True) if len(pair[0].next_token_ids)]
        for layer in range(self.shape.num_layers if spans else 0):
            self._typical[layer] = self._model.typical(layer)
            parts = [self._model.after_logits(layer, span, ids[layer, place]) for span, place in going_on]
            if parts:
                self._need[layer] = joined(parts, self.shape.num_experts) + self._typical[layer]
