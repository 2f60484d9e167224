"""One request of a calibrated trace, from its prompt to its last block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from relume.core import Phase, SpanSignals
from relume.trace.calibrated_routing import LatentRouter
from relume.trace.record import ForwardRecord

#: Mean commits of an iteration beyond the first one, masks permitting; with the short last ones that makes 2.6.
_MORE_COMMITS = 1.75
#: How much earlier positions are preferred to later ones, per position, against a standard normal draw.
_LEFT_FIRST = 0.15
_THRESHOLD = 0.9
_PREFILL_TOKENS = 512


@dataclass(frozen=True)
class CalibratedRequest:
    """Prefills, denoises and commits as the engine does.

    Attributes:
        number: of the request.
        router: of its tokens.
        generator: of all draws.
        topic: of the request.
        text: `[positions]` int64, whole blocks: the prompt and what will be decoded.
        prompt_length: of the prompt.
        block_length: of the blocks.
    """

    number: int
    router: LatentRouter
    generator: np.random.Generator
    topic: int
    text: np.ndarray
    prompt_length: int
    block_length: int

    def forwards(self) -> Iterator[ForwardRecord]:
        """All forwards in order."""
        decoded_from = self.prompt_length - self.prompt_length % self.block_length
        chunk = max(1, _PREFILL_TOKENS // self.block_length) * self.block_length
        for start in range(0, decoded_from, chunk):
            stop = min(start + chunk, decoded_from)
            after = (
                self.text[stop : min(stop + chunk, decoded_from)] if stop < decoded_from else self._open(stop)[0]
            )
            tokens = self.text[start:stop]
            none = np.zeros(len(tokens), dtype=bool)
            blocks = np.repeat(self.router.latent(len(tokens) // self.block_length), self.block_length, axis=1)
            latents = blocks, self.router.latent(len(tokens))
            yield self._forward(Phase.PREFILL, start, tokens, none, none, latents, stop, after)
        for start in range(decoded_from, len(self.text), self.block_length):
            yield from self._decode(start)

    def _decode(self, start: int) -> Iterator[ForwardRecord]:
        """Denoise a block, and commit it unless it is the last."""
        stop = start + self.block_length
        final = self.text[start:stop]
        tokens, masked = self._open(start)
        latents = self.router.latent(1), self.router.latent(self.block_length)
        nothing = np.empty(0, dtype=np.int64)
        while masked.any():
            commits = self._commits(masked)
            after = np.where(commits, final, tokens)
            ends = stop == len(self.text) and bool(commits[masked].all())
            following = nothing if ends else after
            yield self._forward(Phase.DENOISE, start, tokens, masked, commits, latents, start, following)
            tokens, masked = after, masked & ~commits
        if stop < len(self.text):
            following = self._open(stop)[0]
            yield self._forward(Phase.COMMIT, start, tokens, masked, masked, latents, stop, following)

    def _candidates(
        self, start: int, token_ids: np.ndarray, masked: np.ndarray, commits: np.ndarray, likely: np.ndarray
    ) -> np.ndarray:
        """Of masks: the final token as often as the confidence says, else any other of the text."""
        own = self.generator.spawn(1)[0]  # the other draws do not depend on these
        final = self.text[start : start + len(token_ids)]
        right = commits | (own.random(len(token_ids)) < likely)
        found = np.where(right, final, own.choice(self.text, size=len(token_ids)))
        return np.where(masked, found, token_ids)

    def _open(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and masks of a block before its first iteration; the first one begins with the prompt's tail."""
        masked = np.arange(start, start + self.block_length) >= self.prompt_length
        tokens = self.text[start : start + self.block_length]
        return np.where(masked, self.router.mask_token_id, tokens), masked

    def _commits(self, masked: np.ndarray) -> np.ndarray:
        """Which masks take a token: one and a few more, rather early than late in the block."""
        places = masked.nonzero()[0]
        count = 1 + int(self.generator.poisson(_MORE_COMMITS))
        delay = _LEFT_FIRST * places + self.generator.standard_normal(len(places))
        commits = np.zeros(len(masked), dtype=bool)
        commits[places[delay.argsort(kind="stable")[:count]]] = True
        return commits

    def _forward(
        self,
        phase: Phase,
        start: int,
        token_ids: np.ndarray,
        masked: np.ndarray,
        commits: np.ndarray,
        latents: tuple[np.ndarray, np.ndarray],
        next_start: int,
        next_token_ids: np.ndarray,
    ) -> ForwardRecord:
        expert_ids, weights = self.router.route(token_ids, masked, self.topic, *latents)
        drawn = self.generator.random(len(token_ids), dtype=np.float32)
        likely = np.where(commits, _THRESHOLD + (1.0 - _THRESHOLD) * drawn, _THRESHOLD * drawn)
        span = SpanSignals(
            request=self.number,
            phase=phase,
            start=start,
            block_length=self.block_length,
            token_ids=token_ids,
            masked=masked,
            candidates=self._candidates(start, token_ids, masked, commits, likely),
            confidences=np.where(masked, likely, 1.0).astype(np.float32),
            committed=commits,
            edited=np.zeros(len(token_ids), dtype=bool),
            next_start=next_start,
            next_token_ids=next_token_ids,
        )
        none = (np.empty(0, dtype=np.uint16),) * len(expert_ids)
        return ForwardRecord((span,), expert_ids, weights, misses=none, hosted=none, arrived=none)
