"""What finished requests of the same kind used next: MoE-Infinity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.retention.base import Retention
from relume.strategy.retention.bringing import LENGTH, MOST, CacheVisits, look_ahead, whole_number, worth_bringing
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import ExpertShape, LayerUse, span_slices

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool

#: Finished requests that are remembered.
CAPACITY = 1000
#: Requests that may be under way; those not seen for longest are forgotten, as a cancelled one never ends.
MAX_REQUESTS = 64


class Activation:
    """One request's expert activation matrix so far, and how similar each remembered one is.

    Attributes:
        counts: `[layers, E]` int64, tokens that used an expert, over all forwards.
        rows: `[layers, E]` float32, `counts` with every row that is not empty of length `LENGTH`, rounded.
        products: `[layers, capacity]` float32, of each row with that of each remembered request.
        similarity: `[capacity]` float64, their sum: up to a constant the mean cosine of the rows.
    """

    def __init__(self, shape: ExpertShape, capacity: int) -> None:
        size = (shape.num_layers, shape.num_experts)
        self.counts = np.zeros(size, dtype=np.int64)
        self.rows = np.zeros(size, dtype=np.float32)
        self.products = np.zeros((shape.num_layers, capacity), dtype=np.float32)
        self.similarity = np.zeros(capacity)

    def add(self, layer: int, counts: np.ndarray, remembered: np.ndarray) -> None:
        """A forward's `counts` `[E]` of one layer; `remembered` `[n, E]` are that layer's rows."""
        total = self.counts[layer]
        total += counts
        self.rows[layer] = np.rint(LENGTH * total / np.sqrt(max(1.0, float(total @ total))))
        products = self.products[layer, : len(remembered)]
        self.similarity[: len(remembered)] -= products
        products[:] = remembered @ self.rows[layer]
        self.similarity[: len(remembered)] += products

    def replaced(self, index: int, rows: np.ndarray) -> None:
        """The remembered request `index` is another one now, of `rows` `[layers, E]`."""
        self.products[:, index] = (self.rows.astype(np.float64) * rows).sum(axis=1)
        self.similarity[index] = self.products[:, index].sum(dtype=np.float64)


class MoEInfinity(Retention, Prefetch):
    """Predicts by the most similar finished request; it is its own prefetch.

    MoE-Infinity (arXiv 2401.14361) as its paper has it; the published code differs, and leaves most of it off.
    Every request has an expert activation matrix (EAM), `[layers, E]` counts of tokens. After each layer it is
    compared with those of finished requests, by the mean cosine of the rows seen so far, and the most similar one
    predicts the layers to come, with the decay of `look_ahead`. What is predicted most is brought first. Ranks are
    visits in the cache * predicted share * (1 - l / L): first layers, which prefetching serves worst, weigh more.
    What the current layer uses is spared.

    Our choices:

    - the EAM counts all tokens of all forwards, a prompt's too, and rows of earlier forwards are compared as well;
    - a prediction is each row's share of its sum; those of a forward's requests are added;
    - after a forward, requests that go on predict all layers of the next one;
    - if the collection is full, a finished request replaces the one most similar to it;
    - no match, no prediction: the visits decide;
    - of what is predicted, only what the pool would let in is brought; see `worth_bringing` and `CacheVisits`.

    It takes `4 * capacity * layers * E` bytes, 20 MB for LLaDA2.0-mini, besides 0.15 MB for each open request.

    Args:
        context: of the model.
        capacity: finished requests that are remembered.
        most: experts that are asked for at once.

    Raises:
        RelumeError: a parameter is no whole number, or too small.
    """

    def __init__(self, context: RetentionContext, capacity: float = CAPACITY, most: float = MOST) -> None:
        super().__init__(context.shape)
        shape = context.shape
        self._capacity = whole_number("moe-infinity", "capacity", capacity)
        self._most = whole_number("moe-infinity", "most", most)
        size = (shape.num_layers, self._capacity, shape.num_experts)
        self._remembered = np.zeros(size, dtype=np.float32)
        self._num_remembered = 0
        self._open: OrderedDict[int, Activation] = OrderedDict()
        self._current: list[Activation] = []  # of the forward's requests, in order
        self._places: list[slice] = []
        self._matches: list[int] = []
        self._predicted = np.zeros((shape.num_layers, shape.num_experts))
        self._visits = CacheVisits(shape)
        self._first_more = 1.0 - np.arange(shape.num_layers)[:, None] / shape.num_layers

    @staticmethod
    def num_bytes(shape: ExpertShape, capacity: float = CAPACITY) -> int:
        """Of the collection."""
        return 4 * whole_number("moe-infinity", "capacity", capacity) * shape.num_layers * shape.num_experts

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Find the requests' matrices."""
        self._places = span_slices(spans)
        self._current = []
        for span in spans:
            if span.request not in self._open:
                self._open[span.request] = Activation(self.shape, self._capacity)
            self._open.move_to_end(span.request)
            self._current.append(self._open[span.request])
        while len(self._open) > max(MAX_REQUESTS, len(spans)):
            self._open.popitem(last=False)
        self._predict(self._current)

    def observe(self, use: LayerUse) -> None:
        """Add the layer to the matrices, and match them anew."""
        self._visits.observe(use)
        remembered = self._remembered[use.layer, : self._num_remembered]
        for activation, place in zip(self._current, self._places, strict=True):
            counts = np.bincount(use.expert_ids[place].ravel(), minlength=self.shape.num_experts)
            activation.add(use.layer, counts, remembered)
        self._predict(self._current)

    def priority(self, layers: slice) -> np.ndarray:
        """See the class."""
        return self._visits.ranks(layers, self._predicted[layers] * self._first_more[layers])

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Remember the requests that ended; the others predict their next forward."""
        self._visits.end_forward()
        going_on = []
        for span in spans:
            if len(span.next_token_ids):
                going_on.append(self._open[span.request])
            else:
                self._remember(self._open.pop(span.request))
        self._predict(going_on)

    def wanted(self, layer: int | None, pool: ResidentPool, retention: Retention) -> list[Key]:
        """What the layers to come need by the prediction; see `Prefetch`."""
        self._visits.look(pool)
        ranks = retention.priority(slice(0, self.shape.num_layers))
        return worth_bringing(look_ahead(self._predicted, layer), ranks, pool, self._most)

    def _predict(self, activations: list[Activation]) -> None:
        """Take the matches of these requests together."""
        known = slice(0, self._num_remembered)
        seen = [activation for activation in activations if activation.counts.any()] if known.stop else []
        matches = [int(activation.similarity[known].argmax()) for activation in seen]
        if matches != self._matches:
            self._matches = matches
            self._predicted = np.zeros_like(self._predicted)
            for match in matches:
                rows = self._remembered[:, match]
                self._predicted += rows / np.maximum(1.0, rows.sum(axis=1, keepdims=True, dtype=np.float64))

    def _remember(self, ended: Activation) -> None:
        if self._num_remembered < self._capacity:
            index = self._num_remembered
            self._num_remembered += 1
        else:
            index = int(ended.similarity.argmax())
        self._remembered[:, index] = ended.rows
        self._matches = []
        self._predicted = np.zeros_like(self._predicted)
        for activation in self._open.values():
            activation.replaced(index, ended.rows)
