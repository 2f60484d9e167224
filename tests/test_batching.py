from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import LLADA2, LLADA22, SDAR, make_tensors, write_checkpoint
from relume import Engine
from relume.config import DecodingConfig, DTypeName
from relume.engine.events import Event, IterationEvent
from relume.engine.request import Request


def requests(num: int, block_length: int, decoders: list[str]) -> list[Request]:
    draw = random.Random(5)
    return [
        Request(
            input_ids=[draw.randrange(56) for _ in range(draw.choice([1, 3, 8, 17, 40, 64]))],
            decoding=DecodingConfig.from_mapping(
                {
                    "decoder": draw.choice(decoders),
                    "block_length": block_length,
                    "threshold": draw.choice([0.4, 0.9]),
                    "max_tokens": draw.choice([5, 16, 40]),
                    "temperature": draw.choice([0.0, 1.0]),
                    "seed": index,
                }
            ),
        )
        for index in range(num)
    ]


@pytest.mark.parametrize(
    ("config", "decoders", "dtype"),
    [
        (LLADA2, ["threshold", "joint"], "float32"),
        # Rows of 17 floats: no row but the first starts on an aligned address.
        (LLADA2 | {"hidden_size": 17, "moe_intermediate_size": 11}, ["threshold"], "float32"),
        (LLADA22, ["threshold", "joint", "indel"], "float32"),
        (SDAR, ["threshold", "joint"], "float32"),
        (LLADA2, ["threshold", "joint"], "bfloat16"),
    ],
)
def test_a_batch_of_32_gives_what_each_request_gives_alone(
    tmp_path: Path, config: dict[str, Any], decoders: list[str], dtype: DTypeName
) -> None:
    folder = write_checkpoint(tmp_path / "model", config, make_tensors(config, 3), tokenizer=True)
    engine = Engine.load(folder, dtype=dtype, prefill_blocks=2)
    batch = requests(32, 8, decoders)
    in_batch: dict[int, list[float]] = {index: [] for index in range(len(batch))}
    apart: dict[int, list[float]] = {index: [] for index in range(len(batch))}

    def note(store: dict[int, list[float]], index: int, event: Event) -> None:
        if isinstance(event, IterationEvent):
            store[index] += event.confidences

    def note_alone(index: int, _: int, event: Event) -> None:
        note(apart, index, event)

    together = engine.generate_batch(batch, partial(note, in_batch))
    for index, (request, result) in enumerate(zip(batch, together, strict=True)):
        (alone,) = engine.generate_batch([request], partial(note_alone, index))
        assert result.token_ids == alone.token_ids
        assert result.canvas == alone.canvas
        assert result.commits == alone.commits
    # Confidences are functions of the logits' bits: equal ones mean that no logit moved.
    assert in_batch == apart


def test_more_requests_than_the_batch_holds_wait_their_turn(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2, 3))
    batch = requests(7, 8, ["threshold"])
    few, many = (Engine.load(folder, dtype="float32", max_batch=size).generate_batch(batch) for size in (2, 32))
    assert [result.token_ids for result in few] == [result.token_ids for result in many]


def test_joined_batches_are_close_and_say_that_they_are_lossy(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2, 3))
    batch = requests(6, 8, ["threshold"])
    exact, joined = (
        Engine.load(folder, dtype="float32", exact_batches=exact).generate_batch(batch) for exact in (True, False)
    )
    assert [result.token_ids for result in joined] == [result.token_ids for result in exact]  # in float32, here
    assert all(result.statistics.lossless for result in exact)
    assert not any(result.statistics.lossless for result in joined)
    assert all(0 < result.statistics.active_experts <= 16 for result in joined)


def test_repeating_a_request_gives_the_same_bits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2, 3))
    engine = Engine.load(folder, dtype="float32")
    prompt = list(range(30))
    assert torch.equal(engine.logits(prompt, block_length=8), engine.logits(prompt, block_length=8))


def test_active_experts_are_the_request_s_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2, 3))
    engine = Engine.load(folder, dtype="float32")
    batch = requests(5, 8, ["threshold"])
    together = engine.generate_batch(batch)
    for request, result in zip(batch, together, strict=True):
        (alone,) = engine.generate_batch([request])
        assert result.statistics.active_experts == alone.statistics.active_experts
        assert (
            result.statistics.utilisation >= alone.statistics.utilisation == alone.statistics.active_experts / 16
        )
