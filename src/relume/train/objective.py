"""The block-diffusion objective: which positions a training row holds, what they see and what they must predict.

A row is `[clean || noisy copies]`. A clean position sees its own and earlier clean blocks, as the K/V of
finished blocks do at inference. A noisy position sees its own block of its own copy and the earlier *clean*
blocks, as a block under decoding does. All copies share the positions of the text. Blocks that no loss
reaches are left out: the last clean one, and noisy ones that hold prompt only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from relume.train.config import ObjectiveConfig

PADDING = -1
CLEAN = 0


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, padded with end-of-text to whole blocks.

    Attributes:
        token_ids: `[length]` int64, a multiple of the block length.
        num_prompt: leading positions that belong to the prompt.
    """

    token_ids: torch.Tensor
    num_prompt: int

    def num_positions(self, block_length: int, copies: int) -> int:
        """Length of the row that the objective makes of it."""
        first = self.num_prompt // block_length * block_length
        return len(self.token_ids) - block_length + copies * (len(self.token_ids) - first)


@dataclass(frozen=True)
class Batch:
    """Rows of equal length; all tensors are `[rows, length]`.

    Attributes:
        token_ids: what the model reads; padding reads token 0.
        positions: in the text, for the rotary embedding.
        blocks: index of the block of the text; `PADDING` in padding.
        copies: `CLEAN`, the number of the noisy copy from 1, or `PADDING`.
        targets: the true token.
        loss_weights: float32, 0 where nothing is to be predicted.
        masked: whether the position reads the mask token.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    copies: torch.Tensor
    targets: torch.Tensor
    loss_weights: torch.Tensor
    masked: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same rows on `device`."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def attention_mask(blocks: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """Which position may see which, `[rows, length, length]` bool, from `[rows, length]` blocks and copies.

    Padding sees itself only, so that no softmax is empty.
    """
    query_block, key_block = blocks.unsqueeze(2), blocks.unsqueeze(1)
    query_copy, key_copy = copies.unsqueeze(2), copies.unsqueeze(1)
    # A clean query reaches up to its own block, a noisy one up to the block before; the rest is its own copy's.
    reach = torch.where(query_copy == CLEAN, query_block, query_block - 1)
    clean = (key_copy == CLEAN) & (key_block <= reach)
    own = (key_copy == query_copy) & (key_block == query_block) & (query_copy > CLEAN)
    padding = (query_copy == PADDING) & torch.eye(blocks.shape[1], dtype=torch.bool, device=blocks.device)
    return (clean & (query_copy != PADDING)) | own | padding


def make_batch(
    examples: Sequence[Example],
    config: ObjectiveConfig,
    block_length: int,
    mask_token_id: int,
    generator: torch.Generator,
) -> Batch:
    """Noise examples and lay them out; every draw comes from `generator`."""
    rows = [_make_row(example, config, block_length, mask_token_id, generator) for example in examples]
    longest = max(len(row["token_ids"]) for row in rows)
    fill = {"blocks": PADDING, "copies": PADDING}
    return Batch(
        **{
            name: torch.stack(
                [F.pad(row[name], (0, longest - len(row[name])), value=fill.get(name, 0)) for row in rows]
            )
            for name in rows[0]
        }
    )


def _make_row(
    example: Example,
    config: ObjectiveConfig,
    block_length: int,
    mask_token_id: int,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    tokens, length = example.token_ids, len(example.token_ids)
    assert length % block_length == 0 and example.num_prompt < length
    clean = length - block_length
    first = example.num_prompt // block_length * block_length
    positions = torch.arange(length)
    response = positions[first:] >= example.num_prompt
    truth = tokens[first:]
    parts = [(tokens[:clean], positions[:clean], torch.zeros(clean), torch.zeros(clean, dtype=torch.bool))]
    for _ in range(config.copies):
        masked, ratios = draw_masks(response, config, block_length, generator)
        wrong = draw_wrong(response & ~masked, config, block_length, generator)
        noisy = torch.where(masked, mask_token_id, truth)
        noisy = torch.where(wrong, draw_substitutes(truth, response, config, generator), noisy)
        weights = torch.where(masked | (noisy != truth), 1.0, config.visible_weight) * response
        if config.weight_by_ratio:
            weights = torch.where(masked, weights / ratios, weights)
        parts.append((noisy, positions[first:], weights, masked))
    copies = torch.cat([torch.full((len(part[0]),), index) for index, part in enumerate(parts)])
    all_positions = torch.cat([part[1] for part in parts])
    return {
        "token_ids": torch.cat([part[0] for part in parts]),
        "positions": all_positions,
        "blocks": all_positions // block_length,
        "copies": copies,
        "targets": tokens[all_positions],
        "loss_weights": torch.cat([part[2] for part in parts]),
        "masked": torch.cat([part[3] for part in parts]),
    }


def draw_masks(
    response: torch.Tensor, config: ObjectiveConfig, block_length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which response positions are masked, and the ratio with which each was drawn; both `[n]`.

    `response` `[n]` bool covers whole blocks. A share of the blocks is masked entirely, as a block is when its
    decoding begins; the others with a ratio between the bounds, at least one position a block that has any.
    """
    num_blocks = len(response) // block_length
    num_draws = num_blocks if config.mask_scope == "block" else 1
    low, high = config.mask_ratio
    ratios = low + (high - low) * torch.rand(num_draws, generator=generator)
    ratios[torch.rand(num_draws, generator=generator) < config.full_mask_share] = 1.0
    ratios = ratios.expand(num_blocks).repeat_interleave(block_length)
    draws = torch.rand(len(response), generator=generator)
    masked = (draws < ratios) & response
    lowest = torch.where(response, draws, 2.0).view(num_blocks, block_length)
    spare = lowest.argmin(dim=1) + torch.arange(num_blocks) * block_length
    masked[spare] = response[spare]
    return masked, ratios


def draw_wrong(
    visible: torch.Tensor, config: ObjectiveConfig, block_length: int, generator: torch.Generator
) -> torch.Tensor:
    """Which visible response positions `[n]` get a wrong token: few in some blocks, none in the others."""
    num_blocks = len(visible) // block_length
    affected = torch.rand(num_blocks, generator=generator) < config.wrong_share
    ratios = torch.rand(num_blocks, generator=generator) * config.wrong_ratio * affected
    return (torch.rand(len(visible), generator=generator) < ratios.repeat_interleave(block_length)) & visible


def draw_substitutes(
    truth: torch.Tensor, response: torch.Tensor, config: ObjectiveConfig, generator: torch.Generator
) -> torch.Tensor:
    """A token for every position `[n]`: another one of the same answer, or any printable byte.

    A draw may hit the true token; such a position is simply visible.
    """
    own = truth[response]
    from_answer = own[torch.randint(len(own), truth.shape, generator=generator)]
    anything = torch.randint(*config.substitutes, truth.shape, generator=generator)
    return torch.where(torch.rand(truth.shape, generator=generator) < 0.5, from_answer, anything)


def divergence(expected: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(expected || logits) in nats of each row, `[n]` from `[n, vocab]` and `[n, vocab]`, at temperature 1."""
    log_p, log_q = F.log_softmax(expected, dim=-1), F.log_softmax(logits, dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
