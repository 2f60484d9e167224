"""LLaDA2.0: commit every masked position whose confidence passes a threshold, at least the quota."""

from __future__ import annotations

import dataclasses

import torch

from relume.decoding.block import BlockState, Decoder, Step, select_commits


class ThresholdDecoder(Decoder):
    """Masks become tokens and stay; no token changes afterwards."""

    name = "threshold"
    without = ("mode", "edit_threshold", "max_post_iterations")

    def rows(self, state: BlockState) -> torch.Tensor:
        """The masked positions."""
        return state.masked.nonzero().flatten()

    def step(self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None) -> Step:
        """Commit by threshold and quota."""
        candidates, confidence = self.propose(state, logits, uniforms)
        commits = select_commits(state.masked, confidence, self.threshold, self.quota(state.iteration))
        tokens, masked = torch.where(commits, candidates, state.tokens), state.masked & ~commits
        after = dataclasses.replace(state, tokens=tokens, masked=masked, iteration=state.iteration + 1)
        finished = not bool(masked.any()) or self._text_has_ended(after)
        after = dataclasses.replace(after, finished=finished)
        nothing = torch.empty(0, dtype=torch.int64)
        return Step(after, commits.nonzero().flatten(), nothing, candidates, confidence)

    def _text_has_ended(self, state: BlockState) -> bool:
        """Whether an end of text was generated and nothing before it is masked."""
        if self.config.eos_early_stop is False:
            return False
        before_mask = state.masked.cumsum(dim=0) == 0
        generated = state.tokens[before_mask & ~state.prompt]
        return bool(torch.isin(generated, torch.tensor(self.eos_token_ids, dtype=torch.int64)).any())
