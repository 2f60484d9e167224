"""What the most similar token did in the layers to come: FineMoE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.retention.base import Retention
from relume.strategy.retention.bringing import LENGTH, MOST, CacheVisits, look_ahead, whole_number, worth_bringing
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import ExpertShape, LayerUse, last_block_votes

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool

#: Tokens that are remembered.
CAPACITY = 1000
#: Layers between what is known and what is predicted.
DISTANCE = 6


class MapStore:
    """Tokens and their expert maps: for each layer the probability of each expert, times `LENGTH`, rounded.

    Args:
        shape: of the model.
        capacity: tokens.
        semantic_weight: of token identity in redundancy; the map's similarity has the rest.

    Attributes:
        size: tokens so far.
        maps: `[layers, capacity, E]` float32.
    """

    def __init__(self, shape: ExpertShape, capacity: int, semantic_weight: float) -> None:
        self.size = 0
        self.maps = np.zeros((shape.num_layers, capacity, shape.num_experts), dtype=np.float32)
        self._semantic_weight = semantic_weight
        self._token_ids = np.full(capacity, -1, dtype=np.int64)
        self._added = np.zeros(capacity, dtype=np.int64)  # forward in which it came
        self._clock = 0
        self._squares = np.zeros((shape.num_layers, capacity))  # of the length of the map up to a layer

    def products(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """`[tokens, size]` of that layer's `rows` `[tokens, E]` with those of all maps; exact."""
        found: np.ndarray = rows @ self.maps[layer, : self.size].T
        return found

    def cosines(self, products: np.ndarray, layer: int) -> np.ndarray:
        """`[tokens, size]`, times the length of the token's own map; `products` are summed up to `layer`."""
        found: np.ndarray = products / np.sqrt(np.maximum(1.0, self._squares[layer, : self.size]))
        return found

    def same_token(self, token_ids: np.ndarray) -> np.ndarray:
        """Index of the latest map of each token that has one."""
        if not self.size:
            return np.zeros(0, dtype=np.int64)
        same = token_ids[:, None] == self._token_ids[: self.size]
        same = same[same.any(axis=1)]
        newest: np.ndarray = np.where(same, self._added[: self.size], -1).argmax(axis=1)
        return newest

    def add(self, token_ids: np.ndarray, maps: np.ndarray, cosines: np.ndarray) -> None:
        """Remember tokens with their maps `[layers, tokens, E]`; if there is no room, for the most redundant ones.

        Args:
            token_ids: `[tokens]`.
            maps: theirs.
            cosines: `[tokens, size]`, of whole maps with those of the store as it is.
        """
        self._clock += 1
        num_free = min(len(self._token_ids) - self.size, len(token_ids))
        token_of = dict(zip(range(self.size, self.size + num_free), range(num_free), strict=True))
        if self.size:
            same = token_ids[:, None] == self._token_ids[: self.size]
            redundancy = self._semantic_weight * same + (1.0 - self._semantic_weight) * cosines
            for token, index in enumerate(redundancy[num_free:].argmax(axis=1).tolist(), start=num_free):
                token_of[index] = token
        places, tokens = list(token_of.keys()), list(token_of.values())
        self.maps[:, places] = maps[:, tokens]
        self._squares[:, places] = (maps[:, tokens].astype(np.float64) ** 2).sum(axis=2).cumsum(axis=0)
        self._token_ids[places] = token_ids[tokens]
        self._added[places] = self._clock
        self.size += num_free


class FineMoE(Retention, Prefetch):
    """Predicts each token by the one that was most like it so far; it is its own prefetch.

    FineMoE (arXiv 2502.05370, EuroSys '26). A store holds tokens with their embedding and expert map, each
    layer's probabilities. The first d layers are predicted by the token of the nearest embedding. After layer l
    the layers from l + d on are predicted by the map whose first rows are most similar, by their cosine, to what
    the token did in the layers 0..l. What is predicted most is brought first, with the decay of `look_ahead`.
    Ranks are visits in the cache * predicted probability, in floating point, where the code rounds it to nothing.
    A full store replaces the map most redundant by d / L * (similarity of embeddings) + (1 - d / L) * (that of
    maps).

    What a trace lacks is replaced:

    - there are no embeddings: the same token has similarity 1, any other 0. Of several entries of the token the
      latest counts; a token without any predicts nothing, instead of what a random one did;
    - there are no probabilities but those of the k chosen experts: their gate weights, normalised. The paper takes
      sorted experts until their probability exceeds 1 - similarity, but at least k: here that is always all k.

    Our choices:

    - d is 6 as there, but at most a third of the layers, and at least 1;
    - layer l + d is the first one predicted at layer l, as in later versions of the code. The one published with
      the paper begins at l + 1 + d, so it never predicts layer d;
    - predictions of a forward's tokens are added; only tokens that vote predict and are stored;
    - the next forward's first layers are predicted once its tokens are known, which is after the one before;
    - a forward's tokens are compared with the store as it was before, as in the code; where several would replace
      the same entry the last one does;
    - what the current layer uses is spared, and of what is predicted only what the pool would let in is brought;
      see `worth_bringing` and `CacheVisits`.

    It takes `4 * capacity * layers * E` bytes, 20 MB for LLaDA2.0-mini.

    Args:
        context: of the model.
        capacity: tokens that are remembered.
        distance: d.
        most: experts that are asked for at once.

    Raises:
        RelumeError: a parameter is no whole number, or too small.
    """

    def __init__(
        self,
        context: RetentionContext,
        capacity: float = CAPACITY,
        distance: float = DISTANCE,
        most: float = MOST,
    ) -> None:
        super().__init__(context.shape)
        num_layers = context.shape.num_layers
        most_distance = max(1, num_layers // 3)
        self._distance = min(whole_number("finemoe", "distance", distance), most_distance)
        self._most = whole_number("finemoe", "most", most)
        weight = self._distance / num_layers
        self._store = MapStore(context.shape, whole_number("finemoe", "capacity", capacity), weight)
        self._token_ids = np.zeros(0, dtype=np.int64)  # of the forward, those that vote
        self._maps: list[np.ndarray] = []  # theirs, of the layers so far
        self._products = np.zeros((0, 0))
        self._squares = np.zeros(0)
        self._predicted = np.zeros((num_layers, context.shape.num_experts))
        self._visits = CacheVisits(context.shape)

    @staticmethod
    def num_bytes(shape: ExpertShape, capacity: float = CAPACITY) -> int:
        """Of the store."""
        return 4 * whole_number("finemoe", "capacity", capacity) * shape.num_layers * shape.num_experts

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Predict the first layers by the tokens."""
        self._token_ids = _voting([span.token_ids for span in spans], spans)
        self._maps = []
        self._products = np.zeros((len(self._token_ids), self._store.size))
        self._squares = np.zeros(len(self._token_ids))
        self._predict_first(self._token_ids)

    def observe(self, use: LayerUse) -> None:
        """Follow the tokens, and predict the layers from `distance` on by what is most similar so far."""
        self._visits.observe(use)
        layer, store = use.layer, self._store
        if not len(self._token_ids):
            return  # tokens that belong to no request
        rows = _map_rows(use)
        self._maps.append(rows)
        self._products += store.products(layer, rows)
        self._squares += (rows.astype(np.float64) ** 2).sum(axis=1)
        first = layer + self._distance
        if store.size and first < self.shape.num_layers:
            nearest = store.cosines(self._products, layer).argmax(axis=1)
            self._predicted[first:] = store.maps[first:, nearest].sum(axis=1, dtype=np.float64) / LENGTH

    def priority(self, layers: slice) -> np.ndarray:
        """See the class."""
        return self._visits.ranks(layers, self._predicted[layers])

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Remember the tokens, and predict the first layers by those of the next forward."""
        self._visits.end_forward()
        if self._maps:
            cosines = self._store.cosines(self._products, self.shape.num_layers - 1)
            cosines /= np.sqrt(np.maximum(1.0, self._squares))[:, None]
            self._store.add(self._token_ids, np.stack(self._maps), cosines)
        self._predict_first(_voting([span.next_token_ids for span in spans], spans))

    def wanted(self, layer: int | None, pool: ResidentPool, retention: Retention) -> list[Key]:
        """What the layers to come need by the prediction; see `Prefetch`."""
        self._visits.look(pool)
        scores = look_ahead(self._predicted, layer)
        if layer is None:
            scores[self._distance :] = 0.0  # that is the forward before's
        return worth_bringing(scores, retention.priority(slice(0, len(scores))), pool, self._most)

    def _predict_first(self, token_ids: np.ndarray) -> None:
        first = slice(0, self._distance)
        nearest = self._store.same_token(token_ids)
        self._predicted[first] = self._store.maps[first, nearest].sum(axis=1, dtype=np.float64) / LENGTH


def _voting(token_ids: Sequence[np.ndarray], spans: Sequence[SpanInput]) -> np.ndarray:
    """Of each span's tokens those of the last block, one after the other."""
    if not spans:
        return np.zeros(0, dtype=np.int64)
    votes = last_block_votes([len(ids) for ids in token_ids], [span.block_length for span in spans])
    found: np.ndarray = np.concatenate(token_ids)[votes]
    return found


def _map_rows(use: LayerUse) -> np.ndarray:
    """`[voting tokens, E]` float32, the layer's row of each token's map."""
    chosen, weights = use.expert_ids[use.votes].astype(np.int64), use.weights[use.votes].astype(np.float64)
    probabilities = weights / np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    places = (chosen + use.num_experts * np.arange(len(chosen))[:, None]).ravel()
    rows = np.bincount(places, probabilities.ravel(), minlength=len(chosen) * use.num_experts)
    found: np.ndarray = np.rint(LENGTH * rows).astype(np.float32).reshape(-1, use.num_experts)
    return found
