"""The state of a block under decoding, and what every decoder shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from relume.config import DecodingConfig, ModelConfig, require
from relume.decoding.candidates import propose

DEFAULT_POST_ITERATIONS = 16


@dataclass(frozen=True)
class BlockState:
    """A block between two iterations. Tensors have `block_length` entries and lie on the CPU.

    Attributes:
        tokens: int64; a masked position holds the mask token.
        masked: whether the position awaits a token. Not the same as holding the mask token: a user may write it.
        prompt: whether the position belongs to the prompt, which nothing changes.
        iteration: iterations done.
        post_iterations: those of them that began without (original) masks.
        finished: nothing is left to do.
        cache_is_final: the last forward's input was this very block, so its K/V are already right.
    """

    tokens: torch.Tensor
    masked: torch.Tensor
    prompt: torch.Tensor
    iteration: int = 0
    post_iterations: int = 0
    finished: bool = False
    cache_is_final: bool = False


@dataclass(frozen=True)
class Step:
    """What one iteration did.

    Attributes:
        state: the block afterwards.
        committed: positions, before any shift, whose mask took a token.
        edited: positions, before any shift, whose token changed.
        candidates: `[block_length]` int64, each position's most likely token; itself where none was asked for.
        confidence: `[block_length]` float32 of the candidates; NaN where none was asked for.
    """

    state: BlockState
    committed: torch.Tensor
    edited: torch.Tensor
    candidates: torch.Tensor
    confidence: torch.Tensor


class Decoder(ABC):
    """Decides, from a block's logits, which positions change. Holds configuration only; state is passed."""

    name: ClassVar[str]
    default_threshold: ClassVar[float] = 0.95
    #: Options of `DecodingConfig` that belong to other decoders.
    without: ClassVar[tuple[str, ...]]

    def __init__(self, decoding: DecodingConfig, model: ModelConfig) -> None:
        require(
            model.mask_token_id is not None,
            "the checkpoint names no mask token: add mask_token_id to its config.json",
        )
        assert model.mask_token_id is not None
        self.mask_token_id = model.mask_token_id
        self.block_length = decoding.block_length or model.block_length
        self.iterations = decoding.iterations or self.block_length
        require(
            self.iterations <= self.block_length,
            f"iterations is {self.iterations}: it must be at most block_length ({self.block_length})",
        )
        for option in self.without:
            require(getattr(decoding, option) is None, f"the decoder {self.name} has no {option}: leave it out")
        self.config = decoding
        posts = decoding.max_post_iterations
        self.max_post_iterations = DEFAULT_POST_ITERATIONS if posts is None else posts
        self.threshold = self.default_threshold if decoding.threshold is None else decoding.threshold
        self.eos_token_ids = () if decoding.ignore_eos else model.eos_token_ids

    def begin(self, tokens: torch.Tensor) -> BlockState:
        """A fresh block whose first `len(tokens)` positions are the prompt's tail."""
        canvas = torch.full((self.block_length,), self.mask_token_id)
        canvas[: len(tokens)] = tokens
        prompt = torch.arange(self.block_length) < len(tokens)
        return BlockState(canvas, ~prompt, prompt)

    def rows(self, state: BlockState) -> torch.Tensor:
        """Positions whose logits the next step needs, ascending: everything outside the prompt."""
        return (~state.prompt).nonzero().flatten()

    @abstractmethod
    def step(self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None) -> Step:
        """One iteration.

        Args:
            state: the block that the forward saw.
            logits: `[len(rows(state)), vocab]` float32.
            uniforms: `[block_length]` float64 random numbers, needed when the temperature is positive.
        """

    def propose(
        self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None, excluded: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates and confidences of the whole block; outside `rows` the token itself and NaN.

        The mask token is never a candidate; `excluded` are further ones that are not.
        """
        rows = self.rows(state)
        draws = None if uniforms is None else uniforms[rows]
        candidates, confidence = state.tokens.clone(), torch.full(state.tokens.shape, float("nan"))
        banned = (self.mask_token_id, *excluded)
        candidates[rows], confidence[rows] = propose(logits, banned, self.config, draws)
        return candidates, confidence

    def quota(self, iteration: int) -> int:
        """Least number of commits in an iteration: the block spread evenly over `iterations`."""
        if iteration >= self.iterations:
            return self.block_length
        return self.block_length // self.iterations + (iteration < self.block_length % self.iterations)


def select_commits(masked: torch.Tensor, confidence: torch.Tensor, threshold: float, floor: int) -> torch.Tensor:
    """Masked positions to commit, as bools: all above the threshold, but at least the `floor` most confident.

    Ties go to the lowest position.
    """
    high = masked & (confidence > threshold)
    if int(high.sum()) >= floor:
        return high
    ranked = torch.where(masked, confidence, float("-inf")).sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(masked)
    chosen[ranked[: min(floor, int(masked.sum()))]] = True
    return chosen
