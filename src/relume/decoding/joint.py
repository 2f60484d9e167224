"""LLaDA2.1: masks become tokens and committed tokens may change, in one forward."""

from __future__ import annotations

import dataclasses

import torch

from relume.config import DecodingConfig, JointMode, ModelConfig
from relume.decoding.block import BlockState, Decoder, Step, select_commits

#: The published (threshold, edit_threshold) of the two modes.
MODES: dict[JointMode, tuple[float, float]] = {"quality": (0.7, 0.5), "speed": (0.5, 0.0)}


class JointDecoder(Decoder):
    """Commits by `threshold`, edits by `edit_threshold`, until an iteration changes nothing."""

    name = "joint"
    without = ("iterations", "eos_early_stop")

    def __init__(self, decoding: DecodingConfig, model: ModelConfig) -> None:
        super().__init__(decoding, model)
        threshold, edit_threshold = MODES[decoding.mode or "quality"]
        self.threshold = threshold if decoding.threshold is None else decoding.threshold
        self.edit_threshold = edit_threshold if decoding.edit_threshold is None else decoding.edit_threshold

    def step(self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None) -> Step:
        """Commit and edit from the same logits."""
        candidates, confidence = self.propose(state, logits, uniforms)
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
            and ((not had_masks and not bool(edits.any())) or post_iterations >= self.max_post_iterations),
            cache_is_final=not bool((commits | edits).any()),
        )
        return Step(after, commits.nonzero().flatten(), edits.nonzero().flatten(), candidates, confidence)


def select_edits(
    state: BlockState, candidates: torch.Tensor, confidence: torch.Tensor, edit_threshold: float
) -> torch.Tensor:
    """Generated, unmasked positions whose candidate differs and is confident enough, as bools."""
    editable = ~state.masked & ~state.prompt
    return editable & (candidates != state.tokens) & (confidence > edit_threshold)
