"""Sample canvases: what a decode looks like from iteration to iteration, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relume.config import ModelConfig

#: Mean tokens that LLaDA2.0-mini commits in a forward of a 32-token block, as published.
TOKENS_PER_ITERATION = 2.6
_TEXT = (
    "Write a short story about a lighthouse keeper who collects letters from the sea. "
    "How many apples are left when Mia eats 3 of 12 and gives half of the rest away? "
    "def mean(values): return sum(values) / len(values) "
    "The capital of France is Paris, and the river that crosses it is the Seine. "
)
_TOKEN_GOAL = 1500


def expected_commits(block_length: int) -> float:
    """Tokens that an iteration should commit: as published for 32, 1 for a block of 1, linear through both."""
    return 1.0 + (TOKENS_PER_ITERATION - 1.0) * (block_length - 1) / 31


@dataclass(frozen=True)
class Canvas:
    """A prompt of whole blocks and the block after it, before and after some iterations.

    Attributes:
        prompt: `[p]` int64.
        blocks: `[snapshots, block_length]` int64; two snapshots that follow each other are one iteration apart.
        masked: `[snapshots, block_length]` bool.
    """

    prompt: torch.Tensor
    blocks: torch.Tensor
    masked: torch.Tensor

    @property
    def num_pairs(self) -> int:
        """Pairs of adjacent iterations: snapshots 0 and 1, 2 and 3, ..."""
        return len(self.blocks) // 2


def make_canvases(config: ModelConfig, special: tuple[int, ...], generator: torch.Generator) -> list[Canvas]:
    """Canvases with random tokens: half of the prompts are English bytes, half any ids."""
    allowed = torch.ones(config.vocab_size, dtype=torch.bool)
    allowed[list(special)] = False
    ids = allowed.nonzero().flatten()
    block = config.block_length
    commits = expected_commits(block)
    num_pairs = min(4, max(1, int(block / commits)))
    per_canvas = 2 * num_pairs * block + 120
    canvases = []
    for index in range(max(4, min(24, _TOKEN_GOAL // per_canvas))):
        length = block * max(1, 32 * 2 ** (index % 4) // block)  # 32 to 256 positions
        if index % 2 and config.vocab_size > 300:
            start = int(torch.randint(len(_TEXT) - length if len(_TEXT) > length else 1, (), generator=generator))
            text = (_TEXT * (2 + length // len(_TEXT))).encode()
            prompt = torch.tensor(list(text[start : start + length]))
        else:
            prompt = ids[torch.randint(len(ids), (length,), generator=generator)]
        answer = ids[torch.randint(len(ids), (block,), generator=generator)]
        order = torch.randperm(block, generator=generator)
        masked = []
        for pair in range(num_pairs):
            done = block * pair / num_pairs
            for committed in (round(done), min(block, max(round(done) + 1, round(done + commits)))):
                mask = torch.ones(block, dtype=torch.bool)
                mask[order[:committed]] = False
                masked.append(mask)
        where = torch.stack(masked)
        assert config.mask_token_id is not None
        canvases.append(Canvas(prompt, torch.where(where, config.mask_token_id, answer), where))
    return canvases
