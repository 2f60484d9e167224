"""A decode that charges the time of other hardware: same tokens, both lanes at work, and the replay's times."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import DecodingConfig, Engine, RelumeError, Request
from relume.clock.virtual import VirtualClock
from relume.experts.formats import DenseFormat, Views
from relume.machine.hardware import HARDWARE, load_hardware
from relume.simulate.replay import Replay, replay_together
from relume.strategy.dispatch import DISPATCHES
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.prefetch import PREFETCHES
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import STRATEGIES, Strategy
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, read_model_profile, write_model_profile

PROMPTS = ["How many times is a in banana?", "Reverse the word planet.", "What is 23 + 58?"]


class Subject:
    """The shipped model in float32, what it gives with all experts resident, and its profile."""

    def __init__(self, folder: Path) -> None:
        self.profile = folder / "profile.npz"
        with Engine.load("demo", dtype="float32", strategy="full") as engine:
            encode = engine.tokenizer.encode_chat
            self.requests = [
                Request(
                    input_ids=encode([{"role": "user", "content": prompt}]), decoding=DecodingConfig(max_tokens=24)
                )
                for prompt in PROMPTS
            ]
            with engine.record(folder / "trace"):
                self.tokens = [result.canvas for result in engine.generate_batch(self.requests)]
        reader = TraceReader(folder / "trace")
        write_model_profile(gather_profile(reader, reader.metadata.shape), self.profile)

    def load(self, strategy: str, **options: Any) -> Engine:
        return Engine.load(
            "demo", dtype="float32", strategy=strategy, profile=str(self.profile), max_batch=2, **options
        )


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("virtual"))


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Hardware where the host is quicker for an expert of one token of the shipped model, the link for more."""
    text = HARDWARE["a100-40"].read_text()
    for section, key, value in (
        ("link", "latency", '50, unit = "us"'),
        ("host", "float32", '1, unit = "GFLOP/s"'),
    ):
        head, tail = text.split(f"[{section}]")
        constant = f'{key} = {{ value = {value}, source = "a test" }}'
        text = f"{head}[{section}]" + re.sub(rf"(?m)^{key} = .*$", constant, tail, count=1)
    path = tmp_path_factory.mktemp("hardware") / "even.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("budget", ["10%", "25%", "40%"])
@pytest.mark.parametrize("dispatch", sorted(DISPATCHES))
def test_every_dispatch_gives_the_same_tokens(subject: Subject, even: str, dispatch: str, budget: str) -> None:
    with subject.load(f"foresight:dispatch={dispatch}", expert_memory=budget, hardware=even) as engine:
        results = engine.generate_batch(subject.requests)
        assert [result.canvas for result in results] == subject.tokens
        engine._model.experts.check_integrity()
    statistics = [result.statistics for result in results]
    assert all(s.kind == "simulated" and s.hardware == "even" and s.lossless for s in statistics)
    hosted, moved = sum(s.hosted for s in statistics), sum(s.bytes_to_device for s in statistics)
    assert (hosted > 0) == (dispatch != "transfer")
    assert (moved > 0) == (dispatch != "host" or statistics[0].prefetch_useful > 0)
    assert all((s.host_s > 0) == (s.hosted > 0) for s in statistics)


@pytest.mark.parametrize("budget", ["10%", "25%", "40%"])
@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"full", "belady"}))
def test_every_strategy_gives_the_same_tokens(subject: Subject, even: str, strategy: str, budget: str) -> None:
    with subject.load(strategy, expert_memory=budget, hardware=even) as engine:
        results = engine.generate_batch(subject.requests)
        engine._model.experts.check_integrity()
    assert [result.canvas for result in results] == subject.tokens
    statistics = [result.statistics for result in results]
    assert all(s.kind == "simulated" and 0.0 < s.hit_rate < 1.0 and s.lossless for s in statistics)
    assert (sum(s.hosted for s in statistics) > 0) == (STRATEGIES[strategy].dispatch != "transfer")


@pytest.mark.parametrize("prefetch", sorted(set(PREFETCHES) - {"own"}))
@pytest.mark.parametrize("hardware", ["rtx4060", "h100-80"])
@pytest.mark.parametrize("strategy", ["oled", "foresight", "lru:dispatch=freetoken"])
def test_a_replay_charges_exactly_the_live_time(
    subject: Subject, tmp_path: Path, strategy: str, hardware: str, prefetch: str
) -> None:
    name = f"{strategy}:prefetch={prefetch}"
    path = tmp_path / "trace"
    with subject.load(name, expert_memory="25%", hardware=hardware) as engine, engine.record(path):
        results = engine.generate_batch(subject.requests)
        assert [result.canvas for result in results] == subject.tokens
        live = engine._provision.settings.virtual
        assert live is not None
    reader = TraceReader(path)
    metadata = reader.metadata
    assert (metadata.kind, metadata.hardware) == ("simulated", hardware)
    assert metadata.work is not None
    clock = VirtualClock(load_hardware(hardware), metadata.work, metadata.shape)
    profile = read_model_profile(subject.profile, metadata.shape)
    parts = Strategy.parse(name).make(RetentionContext(metadata.shape, sum(metadata.slots), profile))
    run = Replay(Placement(ResidentPool(metadata.shape, metadata.slots), parts, clock))
    replay_together(reader, [run], metadata.shape)
    for figure in ("now", "device_s", "stall_s", "host_s", "link_s", "bytes_over_link", "bytes_from_disk"):
        assert getattr(clock, figure) == getattr(live, figure), figure
    for part in ("misses", "hosted", "arrived"):
        counts = np.array([[len(layer) for layer in getattr(record, part)] for record in reader])
        if part != "arrived":
            assert (getattr(run.result(), part) == counts).all()
        else:
            assert run.result().prefetches == counts.sum()
    assert sum(s.statistics.forward_s for s in results) > clock.now > 0  # a batch's forwards count for each


def test_two_lanes_compute_at_once(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lane waits for the device lane to begin, and the other way round: neither is first alone."""
    real = DenseFormat.compute
    there: dict[str, threading.Event] = {"host": threading.Event(), "device": threading.Event()}
    met = 0

    def compute(self: DenseFormat, x: torch.Tensor, views: Views) -> torch.Tensor:
        nonlocal met
        mine = "host" if threading.current_thread().name.startswith("relume-host") else "device"
        there[mine].set()
        other = there["device" if mine == "host" else "host"]
        if mine == "host" and other.wait(5):
            met += 1
        return real(self, x, views)

    with subject.load("foresight", expert_memory="25%", hardware="a100-40", num_threads=1) as engine:
        monkeypatch.setattr(DenseFormat, "compute", compute)
        found = engine.generate_batch(subject.requests)
    assert met > 0
    assert [result.canvas for result in found] == subject.tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2), num_shards=2)


def test_a_host_lane_that_dies_ends_the_request_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(input_ids=range(5), decoding=DecodingConfig(max_tokens=8, block_length=8))
    real = DenseFormat.compute
    calls = itertools.count()
    fails = False

    def compute(self: DenseFormat, x: torch.Tensor, views: Views) -> torch.Tensor:
        on_host = threading.current_thread().name.startswith("relume-host")
        if fails and on_host and next(calls) == 2:
            raise RuntimeError("the lane died")
        return real(self, x, views)

    monkeypatch.setattr(DenseFormat, "compute", compute)
    options: dict[str, Any] = {"dtype": "float32", "expert_memory": "25%", "hardware": "a100-40"}
    with Engine.load(folder, strategy="lru:dispatch=host", **options) as engine:
        (before,) = engine.generate_batch([request])
        fails = True
        with pytest.raises(RuntimeError, match="the lane died"):
            engine.generate_batch([request])
        fails = False
        engine._model.experts.check_integrity()
        (after,) = engine.generate_batch([request])
        assert before.canvas == after.canvas


def test_hardware_that_cannot_be_simulated_is_one_line(folder: Path, tmp_path: Path) -> None:
    for name, words in (
        ("rtx9999", "unknown hardware profile 'rtx9999': choose one of a100-40"),
        (str(tmp_path / "mine.toml"), "cannot be read"),
    ):
        with pytest.raises(RelumeError, match=words) as caught:
            Engine.load(folder, hardware=name)
        assert "\n" not in str(caught.value)
