"""Nothing about where experts lie changes a bit, in float32; and the statistics prove that each path was taken."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import DecodingConfig, Engine, Request
from relume.core import Phase
from relume.experts import executor
from relume.experts.source import CheckpointExperts
from relume.simulate.recorded import replay_recorded
from relume.simulate.replay import foresee
from relume.strategy.budget import uniform
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import STRATEGIES, Strategy
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, read_model_profile, write_model_profile
from traces import played

ORACLE = Path(__file__).parent / "oracle" / "llada2-tiny-a"
#: Strategies that a live engine can have besides `full`.
LIVE = sorted(set(STRATEGIES) - {"full", "belady"})
NEED_PROFILE = [name for name, strategy in STRATEGIES.items() if strategy.retention in {"static", "foresight"}]
BUDGETS = ["10%", "25%", "40%", "60%"]
PROMPTS = ["How many times is a in banana?", "Reverse the word planet.", "What is 23 + 58?", "Sort 9 4 7 1."]


class Subject:
    """A model, what it is asked, and what it gives with every expert resident and two threads."""

    def __init__(self, model: str | Path, profile: Path) -> None:
        self.model = model
        self.profile = profile
        with self.load(strategy="full", num_threads=2) as engine:
            if model == "demo":
                prompts = [
                    engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS
                ]
            else:
                prompts = [[(7 * i + 3 * j) % 40 for j in range(20 + 25 * i)] for i in range(4)]
            self.requests = [
                Request(input_ids=prompt, decoding=DecodingConfig(max_tokens=24, threshold=0.6))
                for prompt in prompts * 2
            ]
            with engine.record(profile.with_suffix(".trace")):
                results = engine.generate_batch(self.requests)
            reader = TraceReader(profile.with_suffix(".trace"))
            write_model_profile(gather_profile(reader, reader.metadata.shape), profile)
            self.tokens = [result.canvas for result in results]
            self.ids = list(itertools.chain.from_iterable(prompts))
            self.logits = engine.logits(self.ids)

    def load(self, **options: Any) -> Engine:
        if options.get("strategy") in NEED_PROFILE:
            options["profile"] = str(self.profile)
        return Engine.load(self.model, dtype="float32", **options)

    def check(self, engine: Engine, batched: bool = True) -> list[Any]:
        """Compare tokens and logits; returns the statistics."""
        if batched:
            results = engine.generate_batch(self.requests)
        else:
            results = [engine.generate(input_ids=r.input_ids, **vars(r.decoding)) for r in self.requests]
        assert [result.canvas for result in results] == self.tokens
        assert torch.equal(engine.logits(self.ids), self.logits)
        return [result.statistics for result in results]


@pytest.fixture(scope="module", params=["demo", "oracle"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    model = "demo" if request.param == "demo" else ORACLE
    return Subject(model, tmp_path_factory.mktemp(request.param) / "profile.npz")


@pytest.mark.parametrize("strategy", LIVE)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_strategy_and_budget_gives_the_same_bits(subject: Subject, strategy: str, budget: str) -> None:
    with subject.load(strategy=strategy, expert_memory=budget, max_batch=8) as engine:
        memory = engine._model.experts
        statistics = subject.check(engine)
        assert all(s.strategy == strategy and s.lossless for s in statistics)
        # Without a measured machine or a profile tide cannot solve its interval, and says so.
        solves = STRATEGIES[strategy].retention == "tide" and "interval" not in STRATEGIES[strategy].parameters
        assert all(solves or not s.fallbacks for s in statistics)
        assert all(line.startswith("tide: ") for s in statistics for line in s.fallbacks)
        assert all(0.0 < s.hit_rate < 1.0 for s in statistics)
        assert all(s.bytes_from_disk > 0 and s.bytes_to_device > 0 and s.stall_s >= 0.0 for s in statistics)
        assert memory.pool.resident.sum(axis=1).tolist() == memory.pool.slots
        assert (sum(s.evictions for s in statistics) > 0) == (STRATEGIES[strategy].retention != "static")


@pytest.mark.parametrize(
    "options",
    [
        {"reads": "direct"},
        {"reads": "buffered"},
        {"num_threads": 1},
        {"num_threads": 2},
        {"num_threads": 3},
        {"host_memory": "100%"},
        {"host_memory": "50%"},
        {"shared_pool": True},
        {"max_batch": 1},
        {"prefill_blocks": 1},
    ],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items()),
)
def test_every_path_gives_the_same_bits(subject: Subject, options: dict[str, Any]) -> None:
    with subject.load(strategy="lru", expert_memory="25%", **({"max_batch": 8} | options)) as engine:
        statistics = subject.check(engine, batched=options.get("max_batch") != 1)
        source = engine._model.experts.loader.source
        moved = sum(figures.bytes_to_device for figures in statistics)
        read = sum(figures.bytes_from_disk for figures in statistics)
        assert moved > 0
        if isinstance(source, CheckpointExperts):
            assert source._reads._files.direct == (options.get("reads") != "buffered") and read > 0
        else:
            assert (read == 0) == (options["host_memory"] == "100%") and read < moved


def test_small_experts_computed_by_workers_give_the_same_bits(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "SMALLEST_SHARED_BYTES", 0)
    with subject.load(strategy="counts", expert_memory="40%", num_threads=2, max_batch=8) as engine:
        subject.check(engine)


def test_a_warm_run_and_a_smaller_budget_give_the_same_bits(subject: Subject) -> None:
    with subject.load(strategy="lru", expert_memory="60%", max_batch=8) as engine:
        memory = engine._model.experts
        subject.check(engine)
        warm = subject.check(engine)
        for budget in ("25%", "10%", "60%"):
            engine.resize_experts(budget)
            assert memory.pool.resident.sum() <= sum(memory.pool.slots)
            assert len(memory.leases) == memory.pool.resident.sum()
            shrunk = subject.check(engine)
            if budget == "10%":
                assert shrunk[0].hit_rate < warm[0].hit_rate


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a width at which torch's products depend on the number of threads."""
    config = LLADA2 | {
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "intermediate_size": 4096,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "head_dim": 64,
        "num_attention_heads": 16,
        "vocab_size": 4096,
    }
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config, make_tensors(config))


def test_the_number_of_threads_changes_no_bit_of_wide_products(wide: Path) -> None:
    found = []
    for num_threads in (1, 2, 3):
        with Engine.load(wide, dtype="float32", num_threads=num_threads) as engine:
            found.append(engine.logits(range(50)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("strategy", LIVE)
def test_a_replay_gives_the_live_hits_and_misses(
    subject: Subject, strategy: str, shared: bool, tmp_path: Path
) -> None:
    path = tmp_path / "trace.parquet"
    loaded = subject.load(strategy=strategy, expert_memory="25%", shared_pool=shared, max_batch=3)
    with loaded as engine, engine.record(path):
        results = engine.generate_batch(subject.requests)
    reader = TraceReader(path)
    shape = reader.metadata.shape
    total = sum(reader.metadata.slots)
    budget = uniform(total, shape) if shared else list(reader.metadata.slots)
    named = reader.metadata.profile  # the shipped model has one beside it
    profile = read_model_profile(Path(named), shape) if named else None
    slots = None if shared else reader.metadata.slots
    metadata = reader.metadata
    context = RetentionContext(shape, sum(budget), profile, None, slots, metadata.costs, metadata.intervals)
    again = replay_recorded(reader, Strategy.parse(strategy), context, sum(budget) if shared else budget)
    live = np.array([[len(misses) for misses in record.misses] for record in reader])
    assert (again.misses == live).all()
    active = sum(len(np.unique(ids)) for record in reader for ids in record.expert_ids)
    assert again.hits.sum() + again.misses.sum() == active
    assert {span.phase for record in reader for span in record.spans} == {
        Phase.PREFILL,
        Phase.DENOISE,
        Phase.COMMIT,
    }
    assert sum(int(s.committed.sum()) for r in reader for s in r.spans) == sum(sum(r.commits) for r in results)
    bound = played(reader, "belady", shape, budget, shared, future=foresee(reader, shape))
    assert bound.hits.sum() >= again.hits.sum()


REPLAY = """
import json, sys
from relume.simulate.replay import replay
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.trace.file import TraceReader
from pathlib import Path
reader = TraceReader(Path(sys.argv[1]))
metadata = reader.metadata
context = RetentionContext(metadata.shape, sum(metadata.slots))
found = replay(reader, Strategy.parse(metadata.strategy), context, list(metadata.slots))
print(json.dumps(found.misses.tolist()))
"""


def test_another_process_replays_the_same(subject: Subject, tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    with subject.load(strategy="lfru", expert_memory="40%", max_batch=8) as engine, engine.record(path):
        engine.generate_batch(subject.requests)
    done = subprocess.run([sys.executable, "-c", REPLAY, str(path)], capture_output=True, text=True, check=True)
    live = [[len(misses) for misses in record.misses] for record in TraceReader(path)]
    assert json.loads(done.stdout) == live and sum(map(sum, live)) > 0
