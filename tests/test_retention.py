"""Retention policies and the pool: golden counts, naive references, the bound, and budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_retention import (
    NaiveCounts,
    NaiveLeastStale,
    NaiveLfru,
    NaiveLfu,
    NaiveLru,
    NaivePolicy,
    lru_list,
    most_hits,
    naive_replay,
)
from relume.core import RelumeError
from relume.simulate.replay import ReplayResult, foresee
from relume.strategy.budget import ExpertMemory, explicit, shared_pool_warning, uniform
from relume.strategy.lanes import TimelessLanes
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.retention import RETENTIONS
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import STRATEGIES, Strategy
from relume.strategy.use import ExpertShape
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile
from relume.trace.record import ForwardRecord
from relume.trace.views import layer_uses, span_inputs
from traces import SMALL_TRACE, make_record, played, random_records

CAPACITIES = (2, 4, 6, 9, 13, 24)
#: Hits over all forwards of the committed trace by slots per layer, each layer having its own.
GOLDEN = {
    "lru": (523, 1014, 1457, 1954, 2279, 2457),
    "lfu": (537, 1007, 1391, 1782, 2160, 2457),
    "lfru": (537, 1043, 1467, 1937, 2274, 2457),
    "least-stale": (426, 882, 1361, 1919, 2260, 2457),
    "static": (553, 1040, 1434, 1860, 2249, 2560),
    "counts": (547, 1060, 1501, 1960, 2253, 2457),
    "belady": (560, 1114, 1602, 2099, 2408, 2560),
}
#: The same with one pool for all four layers.
GOLDEN_SHARED = {
    "lru": (0, 0, 119, 1773, 2340, 2457),
    "lfu": (529, 1014, 1460, 1889, 2224, 2457),
    "lfru": (528, 1030, 1493, 2028, 2340, 2457),
    "least-stale": (78, 305, 754, 1682, 2128, 2457),
    "static": (550, 1048, 1516, 1968, 2318, 2560),
    "counts": (529, 1045, 1507, 2084, 2318, 2457),
    "belady": (560, 1117, 1653, 2248, 2474, 2560),
}
ACTIVE = 2560
NAIVE: dict[str, Callable[[Sequence[ForwardRecord]], NaivePolicy]] = {
    "lru": lambda _: NaiveLru(),
    "lfu": lambda _: NaiveLfu(),
    "lfru": lambda _: NaiveLfru(),
    "least-stale": lambda _: NaiveLeastStale(),
    "counts": NaiveCounts,
}


@pytest.fixture(scope="module")
def small() -> TraceReader:
    return TraceReader(SMALL_TRACE)


def play(
    name: str, records: Sequence[ForwardRecord] | TraceReader, shape: ExpertShape, slots: int, shared: bool
) -> ReplayResult:
    """Any policy, with what it needs from the trace itself."""
    profile = gather_profile(records, shape) if name == "static" else None
    future = foresee(records, shape) if name == "belady" else None
    return played(records, name, shape, [slots] * shape.num_layers, shared, profile, future)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_hits(small: TraceReader, name: str, shared: bool) -> None:
    results = [play(name, small, small.metadata.shape, slots, shared) for slots in CAPACITIES]
    assert tuple(int(result.hits.sum()) for result in results) == (GOLDEN_SHARED if shared else GOLDEN)[name]
    assert all(result.hits.sum() + result.misses.sum() == ACTIVE for result in results)


def test_full_hits_everything_and_refuses_less(small: TraceReader) -> None:
    shape = small.metadata.shape
    result = play("full", small, shape, 24, False)
    assert (result.hit_rate, result.loads, result.preloads) == (1.0, 0, 96)
    with pytest.raises(RelumeError, match="holds all 96 experts, and the expert memory has 40"):
        play("full", small, shape, 10, False)


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(seed=seeds, slots=st.integers(1, 12), shared=st.booleans(), name=st.sampled_from(sorted(NAIVE)))
def test_policies_equal_their_naive_references(seed: int, slots: int, shared: bool, name: str) -> None:
    shape = ExpertShape(3, 12, 2)
    records = random_records(shape, 12, 4, np.random.default_rng(seed))
    result = play(name, records, shape, slots, shared)
    expected = naive_replay(records, shape, 3 * slots if shared else [slots] * 3, NAIVE[name](records))
    assert np.stack((result.hits, result.misses), axis=-1).tolist() == [[list(p) for p in row] for row in expected]


@settings(max_examples=25, deadline=None)
@given(seed=seeds, slots=st.integers(1, 12))
def test_lru_equals_a_list_from_old_to_new(seed: int, slots: int) -> None:
    shape = ExpertShape(1, 12, 2)
    records = random_records(shape, 15, 4, np.random.default_rng(seed))
    result = play("lru", records, shape, slots, False)
    assert list(zip(result.hits[:, 0].tolist(), result.misses[:, 0].tolist(), strict=True)) == lru_list(
        records, slots
    )


@settings(max_examples=20, deadline=None)
@given(seed=seeds, slots=st.integers(1, 10), shared=st.booleans())
def test_nothing_beats_belady(seed: int, slots: int, shared: bool) -> None:
    shape = ExpertShape(3, 12, 2)
    records = random_records(shape, 12, 4, np.random.default_rng(seed))
    bound = play("belady", records, shape, slots, shared).hits.sum()
    for name in GOLDEN:
        assert play(name, records, shape, slots, shared).hits.sum() <= bound, name


@settings(max_examples=25, deadline=None)
@given(seed=seeds, slots=st.integers(1, 3), shared=st.booleans())
def test_belady_equals_trying_everything(seed: int, slots: int, shared: bool) -> None:
    shape = ExpertShape(2, 3, 1)
    records = random_records(shape, 7, 2, np.random.default_rng(seed))
    result = play("belady", records, shape, slots, shared)
    assert result.hits.sum() == most_hits(records, shape, 2 * slots if shared else [slots] * 2)


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    slots=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    shared=st.booleans(),
    name=st.sampled_from(sorted(GOLDEN)),
)
def test_what_the_pool_says_is_what_it_does(seed: int, slots: list[int], shared: bool, name: str) -> None:
    shape = ExpertShape(3, 12, 2)
    generator = np.random.default_rng(seed)
    records = random_records(shape, 8, 4, generator)
    context = RetentionContext(shape, sum(slots), gather_profile(records, shape), foresee(records, shape))
    pool = ResidentPool(shape, sum(slots) if shared else slots)
    placement = Placement(pool, STRATEGIES[name].make(context), TimelessLanes())
    if placement.retention.preload:
        added = placement.fill()
        assert len(added) == len(set(added)) == pool.resident.sum() == sum(slots)
        assert placement.fill() == []
    for record in records:
        placement.begin_forward(span_inputs(record))
        for use in layer_uses(record, shape.num_experts):
            before = pool.resident.copy()
            decision = placement.decide(use)
            active = np.unique(use.expert_ids)
            assert np.array_equal(np.union1d(decision.hits, decision.misses), active)
            assert before[use.layer, decision.hits].all() and not before[use.layer, decision.misses].any()
            assert np.isin(decision.kept, decision.transferred).all()
            assert placement.retention.admits(use)[decision.kept].all()
            for expert in decision.evicted:
                assert before[expert]
                before[expert] = False
            before[use.layer, decision.kept] = True
            assert np.array_equal(before, pool.resident)
            counts = pool.resident.sum(axis=1)
            assert counts.sum() <= sum(slots) and (shared or (counts <= slots).all())
        placement.end_forward(record.spans)


def test_a_shared_pool_smaller_than_a_pass_has_no_lru_hits() -> None:
    """Four layers that use the same six experts in every pass: 24 in all."""
    shape = ExpertShape(4, 12, 2)
    records = [make_record(np.tile(np.arange(6).reshape(1, 3, 2), (4, 1, 1)))] * 10
    for slots, hits in ((12, 0), (18, 0), (24, 9 * 24)):
        budget = uniform(slots, shape)
        assert played(records, "lru", shape, budget, shared=True).hits.sum() == hits
        bound = played(records, "belady", shape, budget, shared=True, future=foresee(records, shape))
        assert bound.hits.sum() == 10 * slots
    warning = shared_pool_warning(18, np.full(4, 6.0))
    assert warning is not None and "24 slots" in warning and "\n" not in warning
    assert shared_pool_warning(24, np.full(4, 6.0)) is None


def test_what_failed_to_load_is_a_miss_again(small: TraceReader) -> None:
    shape = small.metadata.shape
    retention = RETENTIONS["lru"](RetentionContext(shape, 96))
    pool = ResidentPool(shape, [24] * 4)
    use = layer_uses(next(iter(small)), shape.num_experts)[0]
    retention.observe(use)
    kept, _ = pool.admit(0, pool.look(use)[1], retention)
    pool.restore([(0, expert) for expert in kept[1:].tolist()])
    assert pool.look(use)[1].tolist()[0] == kept[0]


def test_policies_that_lack_what_they_need_say_where_to_get_it(small: TraceReader) -> None:
    shape = small.metadata.shape
    with pytest.raises(RelumeError, match="relume trace profile"):
        RETENTIONS["static"](RetentionContext(shape, 8))
    with pytest.raises(RelumeError, match="relume simulate"):
        RETENTIONS["belady"](RetentionContext(shape, 8))
    other = gather_profile([make_record([[[0, 1]]])], ExpertShape(1, 24, 2))
    with pytest.raises(RelumeError, match=r"1 layers of 24 experts, 2 a token, the model has 4 layers of 24"):
        RetentionContext(shape, 8, other)
    with pytest.raises(RelumeError, match="choose one of belady, counts"):
        Strategy.parse("magic")


MINI = ExpertShape(19, 256, 8)
EXPERT_BYTES = 6 * 2**20


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("40%", 1945),
        ("100%", 4864),
        ("8GiB", 1365),
        ("8 gib", 1365),
        ("1.5GB", 238),
        ("9TB", 4864),
        ("100", 1900),
        ("29%", 1410),
    ],
)
def test_expert_memory_in_slots(text: str, slots: int) -> None:
    assert ExpertMemory.parse(text).total_slots(MINI, EXPERT_BYTES) == slots


@pytest.mark.parametrize("text", ["", "much", "40 %%", "-3", "0%", "101%", "2.5", "8XB", "nan", "0", "0GiB"])
def test_amounts_that_are_none(text: str) -> None:
    with pytest.raises(RelumeError, match="expert memory"):
        ExpertMemory.parse(text)


def test_amounts_that_fit_no_model() -> None:
    assert ExpertMemory.parse("auto").is_auto and not ExpertMemory.parse("40%").is_auto
    for text, words in (
        ("auto", "a share as 40%"),
        ("300", "only 256"),
        ("0.3%", r"holds 14 experts, .* give at least 1, which is 0\.4% or 114MiB"),
        ("100MiB", "holds 16 experts, and the model has 19 layers"),
    ):
        with pytest.raises(RelumeError, match=words):
            ExpertMemory.parse(text).total_slots(MINI, EXPERT_BYTES)
    for text in ("0.4%", "114MiB", "1"):
        assert ExpertMemory.parse(text).total_slots(MINI, EXPERT_BYTES) == 19


def test_budgets() -> None:
    shape = ExpertShape(4, 24, 2)
    assert uniform(42, shape) == [11, 11, 10, 10]
    assert explicit("2, 24,5,6", shape) == [2, 24, 5, 6]
    for text, words in (
        ("1,2,3", "3 numbers of slots for 4"),
        ("2,2,2,x", "whole number"),
        ("2,2,25,2", "layer 2 gets 25 slots"),
        ("0,2,2,2", "layer 0 gets 0 slots"),
    ):
        with pytest.raises(RelumeError, match=words):
            explicit(text, shape)
