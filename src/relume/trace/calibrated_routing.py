"""Latent scores that route like a trained model: what `calibrated` decodes with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relume.core import RelumeError
from relume.strategy.use import ExpertShape

#: LLaDA2 multiplies the normalised weights by this.
_WEIGHT_SCALE = 2.5


@dataclass(frozen=True)
class Scales:
    """How much each latent moves a router score; found by random search against `calibrated.TARGETS`.

    Attributes:
        popular: spread of the experts' general popularity (Gumbel).
        favourite, num_favourites: added to the first of a layer's experts that nearly all tokens use, falling to
            nothing over so many.
        depth: how far the spread of tokens varies from layer to layer.
        topic, block: of the request's topic and of what a block is about.
        token, mask: of the token's identity, and of being a mask.
        place_masked, place_known: of the position within its block: what stands around it.
        noise_masked, noise_known: drawn anew in every forward.
    """

    popular: float = 1.14
    favourite: float = 3.4
    num_favourites: float = 4.3
    depth: float = 0.15
    topic: float = 0.3
    block: float = 0.85
    token: float = 2.1
    mask: float = 0.34
    place_masked: float = 1.56
    place_known: float = 0.65
    noise_masked: float = 0.2
    noise_known: float = 0.09


class LatentRouter:
    """Routes tokens by (layer, token id, topic, place), so knowing a token's identity tells of its experts.

    Args:
        shape: of the model.
        groups: of experts, and how many of them a token uses: `(8, 4)` in LLaDA2, `(1, 1)` for none.
        vocab_size: ids below it are text, the id itself is the mask.
        num_topics: that a request may have.
        scales: of the latents.
        generator: of all draws.
    """

    def __init__(
        self,
        shape: ExpertShape,
        groups: tuple[int, int],
        vocab_size: int,
        num_topics: int,
        scales: Scales,
        generator: np.random.Generator,
    ) -> None:
        num_groups, kept_groups = groups
        if num_groups < 1 or shape.num_experts % num_groups or not 1 <= kept_groups <= num_groups:
            raise RelumeError(
                f"{kept_groups} of {num_groups} groups of {shape.num_experts} experts: the number of groups must "
                "divide that of the experts"
            )
        if shape.top_k > kept_groups * (shape.num_experts // num_groups):
            raise RelumeError(
                f"a token cannot use {shape.top_k} experts of {kept_groups} groups of "
                f"{shape.num_experts // num_groups}: take more experts or fewer groups"
            )
        self.shape = shape
        self.mask_token_id = vocab_size
        self._groups = groups
        self._scales = scales
        self._generator = generator
        layers, experts = shape.num_layers, shape.num_experts
        rank = generator.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1)
        favour = np.maximum(0.0, 1.0 - rank / scales.num_favourites)
        popular = scales.popular * generator.gumbel(size=(layers, experts)) + scales.favourite * favour
        self._popular = popular.astype(np.float32)
        self._depth = generator.uniform(1.0 - scales.depth, 1.0 + scales.depth, (layers, 1, 1)).astype(np.float32)
        self._topics = self.latent(num_topics)
        self._tokens = self.latent(vocab_size + 1)

    def latent(self, count: int) -> np.ndarray:
        """`[layers, count, E]` standard normal draws, one vector for each of `count` things."""
        size = (self.shape.num_layers, count, self.shape.num_experts)
        return self._generator.standard_normal(size, dtype=np.float32)

    def route(
        self, token_ids: np.ndarray, masked: np.ndarray, topic: int, block: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One forward of one request.

        Args:
            token_ids: `[tokens]`.
            masked: `[tokens]` bool.
            topic: of the request.
            block, place: `[layers, tokens, E]` latents of each token's block and position.

        Returns:
            Expert ids `[layers, tokens, k]` uint16 in routing order, and weights likewise, float32.
        """
        scales = self._scales
        by_token = np.where(masked, scales.mask, scales.token).astype(np.float32)[:, None]
        by_place = np.where(masked, scales.place_masked, scales.place_known).astype(np.float32)[:, None]
        by_noise = np.where(masked, scales.noise_masked, scales.noise_known).astype(np.float32)[:, None]
        scores = self._tokens[:, token_ids] * by_token
        scores += place * by_place
        scores += self.latent(len(token_ids)) * by_noise
        scores *= self._depth
        scores += self._popular[:, None] + scales.topic * self._topics[:, topic, None]
        scores += scales.block * block
        return self._choose(scores)

    def _choose(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Group-limited top-k, weights as in LLaDA2."""
        num_groups, kept_groups = self._groups
        if num_groups > 1:
            grouped = scores.reshape(*scores.shape[:2], num_groups, -1)
            best = np.partition(grouped, -2, axis=-1)[..., -2:].sum(axis=-1)
            dropped = best.argpartition(num_groups - kept_groups - 1, axis=-1)[..., : num_groups - kept_groups]
            np.put_along_axis(grouped, dropped[..., None], -np.inf, axis=2)
        ids = scores.argpartition(-self.shape.top_k, axis=-1)[..., -self.shape.top_k :]
        chosen = np.take_along_axis(scores, ids, axis=-1)
        order = np.argsort(-chosen, axis=-1, kind="stable")
        ids, chosen = np.take_along_axis(ids, order, axis=-1), np.take_along_axis(chosen, order, axis=-1)
        gates = 1.0 / (1.0 + np.exp(-chosen))
        return ids.astype(np.uint16), _WEIGHT_SCALE * gates / gates.sum(axis=-1, keepdims=True)
