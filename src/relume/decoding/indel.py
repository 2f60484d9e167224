"""LLaDA2.2: like `joint`, and a candidate may be DELETE (drop the position) or SPLIT (open one before it)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from relume.config import DecodingConfig, ModelConfig, require
from relume.decoding.block import BlockState, Decoder, Step, select_commits
from relume.decoding.candidates import NEVER
from relume.decoding.joint import select_edits


@dataclass(frozen=True)
class IndelState(BlockState):
    """Adds what the loop guard and the budgets need.

    Attributes:
        original: masks that the block began with, as opposed to those that edits introduced.
        seen: contents of the block at the start of earlier iterations.
        written: (position, token) pairs written so far.
    """

    original: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    seen: frozenset[bytes] = frozenset()
    written: frozenset[tuple[int, int]] = frozenset()


class IndelDecoder(Decoder):
    """Commits, edits, deletes and splits, with a bounded number of iterations and a deterministic loop guard."""

    name = "indel"
    default_threshold = 0.5
    without = ("mode", "eos_early_stop")

    def __init__(self, decoding: DecodingConfig, model: ModelConfig) -> None:
        super().__init__(decoding, model)
        require(
            model.delete_token_id is not None and model.split_token_id is not None,
            "the decoder indel needs delete_token_id and split_token_id in config.json; "
            "use threshold or joint for this checkpoint",
        )
        assert model.delete_token_id is not None and model.split_token_id is not None
        self.delete_token_id, self.split_token_id = model.delete_token_id, model.split_token_id
        self.edit_threshold = 0.0 if decoding.edit_threshold is None else decoding.edit_threshold

    def begin(self, tokens: torch.Tensor) -> IndelState:
        """A fresh block; all its masks are original."""
        block = super().begin(tokens)
        return IndelState(block.tokens, block.masked, block.prompt, original=block.masked)

    def step(self, state: BlockState, logits: torch.Tensor, uniforms: torch.Tensor | None) -> Step:
        """One iteration, with the numbers of docs/decoding.md."""
        assert isinstance(state, IndelState)
        has_original = bool(state.original.any())
        post_iterations = state.post_iterations + (not has_original)  # 1
        budget = self.max_post_iterations
        final = (not has_original and post_iterations >= budget) or state.iteration >= self.block_length + budget

        excluded = (self.delete_token_id, self.split_token_id) if final else ()  # 2
        candidates, confidence = self.propose(state, logits, uniforms, excluded)

        if final or not has_original or state.iteration >= self.iterations:  # 3
            commits = state.masked
        else:
            floor = self.quota(state.iteration) + int(state.masked.sum() - state.original.sum())
            commits = select_commits(state.masked, confidence, self.threshold, floor)
        edits = select_edits(state, candidates, confidence, self.edit_threshold)  # 4
        changes = commits | edits

        content = state.tokens.numpy().tobytes() + state.masked.numpy().tobytes()
        if content in state.seen and not final and bool(changes.any()):  # 6
            candidates = self._diversify(state, candidates, confidence, changes, logits)
        positions = changes.nonzero().flatten().tolist()
        written = state.written.union((position, int(candidates[position])) for position in positions)

        after = self._write(state, changes, candidates)  # 7
        after = dataclasses.replace(
            after,
            iteration=state.iteration + 1,
            post_iterations=post_iterations,
            seen=state.seen | {content},
            written=written,
            finished=final or not positions,  # 5, 8
            cache_is_final=torch.equal(after.tokens, state.tokens),
        )
        return Step(after, commits.nonzero().flatten(), edits.nonzero().flatten(), candidates, confidence)

    def _diversify(
        self,
        state: IndelState,
        candidates: torch.Tensor,
        confidence: torch.Tensor,
        changes: torch.Tensor,
        logits: torch.Tensor,
    ) -> torch.Tensor:
        """Give the least confident changing position the best token that it has not taken before."""
        position = int(torch.where(changes, confidence, float("inf")).argmin())
        row = int((self.rows(state) == position).nonzero())
        untried = logits[row].clone()
        untried[[self.mask_token_id, *(token for where, token in state.written if where == position)]] = NEVER
        candidates = candidates.clone()
        candidates[position] = untried.argmax()
        return candidates

    def _write(self, state: IndelState, changes: torch.Tensor, candidates: torch.Tensor) -> IndelState:
        """Apply the candidates of the changing positions from left to right, then pad or cut to the block."""
        introduced = (self.mask_token_id, True, False)  # token, masked, original
        content: list[tuple[int, bool, bool]] = []
        old = zip(state.tokens.tolist(), state.masked.tolist(), state.original.tolist(), strict=True)
        for kept, changed, candidate in zip(old, changes.tolist(), candidates.tolist(), strict=True):
            if not changed:
                content.append(kept)
            elif candidate == self.split_token_id:
                content += [introduced, kept]
            elif candidate != self.delete_token_id:
                content.append((candidate, False, False))
        content += [introduced] * (self.block_length - len(content))
        tokens, masked, original = zip(*content[: self.block_length], strict=True)
        return dataclasses.replace(
            state, tokens=torch.tensor(tokens), masked=torch.tensor(masked), original=torch.tensor(original)
        )
