"""Replaying: what is counted, who votes, and that order and company change nothing."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from relume.core import Phase, RelumeError
from relume.simulate.job import simulate
from relume.simulate.replay import foresee
from relume.strategy.lanes import TimelessLanes
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import STRATEGIES
from relume.strategy.use import ExpertShape
from relume.trace.calibrated import CalibratedConfig, synthesise_trace
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, write_model_profile
from relume.trace.views import layer_uses, phase_of, span_inputs
from traces import SMALL_TRACE, joined, make_record, make_span, played, write_trace

SHAPE = ExpertShape(1, 8, 2)


def nothing(_added: int, _total: int) -> None:
    pass


def test_what_is_counted() -> None:
    """Experts 0 to 3, then the same, then 2 to 5, with four slots."""
    records = [make_record([[[0, 1], [2, 3]]]), make_record([[[0, 1], [2, 3]]]), make_record([[[2, 3], [4, 5]]])]
    result = played(records, "lru", SHAPE, [4])
    assert result.hits[:, 0].tolist() == [0, 4, 2]
    assert result.misses[:, 0].tolist() == [4, 0, 2]
    assert result.resident[:, 0].tolist() == [0, 4, 4]
    assert (result.evictions, result.preloads, result.loads, result.num_tokens) == (2, 0, 6, 3)
    assert result.hit_rate == result.hit_rate_all == 6 / 12
    assert result.utilisation == 6 / 8
    assert result.bytes_per_token(100) == 200.0


def test_hit_rate_is_of_denoising_forwards() -> None:
    records = [
        make_record([[[0, 1], [2, 3]]], [make_span(2, Phase.PREFILL)]),
        make_record([[[0, 1], [2, 3]]]),
        make_record([[[0, 1], [4, 5]]], [make_span(2, Phase.COMMIT)]),
    ]
    result = played(records, "lru", SHAPE, [8])
    assert result.denoising.tolist() == [False, True, False]
    assert (result.hit_rate, result.hit_rate_all, result.utilisation) == (1.0, 6 / 12, 1.0)
    nowhere = played(records[:1], "lru", SHAPE, [8])
    assert (nowhere.hit_rate, nowhere.utilisation, nowhere.bytes_per_token(1)) == (None, None, None)


def test_only_the_last_block_of_a_prefill_is_kept() -> None:
    prefill = make_record([[[0, 1], [2, 3], [4, 5], [5, 6]]], [make_span(4, Phase.PREFILL, block_length=2)])
    after = [make_record([[[e, e], [e, e]]]) for e in range(8)]
    hits = [played([prefill, record], "lru", SHAPE, [8]).hits[1, 0] for record in after]
    assert hits == [0, 0, 0, 0, 1, 1, 1, 0]


def test_every_request_of_a_batch_votes() -> None:
    """A prompt's last block and another request's block, in one forward."""
    prefill = make_record([[[0, 1], [2, 3]]], [make_span(2, Phase.PREFILL, block_length=1)])
    batch = joined(prefill, make_record([[[4, 5], [5, 6]]], [make_span(2, request=1)]))
    after = [make_record([[[e, e], [e, e]]]) for e in range(8)]
    hits = [played([batch, record], "lru", SHAPE, [8]).hits[1, 0] for record in after]
    assert hits == [0, 0, 1, 1, 1, 1, 1, 0]
    assert played([batch], "lru", SHAPE, [8]).denoising.tolist() == [False]


def test_a_replay_is_a_function_of_the_records() -> None:
    reader = TraceReader(SMALL_TRACE)
    shape = reader.metadata.shape
    first, again = (played(reader, "lru", shape, [6] * 4) for _ in range(2))
    for field in dataclasses.fields(first):
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name))


def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    profile = tmp_path / "profile.npz"
    reader = TraceReader(SMALL_TRACE)
    write_model_profile(gather_profile(reader, reader.metadata.shape), profile)
    done: list[tuple[int, int]] = []
    names, memories = ["lru", "static", "counts"], ["20%", "9", "400MiB"]
    one = simulate(SMALL_TRACE, names, memories, nothing, profile, worth_a_process=10**9)
    two = simulate(SMALL_TRACE, names, memories, lambda *step: done.append(step), profile, worth_a_process=0)
    assert one == two
    assert [(row.strategy, row.expert_memory) for row in two.rows] == [
        (name, memory) for memory in memories for name in (*names, "belady")
    ]
    assert sum(added for added, _ in done) == 12 * reader.num_forwards
    assert {total for _, total in done} == {12 * reader.num_forwards}


def test_rows_are_those_of_single_replays() -> None:
    reader = TraceReader(SMALL_TRACE)
    shape = reader.metadata.shape
    simulation = simulate(SMALL_TRACE, ["lfru", "belady"], ["25%"], nothing, shared=True)
    assert [row.strategy for row in simulation.rows] == ["lfru", "belady"]
    for row in simulation.rows:
        alone = played(reader, row.strategy, shape, [6] * 4, shared=True, future=foresee(reader, shape))
        assert (row.hit_rate, row.hit_rate_all, row.utilisation) == (
            alone.hit_rate,
            alone.hit_rate_all,
            alone.utilisation,
        )
        assert row.bytes_per_token == alone.bytes_per_token(reader.metadata.expert_bytes)
        assert (row.slots_per_layer, row.evictions, row.tpot_ms, row.kind) == (
            6.0,
            alone.evictions,
            None,
            "simulated",
        )
        assert row.preload_bytes == alone.preloads * reader.metadata.expert_bytes
    assert len(simulation.notes) == 1 and "one pass uses (36 slots)" in simulation.notes[0]
    assert simulate(SMALL_TRACE, ["lfru"], ["50%"], nothing, shared=True).notes == ()


def test_damage_is_told_whichever_process_meets_it(tmp_path: Path) -> None:
    reader = TraceReader(SMALL_TRACE)
    path = write_trace(tmp_path / "trace", reader, reader.metadata)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    for worth in (0, 10**9):
        with pytest.raises(RelumeError, match="truncated or damaged"):
            simulate(path, ["lru"], ["25%"], nothing, worth_a_process=worth)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_show_what_a_decision_costs(shared: bool) -> None:
    """Prints figures, to be read with -s: 256 experts, top-8, 32 tokens, 64 slots a layer."""
    config = CalibratedConfig(num_requests=1, blocks=12)
    shape, slots = config.shape, [64] * config.shape.num_layers
    records = list(synthesise_trace(config, np.random.default_rng(0)))
    records = [record for record in records if phase_of(record) is Phase.DENOISE]
    context = RetentionContext(shape, sum(slots), gather_profile(records, shape), foresee(records, shape))
    for name in sorted(set(STRATEGIES) - {"full"}):
        spent = []
        for _ in range(5):
            pool = ResidentPool(shape, sum(slots) if shared else slots)
            placement = Placement(pool, STRATEGIES[name].make(context), TimelessLanes())
            # Nothing counted yet.
            forwards = [(record, layer_uses(record, shape.num_experts), span_inputs(record)) for record in records]
            started = time.process_time()
            for record, uses, inputs in forwards:
                placement.begin_forward(inputs)
                for use in uses:
                    placement.decide(use)
                placement.end_forward(record.spans)
            spent.append(time.process_time() - started)
            assert pool.resident.sum() <= sum(slots)
        cost = 1e6 * min(spent) / len(records) / shape.num_layers
        print(f"{'shared' if shared else 'own slots'} {name}: {cost:.1f} us of processor time a layer")  # noqa: T201


@pytest.mark.slow
def test_show_the_pace_of_a_simulation(tmp_path: Path) -> None:
    """Prints figures, to be read with -s: layer events times strategies in a minute, reading included."""
    config = CalibratedConfig(blocks=20)
    path = write_trace(tmp_path / "t", synthesise_trace(config, np.random.default_rng(0)), config.metadata())
    started = time.perf_counter()
    simulation = simulate(
        path, ["lru", "lfu", "lfru", "least-stale", "counts"], ["10%", "20%", "40%", "60%"], nothing
    )
    spent = time.perf_counter() - started
    events = TraceReader(path).num_forwards * config.shape.num_layers * len(simulation.rows)
    print(f"{events} layer events in {spent:.1f} s: {60e-6 * events / spent:.2f} million a minute")  # noqa: T201
