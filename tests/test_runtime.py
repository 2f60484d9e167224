"""What requests of one engine share: one forward at a time, K/V within the plan, the budget of experts."""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import Engine, RelumeError, Request
from relume.cli.loading import LoadOptions
from relume.config import DecodingConfig, EngineConfig

PROMPT = list(range(20))
OPTIONS: dict[str, Any] = {"block_length": 8, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("runtime"), LLADA2, make_tensors(LLADA2))


def test_threads_share_an_engine(folder: Path) -> None:
    with Engine.load(folder, strategy="lru", expert_memory="25%") as engine:
        prompts = [[(i + j) % 50 for j in range(20)] for i in range(6)]
        alone = [engine.generate(input_ids=prompt, **OPTIONS).token_ids for prompt in prompts]
        with ThreadPoolExecutor(3) as pool:
            together = list(pool.map(lambda p: engine.generate(input_ids=p, **OPTIONS).token_ids, prompts * 3))
        assert together == alone * 3
        engine._model.experts.check_integrity()


def test_a_canvas_beyond_the_planned_context_is_refused_before_weights_are_read(folder: Path) -> None:
    engine = Engine.open(folder, EngineConfig(context=64))
    engine.check(Request(input_ids=PROMPT, decoding=DecodingConfig(block_length=8, max_tokens=44)))
    with pytest.raises(RelumeError, match=r"need 72 positions, .* planned for 64: lower max_tokens, or load"):
        engine.check(Request(input_ids=PROMPT, decoding=DecodingConfig(block_length=8, max_tokens=45)))
    engine.close()


def test_streams_hold_no_more_k_v_than_planned_and_give_it_back(folder: Path) -> None:
    with Engine.load(folder, context=32, max_batch=2) as engine:
        streams = [engine.stream(input_ids=PROMPT, **OPTIONS) for _ in range(3)]
        next(streams[0])
        next(streams[1])
        with pytest.raises(RelumeError, match="32 positions of K/V are asked for and 0 are left"):
            next(streams[2])
        streams[0].cancel()
        assert list(streams[0]) == []
        with pytest.raises(RelumeError, match="failed"):
            next(streams[2])
        assert len(engine.generate(input_ids=PROMPT, **OPTIONS).token_ids) == 12
        del streams
        gc.collect()
        many = [Request(input_ids=PROMPT, decoding=DecodingConfig(**OPTIONS))] * 7
        assert len(engine.generate_batch(many)) == 7
        with pytest.raises(RelumeError, match="65 positions"):
            engine.logits([1] * 65)


def test_an_engine_that_held_everything_goes_on_with_a_strategy_that_replaces(folder: Path) -> None:
    with Engine.load(folder) as engine:
        full = engine.generate(input_ids=PROMPT, **OPTIONS)
        assert (full.statistics.strategy, full.statistics.hit_rate) == ("full", 1.0)
        engine.resize_experts("50%")
        less = engine.generate(input_ids=PROMPT, **OPTIONS)
        assert less.token_ids == full.token_ids
        assert less.statistics.strategy == "foresight:prefetch=none" and less.statistics.evictions > 0
        assert less.statistics.expert_memory_bytes == full.statistics.expert_memory_bytes // 2
        with pytest.raises(RelumeError, match="no amount"):
            engine.resize_experts("much")


def test_explicit_slots_are_those_of_the_plan(folder: Path) -> None:
    with Engine.load(folder, layer_slots="3,9", strategy="lfu") as engine:
        assert engine.plan.slots_per_layer == (3, 9)
        engine.generate(input_ids=PROMPT, **OPTIONS)
        assert engine._model.experts.pool.resident.sum(axis=1).tolist() == [3, 9]


def test_a_shared_pool_below_one_pass_is_said_aloud(folder: Path) -> None:
    with Engine.load(folder, shared_pool=True, strategy="lru", expert_memory="10%") as engine:
        assert any("shared pool of 3 slots" in line for line in engine.fallbacks)
    with Engine.load(folder, shared_pool=True, strategy="lru", expert_memory="100%") as engine:
        assert not engine.fallbacks


def test_a_recording_refuses_what_a_replay_could_not_know(folder: Path, tmp_path: Path) -> None:
    with Engine.load(folder, strategy="lru", expert_memory="25%") as engine:
        with engine.record(tmp_path / "trace"):
            with pytest.raises(RelumeError, match="while a trace is recorded"):
                engine.logits(PROMPT)
            with pytest.raises(RelumeError, match="while a trace is recorded"):
                engine.resize_experts("10%")
            with pytest.raises(RelumeError, match="already"), engine.record(tmp_path / "other"):
                pass
            stream = engine.stream(input_ids=PROMPT, **OPTIONS)
            next(stream)
        for _ in stream:  # goes on, unrecorded
            pass
        assert len(stream.result.token_ids) == 12


def test_an_engine_that_was_only_opened_can_be_closed(folder: Path) -> None:
    with Engine.open(folder, EngineConfig()):
        pass


@pytest.mark.parametrize(("dtype", "lossless"), [("float32", True), ("bfloat16", False)])
def test_rounded_weights_are_not_called_lossless(folder: Path, dtype: str, lossless: bool) -> None:
    with Engine.load(folder, dtype=getattr(torch, dtype)) as engine:
        assert engine.generate(input_ids=PROMPT, **OPTIONS).statistics.lossless is lossless


def test_the_command_line_has_every_option_of_an_engine_with_its_default() -> None:
    engine = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    options = {field.name: field.default for field in dataclasses.fields(LoadOptions)}
    assert {name: default for name, default in engine.items() if name not in {"max_batch", "exact_batches"}} == {
        name: default
        for name, default in options.items()
        if name not in {"revision", "offline", "tide_interval"}  # the last is part of the strategy
    }
