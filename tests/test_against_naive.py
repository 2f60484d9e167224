"""The engine against the naive reference over random models, prompts and decoders.

The reference sees the full window in every iteration, has no cache and no batch, and was written from
docs/decoding.md alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoints import DELETE, EOS, LLADA2, LLADA22, MASK, SDAR, SPLIT, make_tensors, write_checkpoint
from naive_decode import generate
from naive_model import NaiveModel
from relume import Engine
from relume.decoding import DECODERS

NUM_CASES = 240
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # configuration, block lengths
    "llada2": (LLADA2, (4, 8, 12)),
    "llada2-no-groups": (LLADA2 | {"n_group": 1, "topk_group": 1, "num_shared_experts": 0}, (8, 16)),
    "llada2.2": (LLADA22, (8, 16)),
    "sdar": (SDAR, (1, 4, 6)),
}


Load = Callable[[str, int], tuple[Engine, NaiveModel]]


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def load(name: str, seed: int) -> tuple[Engine, NaiveModel]:
        config, _ = MODELS[name]
        folder: Path = tmp_path_factory.mktemp("naive") / "model"
        tensors = make_tensors(config, seed, stacked=seed % 2 == 0)
        write_checkpoint(folder, config, tensors, num_shards=1 + seed % 3, tokenizer=True)
        return Engine.load(folder, dtype="float32", prefill_blocks=1 + seed % 3), NaiveModel.open(folder)

    return load


def draw_case(seed: int) -> dict[str, Any]:
    """A random request; every seed is a different one, and the same one in every run."""
    draw = random.Random(seed)
    name = list(MODELS)[seed % len(MODELS)]
    block_length = draw.choice(MODELS[name][1])
    blocks = draw.randint(1, 3)
    prompt_length = draw.choice(
        [1, max(1, block_length - 1), blocks * block_length, blocks * block_length + draw.randint(1, block_length)]
    )
    decoders = ["threshold", "joint"] + (["indel"] if name == "llada2.2" else [])
    prompt = [draw.randrange(56) for _ in range(prompt_length)]
    # What a user writes is text, whatever its id. A lone mask token as the prompt would make all positions
    # mathematically equal, and the order of their confidences a matter of rounding.
    if prompt_length > 1 and draw.random() < 0.4:
        prompt[draw.randrange(prompt_length)] = draw.choice([MASK, EOS])
    return {
        "model": (name, draw.randrange(4)),
        "prompt": prompt,
        "decoder": draw.choice(decoders),
        "block_length": block_length,
        "threshold": draw.choice([0.3, 0.5, 0.7, 0.95]),
        "edit_threshold": draw.choice([0.0, 0.3, 0.5, 0.9]),
        "iterations": draw.choice([None, None, max(1, block_length // 2), max(1, block_length // 3)]),
        "max_post_iterations": draw.choice([0, 1, 4, 16]),
        "max_tokens": draw.randint(1, 3 * block_length),
        "temperature": draw.choice([0.0, 0.0, 0.7, 1.5]),
        "top_k": draw.choice([0, 0, 5]),
        "top_p": draw.choice([1.0, 0.8]),
        "seed": draw.randrange(1000),
        "stop": tuple(
            "".join(draw.choices("ABGKLMXYs", k=draw.randint(1, 2))) for _ in range(draw.choice([0, 0, 1, 2]))
        ),
        "ignore_eos": draw.random() < 0.2,
        "eos_early_stop": draw.random() < 0.5,
    }


def engine_options(case: dict[str, Any]) -> dict[str, Any]:
    """Without the options that the case's decoder does not have: the engine refuses them."""
    return {name: value for name, value in case.items() if name not in DECODERS[case["decoder"]].without}


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_engine_agrees_with_the_naive_reference(load: Load, seed: int) -> None:
    case = draw_case(seed)
    engine, model = load(*case.pop("model"))
    prompt = case.pop("prompt")
    expected = generate(
        model, prompt, mask_id=MASK, eos_ids={EOS}, delete_id=DELETE, split_id=SPLIT,
        decode=engine.tokenizer.decode, **case,
    )  # fmt: skip
    result = engine.generate(input_ids=prompt, **engine_options(case))
    assert list(result.canvas) == expected.canvas
    assert list(result.commits) == expected.commits
    assert list(result.token_ids) == expected.token_ids
    assert result.text == expected.text
    assert result.statistics.num_iterations == expected.iterations


def test_the_cases_reach_what_they_are_for(load: Load) -> None:
    """End of text inside a block, stop strings, and every decoder and prompt length must really occur."""
    reasons, decoders, lengths, ended_mid_block = set(), set(), set(), False
    for seed in range(NUM_CASES):
        case = draw_case(seed)
        engine, _ = load(*case.pop("model"))
        prompt = case.pop("prompt")
        result = engine.generate(input_ids=prompt, **engine_options(case))
        reasons.add(result.finish_reason)
        decoders.add(case["decoder"])
        lengths.add((len(prompt) >= case["block_length"]) + (len(prompt) % case["block_length"] == 0))
        end = (len(prompt) + len(result.token_ids)) % case["block_length"]
        ended_mid_block |= result.finish_reason == "eos" and end != 0
    assert reasons == {"eos", "stop", "length"}
    assert decoders == {"threshold", "joint", "indel"}
    assert lengths == {0, 1, 2}
    assert ended_mid_block
