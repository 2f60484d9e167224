"""The objective: what sees what, what is noised, what is predicted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.train.config import ObjectiveConfig
from relume.train.objective import Batch, Example, attention_mask, draw_masks, make_batch

BLOCK, MASK = 4, 99


def example(num_prompt: int, num_blocks: int, seed: int = 0) -> Example:
    generator = torch.Generator().manual_seed(seed)
    return Example(torch.randint(32, 90, (num_blocks * BLOCK,), generator=generator), num_prompt)


def batch(examples: list[Example], seed: int = 0, **config: object) -> Batch:
    objective = dataclasses.replace(ObjectiveConfig(), **config)  # type: ignore[arg-type]
    return make_batch(examples, objective, BLOCK, MASK, torch.Generator().manual_seed(seed))


def naive_layout(num_prompt: int, length: int, copies: int) -> list[tuple[int, int]]:
    """(copy, position) of each position of a row, from the full `[clean || noisy ...]` layout of the papers.

    Dropped are the positions that no prediction can reach: the last clean block, which no noisy block sees, and
    noisy blocks without a response token.
    """
    clean = [(0, position) for position in range(length) if position // BLOCK < length // BLOCK - 1]
    noisy = [
        (copy, position)
        for copy in range(1, copies + 1)
        for position in range(length)
        if any(p >= num_prompt for p in range(position // BLOCK * BLOCK, position // BLOCK * BLOCK + BLOCK))
    ]
    return clean + noisy


def naive_sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    query_block, key_block = query[1] // BLOCK, key[1] // BLOCK
    if query[0] == 0:
        return key[0] == 0 and key_block <= query_block
    if key[0] == 0:
        return key_block < query_block
    return key[0] == query[0] and key_block == query_block


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=3),
    copies=st.integers(1, 3),
)
def test_the_mask_is_that_of_a_brute_force(shapes: list[tuple[int, int]], copies: int) -> None:
    examples = [example(num_prompt, num_prompt // BLOCK + blocks) for num_prompt, blocks in shapes]
    made = batch(examples, copies=copies)
    mask = attention_mask(made.blocks, made.copies)
    for row, one in enumerate(examples):
        layout = naive_layout(one.num_prompt, len(one.token_ids), copies)
        assert one.num_positions(BLOCK, copies) == len(layout)
        for query in range(mask.shape[1]):
            expected = [
                query < len(layout) and key < len(layout) and naive_sees(layout[query], layout[key])
                for key in range(mask.shape[1])
            ]
            if query >= len(layout):
                expected[query] = True
            assert mask[row, query].tolist() == expected
        assert made.positions[row, : len(layout)].tolist() == [position for _, position in layout]
        assert made.targets[row, : len(layout)].tolist() == [int(one.token_ids[p]) for _, p in layout]


def test_only_response_tokens_of_noisy_copies_are_noised_and_predicted() -> None:
    one = example(num_prompt=6, num_blocks=4)
    for seed in range(20):
        made = batch([one], seed, copies=2, wrong_share=1.0, wrong_ratio=1.0)
        outside = (made.copies[0] == 0) | (made.positions[0] < 6)
        assert torch.equal(made.token_ids[0][outside], made.targets[0][outside])
        assert not made.loss_weights[0][outside].any()
        assert made.loss_weights[0][~outside].all()


def test_weights_and_inputs_of_masked_wrong_and_visible_tokens() -> None:
    made = batch([example(6, 6, seed) for seed in range(40)], copies=2, wrong_share=0.5, wrong_ratio=0.5)
    response = (made.copies > 0) & (made.positions >= 6)
    wrong = response & ~made.masked & (made.token_ids != made.targets)
    visible = response & ~made.masked & ~wrong
    assert bool((made.token_ids[made.masked] == MASK).all()) and bool(wrong.any()) and bool(visible.any())
    assert bool((made.loss_weights[made.masked | wrong] == 1.0).all())
    assert bool((made.loss_weights[visible] == torch.tensor(0.1)).all())


def test_without_wrong_tokens_visible_ones_are_right() -> None:
    made = batch([example(6, 6, seed) for seed in range(10)], wrong_share=0.0)
    assert torch.equal(made.token_ids[~made.masked], made.targets[~made.masked])


def test_copies_are_noised_independently() -> None:
    made = batch([example(4, 8)], copies=2)
    assert not torch.equal(made.masked[0][made.copies[0] == 1], made.masked[0][made.copies[0] == 2])


@pytest.mark.parametrize("scope", ["block", "sample"])
def test_mask_ratios_lie_between_their_bounds(scope: str) -> None:
    config = ObjectiveConfig(mask_scope=scope, mask_ratio=(0.3, 0.8), full_mask_share=0.0)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    shares, spreads = [], []
    for _ in range(100):
        masked, ratios = draw_masks(torch.ones(8 * 64, dtype=torch.bool), config, 64, generator)
        assert bool(((ratios >= 0.3) & (ratios <= 0.8)).all())
        shares.append(float(masked.float().mean()))
        spreads.append(len(ratios.unique()))
    assert 0.5 < sum(shares) / len(shares) < 0.6
    assert set(spreads) == ({8} if scope == "block" else {1})


def test_every_block_of_a_response_has_a_masked_position_and_some_have_no_other() -> None:
    config = ObjectiveConfig(mask_ratio=(0.01, 0.02), full_mask_share=0.5)
    response = torch.arange(64) >= 6
    masked, ratios = draw_masks(response, config, 16, torch.Generator().manual_seed(1))
    per_block = masked.view(-1, 16).sum(dim=1)
    full = ratios.view(-1, 16)[:, 0] == 1.0
    assert bool((per_block >= 1).all()) and bool(full.any()) and bool((~full).any())
    assert torch.equal(per_block[full], response.view(-1, 16).sum(dim=1)[full])
    assert not masked[:6].any()


def test_one_over_t_divides_masked_tokens_by_the_ratio_and_no_others() -> None:
    drawn: dict[str, Any] = {
        "mask_scope": "sample",
        "full_mask_share": 0.0,
        "mask_ratio": (0.5, 0.5),
        "visible_weight": 0.3,
    }
    plain = batch([example(4, 6)], **drawn)
    weighted = batch([example(4, 6)], **drawn, weight_by_ratio=True)
    factors = torch.where(plain.masked, 2.0, 1.0)
    torch.testing.assert_close(weighted.loss_weights, plain.loss_weights * factors)
    assert bool((plain.loss_weights[~plain.masked] > 0).any())
