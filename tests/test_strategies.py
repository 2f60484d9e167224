"""Strategies by name, their seams one by one on cases worked out by hand, and what foresight is worth."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import DecodingConfig, Engine, RelumeError
from relume.clock.virtual import VirtualClock
from relume.core import Phase
from relume.machine.hardware import load_hardware
from relume.machine.work import WorkShape
from relume.simulate.job import simulate
from relume.simulate.replay import foresee, replay
from relume.strategy.budget import uniform
from relume.strategy.foresight.need import NeedModel
from relume.strategy.foresight.statistics import (
    MAX_DISTANCE,
    NUM_BINS,
    TokenStatistics,
    confidence_bins,
    mask_distances,
)
from relume.strategy.layer_budgets import BUDGETS
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.prefetch.by_need import ByNeed
from relume.strategy.prefetch.monitor import WINDOW, PrefetchMonitor
from relume.strategy.retention import RETENTIONS
from relume.strategy.retention.context import RetentionContext
from relume.strategy.retention.lfu import Lfu
from relume.strategy.retention.oled import Oled
from relume.strategy.strategies import STRATEGIES, Strategy
from relume.strategy.use import ExpertShape, LayerUse
from relume.synth.shapes import make_shape
from relume.trace.calibrated import CalibratedConfig, synthesise_trace
from relume.trace.file import TraceReader
from relume.trace.info import summarise
from relume.trace.profile import (
    PROFILE_NAME,
    cached_profile,
    gather_profile,
    read_model_profile,
    write_model_profile,
)
from relume.trace.views import layer_uses, phase_of, span_inputs
from terminal import RELUME
from traces import SMALL_TRACE, make_record, make_span, played, small_records

SHAPE = ExpertShape(1, 8, 2)
LLADA2_MINI = WorkShape.of(make_shape("llada2-mini").config, 2, 6 * 2**20)


def test_a_name_and_what_differs() -> None:
    assert Strategy.parse("oled") is STRATEGIES["oled"]
    found = Strategy.parse("oled:dispatch=transfer:budget=uniform:decay=0.25:gamma=2")
    assert found == Strategy("oled", "none", "transfer", "uniform", {"decay": 0.25, "gamma": 2.0})
    for text, words in (
        ("best", "unknown strategy 'best': choose one of"),
        ("oled:dispatch=magic", "unknown dispatch 'magic'"),
        ("oled:prefetch", "neither retention, prefetch, dispatch, budget with a name nor a parameter"),
        ("oled:speed=3", "no parameter 'speed'; oled has decay, gamma, boundary"),
        ("lru:decay=0.5", "no parameter 'decay'; lru has none"),
        ("oled:decay=fast", "neither"),
    ):
        with pytest.raises(RelumeError) as caught:
            Strategy.parse(text)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RelumeError, match="lru has no prefetch of its own"):
        Strategy.parse("lru:prefetch=own").make(RetentionContext(SHAPE, 4))


def use_of(ids: list[list[int]], weights: list[list[float]] | None = None) -> LayerUse:
    given = np.ones((len(ids), 2)) if weights is None else np.array(weights)
    return LayerUse(0, np.array(ids), given.astype(np.float32), np.ones(len(ids), dtype=bool), 8)


def test_oled_ranks_by_confidence_and_gate_weight() -> None:
    """phi is 0.1 * bin; of three masks the second is sure. Decay 0.5, gamma 1, boundary 0.25."""
    profile = replace(
        gather_profile([make_record([[[0, 1]]])], SHAPE), stability=np.linspace(0.0, 1.0, NUM_BINS + 1)
    )
    oled = Oled(RetentionContext(SHAPE, 4, profile), decay=0.5, gamma=1.0, boundary=0.25)
    span = make_span(3, confidences=np.array([0.2, 0.9, 0.5], dtype=np.float32))
    use = use_of([[0, 1], [1, 2], [3, 0]], [[1.0, 0.5], [2.0, 1.0], [1.0, 1.0]])
    oled.begin_forward([span])
    oled.observe(use)  # fresh masks: nothing is known of their confidences, and phi(0) is 0
    assert oled.priority(slice(0, 1))[0].tolist() == [0.0] * 8
    oled.end_forward([span])
    # expert 0: 0.2 * 1 + 0.5 * 1; expert 1: 0.2 * 0.5 + 0.9 * 2; expert 2: 0.9 * 1; expert 3: 0.5 * 1
    assert np.allclose(oled.priority(slice(0, 1))[0], [0.7, 1.9, 0.9, 0.5, 0, 0, 0, 0])
    oled.begin_forward([span])
    oled.observe(use_of([[4, 5], [4, 6], [7, 0]]))  # ranked by the confidences of the iteration before
    expected = [0.35 + 0.5, 0.95, 0.45, 0.25, 0.2 + 0.9, 0.2, 0.9, 0.5]
    assert np.allclose(oled.priority(slice(0, 1))[0], expected)
    oled.end_forward([make_span(3, Phase.COMMIT, next_start=3, confidences=np.ones(3, dtype=np.float32))])
    settled = np.array([0.35 + 1.0, 0.95, 0.45, 0.25, 2.0, 1.0, 1.0, 1.0])
    assert np.allclose(oled.priority(slice(0, 1))[0], 0.25 * settled)


def test_the_stability_curve_is_counted() -> None:
    """Two iterations of a block: the first token was sure (bin 9) and keeps both choices, the other one of two."""
    confidences = np.array([0.95, 0.31], dtype=np.float32)
    records = [
        make_record([[[0, 1], [2, 3]]], [make_span(2, confidences=confidences)]),
        make_record([[[1, 0], [3, 4]]], [make_span(2)]),
    ]
    plain = gather_profile(records[:1], SHAPE).stability
    found = gather_profile(records, SHAPE).stability
    assert found[9] == pytest.approx((2 + 20 * plain[9]) / 22)
    assert found[3] == pytest.approx((1 + 20 * plain[3]) / 22)
    assert [i for i in range(NUM_BINS + 1) if found[i] != plain[i]] == [3, 9]


def test_distances_and_bins() -> None:
    masked = np.array([True, True, False, True, True, False])
    assert mask_distances(masked).tolist() == [1, 2, 0, 1, 2, 0]
    assert mask_distances(np.ones(200, dtype=bool))[-1] == MAX_DISTANCE
    assert confidence_bins(np.array([0.0, 0.05, 0.1, 0.999, 1.0])).tolist() == [0, 0, 1, 9, 10]


def test_need_follows_tokens_that_change() -> None:
    """Token 5 always uses experts 6 and 7, masks (token 9) use 0 and 1: what commits as 5 will need 6 and 7."""
    statistics = TokenStatistics(SHAPE)
    prompt = make_span(40, Phase.PREFILL, token_ids=np.full(40, 5), masked=np.zeros(40, dtype=bool))
    statistics.take(prompt, np.tile([[[6, 7]]], (1, 40, 1)))
    first = make_span(2, token_ids=np.array([9, 9]))
    statistics.take(first, np.array([[[0, 1], [0, 1]]]))
    model = NeedModel(statistics)
    after = make_span(
        2, token_ids=np.array([9, 9]), next_token_ids=np.array([5, 9]), committed=np.array([True, False])
    )
    need = model.needs(0, [(model.after_logits(after), np.array([[0, 1], [0, 1]]))])
    assert set(np.argsort(-need)[:4]) == {0, 1, 6, 7} and need[6] > 0.8 and need[0] > 0.6
    again = model.needs(0, [(model.before_logits(first), np.array([[0, 1], [0, 1]]))])
    assert again[0] > again[6] > again[2]  # some masks will take tokens, which so far were all 5


def test_statistics_survive_a_file_and_forget_rare_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relume.strategy.foresight.statistics.MAX_TABLE_BYTES", 4 * 8 * 3)  # three tokens
    statistics = TokenStatistics(SHAPE)
    for tokens in ([1, 1, 1], [2, 2], [3], [1, 4], [2, 1000]):
        span = make_span(
            len(tokens), Phase.PREFILL, token_ids=np.array(tokens), masked=np.zeros(len(tokens), dtype=bool)
        )
        statistics.take(span, np.tile([[[0, 1]]], (1, len(tokens), 1)))
    assert sorted(statistics.tokens.tolist()) == [1, 2, 1000]
    assert (statistics.rows(np.array([1, 2, 1000])) >= 0).all() and statistics.rows(np.array([3]))[0] == -1
    assert statistics.uses[statistics.rows(np.array([1, 2, 1000]))].tolist() == [4, 3, 1]
    assert statistics.all_uses == 10
    profile = replace(gather_profile([make_record([[[0, 1]]])], SHAPE), statistics=statistics)
    write_model_profile(profile, tmp_path / "p.npz")
    loaded = read_model_profile(tmp_path / "p.npz", SHAPE).statistics
    for name, array in statistics.to_arrays().items():
        assert np.array_equal(loaded.to_arrays()[name], array), name
    assert loaded.rows(np.array([1, 2, 1000, 3])).tolist() == statistics.rows(np.array([1, 2, 1000, 3])).tolist()


def test_every_new_token_of_a_forward_gets_a_row() -> None:
    statistics = TokenStatistics(SHAPE)
    tokens = np.arange(100, 120)
    span = make_span(20, Phase.PREFILL, token_ids=tokens, masked=np.zeros(20, dtype=bool))
    statistics.take(span, np.tile([[[0, 1]]], (1, 20, 1)))
    assert len(set(statistics.rows(tokens).tolist())) == 20 and (statistics.rows(tokens) >= 0).all()
    assert statistics.uses.sum() == 20


def test_a_recorded_run_is_repeated_with_its_profile(tmp_path: Path) -> None:
    """Which `relume simulate` finds by itself."""
    options: dict[str, Any] = {"strategy": "foresight", "expert_memory": "10", "hardware": "rtx4090"}
    with Engine.load("demo", **options) as engine, engine.record(tmp_path / "trace"):
        engine.generate(messages=[{"role": "user", "content": "What is 23 + 58?"}])
    row = simulate(tmp_path / "trace", [], [], lambda _done, _total: None).rows[0]
    reader = TraceReader(tmp_path / "trace")
    summary = summarise(reader, reader.metadata.shape)
    assert row.hit_rate == pytest.approx(summary.hit_rate, abs=1e-12) and row.strategy == "foresight"
    with pytest.raises(RelumeError, match="leave --host-memory out"):
        Engine.load("demo", host_memory="10%", **options)


def test_what_was_learned_in_parts_is_what_is_learned_at_once() -> None:
    records = small_records()
    shape = TraceReader(SMALL_TRACE).metadata.shape
    whole = gather_profile(records, shape)
    context = RetentionContext(shape, 24, gather_profile(records[:20], shape))
    statistics = context.statistics()
    statistics.take(records[0].spans[0], records[0].expert_ids.astype(np.int64))
    assert context.statistics().all_uses < statistics.all_uses <= whole.statistics.all_uses  # a copy of its own


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 10), shared=st.booleans())
def test_gains_pair_the_best_misses_with_the_lowest_residents(seed: int, slots: int, shared: bool) -> None:
    shape = ExpertShape(2, 10, 2)
    generator = np.random.default_rng(seed)
    pool = ResidentPool(shape, 2 * slots if shared else [slots, slots])
    retention = Lfu(RetentionContext(shape, 2 * slots))
    retention._uses = generator.integers(0, 6, (2, 10)).astype(np.float64)
    for layer in range(2):
        count = generator.integers(0, slots + 1)
        pool.resident[layer, generator.permutation(10)[:count]] = True
    absent = (~pool.resident[1]).nonzero()[0]
    misses = np.sort(generator.permutation(absent)[: generator.integers(0, len(absent) + 1)])
    group = slice(0, 2) if shared else slice(1, 2)
    ranks = sorted(retention._uses[group][pool.resident[group]].tolist())
    free = (2 * slots if shared else slots) - len(ranks)
    displaced = [0.0] * free + ranks
    expected = np.zeros(len(misses))
    for order, index in enumerate(np.argsort(-retention._uses[1, misses], kind="stable").tolist()):
        if order < len(displaced):
            expected[index] = max(0.0, retention._uses[1, misses[index]] - displaced[order])
    assert np.array_equal(pool.gains(1, misses, retention), expected)


def test_prefetch_brings_what_outranks_the_lowest() -> None:
    shape = ExpertShape(2, 6, 1)
    pool = ResidentPool(shape, [2, 2])
    pool.resident[0, [0, 1]] = True
    pool.resident[1, 0] = True  # one slot of this layer is free
    retention = Lfu(RetentionContext(shape, 4))
    retention._uses = np.array([[0.5, 0.1, 0.9, 0.6, 0.25, 0.0], [0.9, 0.1, 0.15, 0.3, 0.0, 0.0]])
    prefetch = ByNeed()
    assert prefetch.wanted(0, pool, retention) is None  # only between forwards
    # Layer 0: 2 (0.9) for 1 (0.1); then 3 (0.6) for 0 (0.5) gains too little. Layer 1: 3 (0.3) for the free slot.
    assert prefetch.wanted(None, pool, retention) == [(0, 2), (1, 3)]


def test_prefetching_stops_when_most_is_wasted() -> None:
    monitor = PrefetchMonitor()
    monitor.brought((0, expert) for expert in range(WINDOW))
    monitor.used((0, expert) for expert in range(WINDOW // 2))
    monitor.left((0, expert) for expert in range(WINDOW // 2, WINDOW))
    assert (monitor.useful, monitor.wasted, monitor.stopped) == (WINDOW // 2, WINDOW // 2, False)
    monitor.brought((1, expert) for expert in range(WINDOW))
    monitor.used((1, expert) for expert in range(WINDOW // 2 - 1))
    monitor.left((1, expert) for expert in range(WINDOW // 2 - 1, WINDOW))
    assert monitor.stopped
    monitor.used([(1, 0)])  # counted once
    assert monitor.useful == WINDOW - 1


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), total=st.integers(4, 40), name=st.sampled_from(sorted(BUDGETS)))
def test_layer_budgets_spend_everything_and_stay_within_bounds(seed: int, total: int, name: str) -> None:
    shape = ExpertShape(4, 10, 2)
    generator = np.random.default_rng(seed)
    base = gather_profile([make_record(np.zeros((4, 1, 2)))], shape)
    reuse = np.sort(generator.random((4, 10)), axis=1)[:, ::-1]
    profile = replace(base, mean_active=1 + 9 * generator.random(4), reuse=reuse)
    slots = BUDGETS[name](total, shape, profile)
    assert sum(slots) == total and max(slots) <= 10 and min(slots) >= min(2, total // 4)
    assert BUDGETS[name](total, shape, None) == uniform(total, shape)


def test_marginal_hits_are_the_most_that_any_split_has() -> None:
    """Two layers of four experts and every split of four slots, at least one each (top-1)."""
    shape = ExpertShape(2, 4, 1)
    base = gather_profile([make_record(np.zeros((2, 1, 1)))], shape)
    reuse = np.array([[0.9, 0.8, 0.7, 0.1], [0.6, 0.3, 0.2, 0.1]])
    slots = BUDGETS["marginal"](4, shape, replace(base, reuse=reuse))
    hits = {(k, 4 - k): reuse[0, :k].sum() + reuse[1, : 4 - k].sum() for k in range(1, 4)}
    assert tuple(slots) == max(hits, key=lambda split: hits[split]) == (3, 1)


def test_prefetches_on_this_machine_are_used_and_repeated(tmp_path: Path) -> None:
    """Live, with real reads ahead of time; the replay repeats when each arrived."""
    from relume.simulate.recorded import replay_recorded

    prompts = ["Sort the numbers 9 4 7 1.", "Reverse the word planet.", "What is 23 + 58?"] * 2
    path = tmp_path / "trace"
    with Engine.load("demo", dtype="float32", strategy="full") as engine:
        expected = [engine.generate(messages=[{"role": "user", "content": p}]).canvas for p in prompts]
    with Engine.load("demo", dtype="float32", strategy="foresight", expert_memory="25%") as engine:
        with engine.record(path):
            results = [engine.generate(messages=[{"role": "user", "content": p}]) for p in prompts]
        engine._model.experts.check_integrity()
        slots = list(engine._model.experts.pool.slots)
    assert [result.canvas for result in results] == expected
    assert sum(result.statistics.prefetch_useful for result in results) > 0
    reader = TraceReader(path)
    shape = reader.metadata.shape
    profile = read_model_profile(Path(reader.metadata.profile), shape)  # the one beside the model
    context = RetentionContext(shape, sum(slots), profile)
    again = replay_recorded(reader, Strategy.parse("foresight"), context, slots)
    live = np.array([[len(layer) for layer in record.misses] for record in reader])
    assert (again.misses == live).all()
    assert again.prefetches == sum(len(layer) for record in reader for layer in record.arrived) > 0
    assert again.useful == sum(result.statistics.prefetch_useful for result in results)


def test_foresight_beats_counting_on_the_small_trace() -> None:
    reader = TraceReader(SMALL_TRACE)
    shape = reader.metadata.shape
    for slots in (4, 6, 9):
        rates = {
            name: played(reader, name, shape, [slots] * 4).hit_rate or 0.0
            for name in ("lru", "counts", "foresight:prefetch=none", "foresight")
        }
        assert rates["foresight"] >= rates["foresight:prefetch=none"] > max(rates["lru"], rates["counts"])


def test_a_missing_or_foreign_profile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RelumeError, match="no such profile") as caught:
        Engine.load("demo", strategy="foresight", expert_memory="25%", profile=str(tmp_path / "none.npz"))
    assert "\n" not in str(caught.value)
    write_model_profile(gather_profile([make_record([[[0, 1]]])], SHAPE), tmp_path / "other.npz")
    with pytest.raises(
        RelumeError, match="1 layers of 8 experts, 2 a token, the model has 5 layers of 64"
    ) as caught:
        Engine.load("demo", strategy="foresight", expert_memory="25%", profile=str(tmp_path / "other.npz"))
    assert "\n" not in str(caught.value)


def test_profiles_are_found_beside_the_model_and_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_checkpoint(tmp_path / "mine", LLADA2, make_tensors(LLADA2))
    options: dict[str, Any] = {"strategy": "static", "expert_memory": "25%"}
    with pytest.raises(RelumeError, match="relume trace profile"):
        Engine.load(model, **options)
    with Engine.load(model) as engine, engine.record(tmp_path / "trace"):
        expected = engine.generate(input_ids=[1, 2, 3], max_tokens=8).token_ids
    done = subprocess.run(
        [RELUME, "trace", "profile", tmp_path / "trace"], capture_output=True, text=True, check=True
    )
    path = cached_profile("mine")
    assert path.is_file() and str(path) in done.stdout
    with Engine.load(model, **options) as engine:
        assert engine.generate(input_ids=[1, 2, 3], max_tokens=8).token_ids == expected
    path.rename(model / PROFILE_NAME)
    with Engine.load(model, **options) as engine:
        assert engine.fallbacks == ()
    (model / PROFILE_NAME).write_text("nothing")
    with Engine.load(model, strategy="foresight", expert_memory="25%") as engine:
        (line,) = engine.fallbacks
        assert line.endswith("decoding without it") and "\n" not in line


def test_every_strategy_is_complete() -> None:
    for name, strategy in STRATEGIES.items():
        assert strategy.retention in RETENTIONS and strategy.budget in BUDGETS, name


@pytest.mark.slow
def test_foresight_closes_most_of_the_distance_to_the_bound(tmp_path: Path) -> None:
    """On held-out prompts of the shipped model, with the profile that comes with it. Prints figures, with -s."""
    from relume.evaluate.job import answer
    from relume.evaluate.prompts import problems_for

    texts = [problem.prompt for group in problems_for(None, None, 120, 0).values() for problem in group]
    with Engine.load("demo") as engine:
        with engine.record(tmp_path / "trace"):
            answer(engine, texts, DecodingConfig(), 1, lambda _done, _total: None)
        path = engine.folder / PROFILE_NAME
    reader = TraceReader(tmp_path / "trace")
    records, shape = list(reader), reader.metadata.shape
    profile, future = read_model_profile(path, shape), foresee(records, shape)
    names = ("lru", "belady", "counts", "oled:dispatch=transfer", "foresight:prefetch=none", "foresight")
    for share in (0.15, 0.25, 0.4):
        total = int(share * shape.num_layers * shape.num_experts)
        rates = {}
        for name in names:
            strategy = Strategy.parse(name)
            context = RetentionContext(shape, total, profile, future)
            slots = BUDGETS[strategy.budget](total, shape, profile)
            rates[name] = replay(records, strategy, context, slots).hit_rate or 0.0
        distance = rates["belady"] - rates["lru"]
        closed = {name: (rate - rates["lru"]) / distance for name, rate in rates.items()}
        print(f"{share:.0%}", {name: (round(rates[name], 3), round(closed[name], 2)) for name in names})  # noqa: T201
        assert closed["foresight:prefetch=none"] >= 0.5
        assert closed["foresight"] >= 0.6


@pytest.mark.slow
def test_show_what_deciding_costs() -> None:
    """Prints figures, to be read with -s: 19 layers of 256 experts, top-8, 32 tokens, on an idle machine."""
    config = CalibratedConfig(num_requests=1, blocks=12)
    shape = config.shape
    records = list(synthesise_trace(config, np.random.default_rng(0)))
    profile = gather_profile(records, shape)
    records = [record for record in records if phase_of(record) is Phase.DENOISE]
    for name in ("lru", "oled", "foresight", "freetoken", "hybrimoe", "moe-infinity", "finemoe"):
        for slots in (40, 100):
            parts = Strategy.parse(name).make(RetentionContext(shape, 19 * slots, profile))
            lanes = VirtualClock(load_hardware("rtx4090"), LLADA2_MINI, shape)
            placement = Placement(ResidentPool(shape, [slots] * 19), parts, lanes)
            spent = []
            for record in records:
                uses, inputs = layer_uses(record, shape.num_experts), span_inputs(record)
                started = time.process_time()
                placement.begin_forward(inputs)
                for use in uses:
                    placement.decide(use)
                placement.end_forward(record.spans)
                spent.append(1000 * (time.process_time() - started))
            print(f"{name} {slots} slots: {np.median(spent):.2f} ms of processor time a forward")  # noqa: T201
