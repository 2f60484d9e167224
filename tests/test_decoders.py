"""Decoders step by step: against the naive rules, and against diffusers where its rules coincide."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
import torch
from diffusers import BlockRefinementScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

import naive_decode
from checkpoints import DELETE, EOS, LLADA22, MASK, SPLIT, VOCAB
from relume.config import DecoderName, DecodingConfig, JointMode
from relume.core import RelumeError
from relume.decoding import DECODERS, make_decoder
from relume.decoding.block import Decoder
from relume.decoding.candidates import propose
from relume.decoding.joint import MODES
from relume.model.llada2 import read_config

LENGTH = 8
MODEL = read_config(LLADA22, {})


def decoder(name: str, **options: object) -> Decoder:
    options = {key: value for key, value in options.items() if key not in DECODERS[name].without}
    return make_decoder(DecodingConfig.from_mapping({"decoder": name, "block_length": LENGTH, **options}), MODEL)


def scripted_logits(draw: random.Random, favourites: list[int]) -> torch.Tensor:
    """Logits whose argmax is often one of `favourites`, with every degree of confidence; no ties."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    logits = torch.randn(LENGTH, VOCAB, generator=generator)
    for position in range(LENGTH):
        logits[position, draw.choice(favourites)] += draw.choice([0.0, 2.0, 4.0, 8.0])
    return logits


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["threshold", "joint", "indel"]),
    seed=st.integers(0, 2**31 - 1),
    prompt_length=st.integers(0, LENGTH - 1),
    post=st.sampled_from([0, 1, 3, 16]),
    iterations=st.sampled_from([1, 3, LENGTH]),
    edit_threshold=st.sampled_from([0.0, 0.5]),
    few_tokens=st.booleans(),
)
def test_every_step_agrees_with_the_naive_rules(
    name: str, seed: int, prompt_length: int, post: int, iterations: int, edit_threshold: float, few_tokens: bool
) -> None:
    draw = random.Random(seed)
    # Few tokens, and logits that return, bring the same block back: the loop guard has to act.
    favourites = [3, 4, DELETE, SPLIT, MASK] if few_tokens else [*range(10), DELETE, SPLIT, MASK, EOS]
    script = [scripted_logits(draw, favourites) for _ in range(2 if few_tokens else 60)]
    options = {
        "threshold": 0.6,
        "edit_threshold": edit_threshold,
        "max_post_iterations": post,
        "iterations": iterations,
    }
    engine = decoder(name, eos_early_stop=False, **options)
    prompt = [draw.randrange(50) for _ in range(prompt_length)]
    state = engine.begin(torch.tensor(prompt, dtype=torch.int64))
    rules = naive_decode.Rules(
        block_length=LENGTH, mask_id=MASK, eos_ids=frozenset({EOS}), delete_id=DELETE, split_id=SPLIT,
        threshold=0.6, edit_threshold=edit_threshold, iterations=iterations, max_post_iterations=post,
    )  # fmt: skip
    block = naive_decode.Block.fresh(prompt, rules)
    for count in range(LENGTH + post + 2):
        logits = script[count % len(script)]
        step = engine.step(state, logits[engine.rows(state)], None)
        expected = naive_decode.STEPS[name](block, logits, rules, [0.0] * LENGTH)
        state = step.state
        assert state.tokens.tolist() == block.tokens()
        assert state.masked.tolist() == [cell.masked for cell in block.cells]
        assert step.committed.tolist() == sorted(expected.commits)
        assert step.edited.tolist() == sorted(expected.edits)
        assert state.finished == expected.finished
        if state.finished:
            break
    assert state.finished, "the number of iterations must be bounded"
    assert not state.masked.any()


@pytest.mark.parametrize("name", sorted(DECODERS))
def test_prompt_positions_never_change(name: str) -> None:
    draw = random.Random(1)
    engine = decoder(name)
    prompt = [MASK, EOS, DELETE]
    state = engine.begin(torch.tensor(prompt))
    while not state.finished:
        state = engine.step(state, scripted_logits(draw, list(range(10)))[engine.rows(state)], None).state
        assert state.tokens[:3].tolist() == prompt
        assert not state.masked[:3].any()


def test_step_does_not_change_the_state_it_is_given() -> None:
    draw = random.Random(2)
    for name in DECODERS:
        engine = decoder(name)
        state = engine.begin(torch.tensor([1, 2]))
        before = state.tokens.clone(), state.masked.clone()
        engine.step(state, scripted_logits(draw, [5, SPLIT, DELETE])[engine.rows(state)], None)
        assert torch.equal(state.tokens, before[0])
        assert torch.equal(state.masked, before[1])


def test_ties_go_to_the_lowest_token_and_position() -> None:
    engine = decoder("threshold", threshold=1.0)
    state = engine.begin(torch.tensor([], dtype=torch.int64))
    logits = torch.zeros(LENGTH, VOCAB)
    logits[:, [7, 9]] = 3.0
    step = engine.step(state, logits, None)
    assert step.committed.tolist() == [0]
    assert step.state.tokens[0] == 7


def test_a_tiny_temperature_is_argmax() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0)) * 30
    uniforms = torch.linspace(0.0, 0.999, 20, dtype=torch.float64)
    greedy, _ = propose(logits, (MASK,), DecodingConfig(), None)
    for temperature in (1e-3, 1e-30, 1e-45):
        drawn, confidence = propose(logits, (MASK,), DecodingConfig(temperature=temperature), uniforms)
        assert torch.equal(drawn, greedy)
        assert bool((confidence > 0.999).all())


def test_published_modes_of_joint() -> None:
    for mode, thresholds in (("quality", (0.7, 0.5)), ("speed", (0.5, 0.0))):
        engine = decoder("joint", mode=mode)
        assert (engine.threshold, getattr(engine, "edit_threshold")) == thresholds  # noqa: B009


def test_an_option_that_the_decoder_does_not_have_is_refused() -> None:
    for name, options in (
        ("threshold", {"edit_threshold": 0.5, "max_post_iterations": 3, "mode": "speed"}),
        ("joint", {"iterations": 3, "eos_early_stop": True}),
        ("indel", {"mode": "speed", "eos_early_stop": False}),
    ):
        for option, value in options.items():
            config = DecodingConfig.from_mapping({"decoder": name, option: value})
            with pytest.raises(RelumeError, match=f"the decoder {name} has no {option}"):
                make_decoder(config, MODEL)
    assert DecodingConfig(mode="speed").decoder == "joint"


def test_names_are_those_of_the_configuration() -> None:
    assert tuple(DECODERS) == get_args(DecoderName)
    assert tuple(MODES) == get_args(JointMode)


def test_indel_needs_its_tokens() -> None:
    model = read_config(LLADA22 | {"delete_token_id": None, "split_token_id": None}, {})
    with pytest.raises(RelumeError, match="delete_token_id"):
        make_decoder(DecodingConfig(decoder="indel"), model)
    assert type(make_decoder(DecodingConfig(), model)) is DECODERS["threshold"]
    assert type(make_decoder(DecodingConfig(), MODEL)) is DECODERS["indel"]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("edit_threshold", [None, 0.5])
def test_one_step_agrees_with_diffusers(seed: int, edit_threshold: float | None) -> None:
    """2.0 (no editing) and 2.1 with a positive edit threshold. Differences are in docs/decoding.md:

    its predicted mask token is a commit, an edit threshold of 0 turns editing off, and ties may fall otherwise.
    """
    draw = random.Random(seed)
    logits = scripted_logits(draw, list(range(10)))
    logits[:, MASK] = -20.0
    masked = torch.tensor([draw.random() < 0.6 for _ in range(LENGTH)])
    masked[:2], masked[2] = False, True
    tokens = torch.tensor([draw.randrange(10) for _ in range(LENGTH)]).masked_fill(masked, MASK)
    prompt = torch.arange(LENGTH) < 2
    # `joint` commits at least one token an iteration: the scheduler's quota is the same with one step a position.
    iterations = LENGTH if edit_threshold else draw.choice([2, 4, LENGTH])
    scheduler: Any = BlockRefinementScheduler(block_length=LENGTH)  # type: ignore[no-untyped-call]
    scheduler.set_timesteps(iterations, block_length=LENGTH)
    iteration = draw.randrange(iterations)
    expected = scheduler.step(
        logits.unsqueeze(0), iteration, tokens.unsqueeze(0), mask_token_id=MASK, temperature=0.0,
        threshold=0.6, editing_threshold=edit_threshold, prompt_mask=prompt, return_dict=True,
    )  # fmt: skip

    options = {"iterations": iterations} if edit_threshold is None else {"edit_threshold": edit_threshold}
    engine = decoder("joint" if edit_threshold else "threshold", threshold=0.6, **options)
    begun = engine.begin(torch.tensor([], dtype=torch.int64))
    state = type(begun)(tokens, masked, prompt, iteration=iteration)
    step = engine.step(state, logits[engine.rows(state)], None)
    assert step.state.tokens.tolist() == expected.prev_sample[0].tolist()
    assert step.committed.tolist() == expected.transfer_index[0].nonzero().flatten().tolist()
    assert step.edited.tolist() == expected.editing_transfer_index[0].nonzero().flatten().tolist()
