"""LLaDA2.1: masks become tokens and committed tokens may change, in one forward."""

from __future__ import annotations

import dataclasses

import torch

from relume.config import DecodingConfig, ModelConfig
from relume.decoding.block import BlockState, Decoder, Step, select_commits
from relume.decoding.candidates import propose

#: The published (threshold, edit_threshold) of the two modes.
MODES = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}


class JointDecoder(Decoder):
    """Commits by `threshold`, edits by `edit_threshold`, until an iteration changes nothing."""

    def __init__(self, decoding: DecodingConfig, model: ModelConfig) -> None:
        super().__init__(decoding, model)
        threshold, edit_threshold = MODES[decoding.mode]
        self.threshold = threshold if decoding.threshold is None else decoding.threshold
        self.edit_threshold = edit_threshold if decoding.edit_threshold is None else decoding.edit_threshold

    def rows(self, state: BlockState) -> torch.Tensor:
        """Everything outside the prompt."""
        return (~state.prompt).nonzero().flatten()

    def step(self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None) -> Step:
        """Commit and edit from the same logits."""
        rows = self.rows(state)
        draws = None if uniforms is None else uniforms[rows]
        values, confidences = propose(logits, (self.mask_token_id,), self.config, draws)
        candidates, confidence = state.tokens.clone(), torch.full(state.tokens.shape, float("nan"))
        candidates[rows], confidence[rows] = values, confidences
        commits = select_commits(state.masked, confidence, self.threshold, floor=1)
        edits = select_edits(state, candidates, confidence, self.edit_threshold)

        had_masks = bool(state.masked.any())
        masked = state.masked & ~commits
        post_iterations = state.post_iterations + (not had_masks)
        after = dataclasses.replace(
            state,
            tokens=torch.where(commits | edits, candidates, state.tokens),
            masked=masked,
            iteration=state.iteration + 1,
            post_iterations=post_iterations,
            finished=not bool(masked.any())
            and ((not had_masks and not bool(edits.any())) or post_iterations >= self.config.max_post_iterations),
            cache_is_final=not bool((commits | edits).any()),
        )
        return Step(after, commits.nonzero().flatten(), edits.nonzero().flatten(), confidence)


def select_edits(
    state: BlockState, candidates: torch.Tensor, confidence: torch.Tensor, edit_threshold: float
) -> torch.Tensor:
    """Generated, unmasked positions whose candidate differs and is confident enough, as bools."""
    editable = ~state.masked & ~state.prompt
    return editable & (candidates != state.tokens) & (confidence > edit_threshold)
