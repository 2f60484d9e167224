"""Published policies that rank and prefetch at once: their decisions by hand, and what holds on any trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.core import Phase, RelumeError, SpanSignals
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.lanes import Key, TimelessLanes
from relume.strategy.placement import LayerDecision, Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.retention.base import Retention
from relume.strategy.retention.bringing import LENGTH, worth_bringing
from relume.strategy.retention.context import RetentionContext
from relume.strategy.retention.finemoe import FineMoE, MapStore
from relume.strategy.retention.hybrimoe import HybriMoE
from relume.strategy.retention.moe_infinity import MAX_REQUESTS, Activation, MoEInfinity
from relume.strategy.strategies import Strategy
from relume.strategy.use import ExpertShape, LayerUse
from relume.trace.file import TraceReader
from relume.trace.record import ForwardRecord
from relume.trace.views import layer_uses, span_inputs
from traces import SMALL_TRACE, joined, make_record, make_span, played, random_records

NAMES = ("moe-infinity", "finemoe", "hybrimoe")
CAPACITIES = (2, 4, 6, 9, 13, 24)
#: Hits over all forwards of the committed trace by slots per layer, each layer having its own.
GOLDEN = {
    "moe-infinity": (533, 1028, 1438, 1837, 2208, 2459),
    "finemoe": (547, 1059, 1503, 1982, 2290, 2457),
    "hybrimoe": (544, 1058, 1478, 1938, 2276, 2457),
}
#: The same with one pool for all four layers.
GOLDEN_SHARED = {
    "moe-infinity": (112, 534, 1097, 1716, 2178, 2459),
    "finemoe": (192, 734, 1304, 2018, 2328, 2457),
    "hybrimoe": (543, 1075, 1522, 2062, 2354, 2457),
}
ACTIVE = 2560
NOTHING = np.zeros(0, dtype=np.int64)


class Noted(TimelessLanes):
    """Keeps what is ordered; on request the host computes everything."""

    def __init__(self, hosted: bool = False) -> None:
        super().__init__()
        self.orders: list[list[Key]] = []
        self.hosted = hosted

    def order(self, keys: Sequence[Key]) -> None:
        self.orders.append(list(keys))
        super().order(keys)

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        case = super().case(use, hits, misses, reuse)
        if not self.hosted:
            return case
        slow = np.full(len(misses), 9.0)
        return dataclasses.replace(case, transfer_s=slow, host_s=slow / 90.0)


class Run:
    """A strategy, one forward after the other."""

    def __init__(self, text: str, shape: ExpertShape, slots: Sequence[int] | int, hosted: bool = False) -> None:
        self.lanes = Noted(hosted)
        self.pool = ResidentPool(shape, slots)
        parts = Strategy.parse(text).make(RetentionContext(shape, self.pool.num_slots))
        own: object = parts.retention
        assert parts.prefetch is own
        self.placement = Placement(self.pool, parts, self.lanes)

    def forward(self, record: ForwardRecord) -> list[LayerDecision]:
        self.placement.begin_forward(span_inputs(record))
        decisions = [self.placement.decide(use) for use in layer_uses(record, self.pool.shape.num_experts)]
        self.placement.end_forward(record.spans)
        return decisions

    def residents(self) -> list[list[int]]:
        return [row.nonzero()[0].tolist() for row in self.pool.resident]


def one_token(request: int, *experts: int, ends: bool = True) -> ForwardRecord:
    """A forward of a request's single token, which uses one expert in each layer."""
    span = make_span(1, request=request, next_token_ids=NOTHING if ends else np.array([9]))
    return make_record([[[expert]] for expert in experts], [span])


def test_moe_infinity_by_hand() -> None:
    """Three layers of six experts, a slot each, one token: A and B end, C is like A but for its last layer.

    The EAMs of A and B have one count in each row, of experts 1 3 5 and 0 2 4. The misses of B are wanted right
    now, so they replace what A left.
    """
    run = Run("moe-infinity", ExpertShape(3, 6, 1), [1, 1, 1])
    run.forward(one_token(0, 1, 3, 5))
    assert run.lanes.orders == [[]] * 4  # nothing is remembered yet
    second = run.forward(one_token(1, 0, 2, 4))
    assert [d.evicted for d in second] == [((0, 1),), ((1, 3),), ((2, 5),)]
    # A is the only match there was: after layer l its next layers, which are resident, and the misses evict them.
    assert run.lanes.orders[4:] == [[], [], [], []]
    assert run.residents() == [[0], [2], [4]]

    third = run.forward(one_token(2, 1, 3, 4, ends=False))
    # Layer 0 uses 1: cosine 1 with A, 0 with B. Of A, layer 1 has 1 - 1/4 and layer 2 has 1 - 2/4.
    # Layer 1 uses 3: A again, and layer 2 now has 1 - 1/4. After layer 2 nothing is left.
    # C goes on: rows 1 3 4 have cosines 1 1 0 with A and 0 0 1 with B. 1 and 3 are resident, 5 is not.
    assert run.lanes.orders[8:] == [[(1, 3), (2, 5)], [(2, 5)], [], [(2, 5)]]
    # 3 arrives for layer 1: predicted, against 2, which is not. It is used. 5 arrives for layer 2 likewise, is not
    # used, and gives way to 4, which is.
    assert [d.arrived.tolist() for d in third] == [[], [3], [5]]
    assert [d.evicted for d in third] == [((0, 0),), ((1, 2),), ((2, 4), (2, 5))]
    assert [d.hits.tolist() for d in third] == [[], [3], []]
    assert [(d.useful, d.wasted) for d in third] == [(0, 0), (1, 0), (0, 1)]


def test_moe_infinity_adds_predictions() -> None:
    """A request that used 0 went on with 1, one that used 2 with 3; of three new ones two are like the latter."""
    run = Run("moe-infinity", ExpertShape(2, 8, 1), [2, 2])
    for request, expert in enumerate((0, 2)):
        run.forward(one_token(request, expert, expert + 1))
    run.pool.restore([])
    del run.lanes.orders[:]
    records = [one_token(10 + i, expert, 7, ends=False) for i, expert in enumerate((0, 2, 2))]
    decisions = run.forward(joined(joined(records[0], records[1]), records[2]))
    assert run.lanes.orders[0] == [(1, 3), (1, 1)]
    # Both come. 7 is wanted right now, and of the two 1 is predicted less.
    assert decisions[1].arrived.tolist() == [1, 3] and decisions[1].evicted == ((1, 1),)


@pytest.mark.parametrize(("capacity", "predicted"), [(2, 5), (3, 1)])
def test_moe_infinity_replaces_the_most_similar(capacity: int, predicted: int) -> None:
    """0 1, 2 3, 0 5 in one slot: the third is most like the first. Of equals the first one remembered counts."""
    run = Run(f"moe-infinity:capacity={capacity}", ExpertShape(2, 8, 1), [1, 1])
    for request, experts in enumerate([(0, 1), (2, 3), (0, 5)]):
        run.forward(one_token(request, *experts))
    run.pool.restore([])
    del run.lanes.orders[:]
    run.forward(one_token(9, 0, 0, ends=False))
    assert run.lanes.orders[0] == [(1, predicted)]


def test_moe_infinity_ranks_by_visits_in_the_cache() -> None:
    """One layer, two slots, nothing remembered: 0 was used twice since it came in, 1 once and 2 is in use."""
    run = Run("moe-infinity", ExpertShape(1, 4, 1), [2])
    for expert in (0, 0, 1):
        run.forward(one_token(0, expert, ends=False))
    (third,) = run.forward(one_token(0, 2, ends=False))
    assert third.evicted == ((0, 1),)
    # 2 has its own visit; 1 comes back with one, not two: equals, and the resident of the lower id stays.
    (fourth,) = run.forward(one_token(0, 1, ends=False))
    assert fourth.evicted == ((0, 2),)
    (fifth,) = run.forward(one_token(0, 3, ends=False))
    assert fifth.evicted == ((0, 1),)


def test_requests_that_never_end_are_forgotten() -> None:
    run = Run("moe-infinity:capacity=2", ExpertShape(1, 4, 1), [2])
    for request in range(MAX_REQUESTS + 40):
        run.forward(one_token(request, request % 4, ends=False))
    retention = run.placement.retention
    assert isinstance(retention, MoEInfinity) and len(retention._open) == MAX_REQUESTS
    run.forward(one_token(MAX_REQUESTS + 39, 0))
    assert len(retention._open) == MAX_REQUESTS - 1


counts = st.lists(st.integers(0, 50), min_size=12, max_size=12)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(counts, min_size=8, max_size=8), index=st.integers(0, 2))
def test_similarity_is_the_mean_cosine_of_rows(rows: list[list[int]], index: int) -> None:
    """Two layers of six experts: three remembered, of which one is replaced by another in between."""
    shape = ExpertShape(2, 6, 1)
    maps = [np.array(row, dtype=np.int64).reshape(2, 6) for row in rows]
    units = []
    for remembered in maps[:4]:
        other = Activation(shape, 1)
        for layer in range(2):
            other.add(layer, remembered[layer], np.zeros((0, 6), dtype=np.float32))
        units.append(other.rows)
    store = np.stack(units[:3], axis=1)
    activation = Activation(shape, 3)
    activation.add(0, maps[4][0], store[0])
    activation.add(1, maps[4][1], store[1])
    store[:, index] = units[3]
    activation.replaced(index, units[3])
    for added in maps[5:]:
        activation.add(0, added[0], store[0])
    total = maps[4].copy()
    total[0] += sum(added[0] for added in maps[5:])
    current = [maps[i] if i != index else maps[3] for i in range(3)]
    for found, remembered in zip(activation.similarity / LENGTH**2, current, strict=True):
        expected = 0.0
        for mine, theirs in zip(total, remembered, strict=True):
            length = np.sqrt(float(mine @ mine) * float(theirs @ theirs))
            expected += float(mine @ theirs) / length if length else 0.0
        assert found == pytest.approx(expected, abs=2e-3)
    assert (activation.similarity == activation.products.sum(axis=0, dtype=np.float64)).all()


def tokens(*each: Sequence[int], token_ids: Sequence[int], following: Sequence[int]) -> ForwardRecord:
    """A forward of a block; of every token its id and its experts, one a layer, and the ids that follow."""
    span = make_span(
        len(each),
        token_ids=np.array(token_ids, dtype=np.int64),
        next_token_ids=np.array(following, dtype=np.int64),
    )
    return make_record(np.array(each).T[:, :, None], [span])


def test_finemoe_by_hand() -> None:
    """Three layers of six experts, two slots each, blocks of two tokens; d is 1."""
    run = Run("finemoe", ExpertShape(3, 6, 1), [2, 2, 2])
    run.forward(tokens((0, 1, 2), (3, 4, 5), token_ids=(10, 11), following=(20, 21)))
    # Tokens 10 and 11 are stored; 20 and 21 are not known, so their first layer is not predicted.
    assert run.lanes.orders == [[], [], [], []]
    run.forward(tokens((1, 2, 3), (2, 3, 4), token_ids=(20, 21), following=(10, 10)))
    # Both have a cosine of 0 with the stored tokens in layer 0, so the first one predicts: expert 1 of layer 1 and
    # 2 of layer 2, which are resident. What is in use is 2 and 3, so 1 leaves layer 1 all the same. In layer 1
    # token 20 still has nothing in common with any; token 21 neither. 3 and 4 take the slots of layer 2.
    # Then token 10 follows, twice: in layer 0 it used expert 0.
    assert run.residents() == [[1, 2], [2, 3], [3, 4]]
    assert run.lanes.orders[4:] == [[], [], [], [(0, 0)]]

    third = run.forward(tokens((0, 4, 2), (0, 4, 2), token_ids=(10, 10), following=()))
    # 0 arrives: predicted, against 1 and 2, which are not and have a visit each, so the higher id leaves.
    # Layer 0 uses 0, as token 10 did: both tokens predict its 1 (decay 1 - 1/4) and its 2 (1 - 2/4).
    # 1 arrives in layer 1 in the place of 3. Layer 1 uses 4 instead, for which 2 leaves, as 1 is predicted.
    # The rows 0 4 have a cosine of 1/2 with those of token 10 (0 1) and of 11 (3 4): the first one, and 2 arrives
    # for layer 2, in the place of 4. The request ends, so no token follows.
    assert run.lanes.orders[8:] == [[(1, 1), (2, 2)], [(2, 2)], [], []]
    assert [d.arrived.tolist() for d in third] == [[0], [1], [2]]
    assert [d.evicted for d in third] == [((0, 2),), ((1, 3), (1, 2)), ((2, 4),)]
    assert [d.hits.tolist() for d in third] == [[0], [], [2]]


def test_finemoe_follows_only_the_last_block_of_a_prompt() -> None:
    run = Run("finemoe", ExpertShape(1, 6, 1), [6])
    span = make_span(4, Phase.PREFILL, block_length=2, token_ids=np.arange(10, 14))
    run.forward(make_record([[[0], [1], [2], [3]]], [span]))
    retention = run.placement.retention
    assert isinstance(retention, FineMoE)
    store = retention._store
    assert store.size == 2 and [store.same_token(np.array([token])).tolist() for token in (10, 12, 13)] == [
        [],
        [0],
        [1],
    ]


def unit_maps(*experts: Sequence[int]) -> np.ndarray:
    """`[layers, tokens, 6]` of tokens with one expert a layer."""
    maps: np.ndarray = LENGTH * np.eye(6, dtype=np.float32)[np.array(experts)].swapaxes(0, 1)
    return maps


def test_a_full_store_replaces_the_most_redundant() -> None:
    """d / L is 1/3. Token 11 comes with the map of 10: 2/3 redundant with that, 1/3 with its own former one."""
    store = MapStore(ExpertShape(3, 6, 1), 2, 1 / 3)
    store.add(np.array([10, 11]), unit_maps((0, 1, 2), (3, 4, 5)), np.zeros((2, 0)))

    def cosines(maps: np.ndarray) -> np.ndarray:
        products: np.ndarray = sum((store.products(layer, maps[layer]) for layer in range(3)), np.zeros(1))
        found: np.ndarray = store.cosines(products, 2) / np.sqrt(3 * LENGTH**2)
        return found

    new = unit_maps((0, 1, 2))
    assert cosines(new) == pytest.approx(np.array([[1.0, 0.0]]))
    store.add(np.array([11]), new, cosines(new))
    assert store.same_token(np.array([10])).tolist() == []
    assert store.same_token(np.array([11])).tolist() == [0]  # the latest of two
    # A third of the map in common with both: the token decides, for the first of equals; and of two tokens that
    # would replace the same entry the last one does.
    new = unit_maps((0, 4, 0), (0, 4, 1))
    assert cosines(new) == pytest.approx(1 / 3)
    store.add(np.array([11, 11]), new, cosines(new))
    assert store.maps[2, :, :2].argmax(axis=1).tolist() == [1, 0] and store.maps[2, 0, 1] == LENGTH


def test_a_token_s_map_is_of_its_gate_weights() -> None:
    """Weights 3 and 1 of two experts are probabilities 3/4 and 1/4."""
    run = Run("finemoe", ExpertShape(1, 4, 2), [4])
    record = dataclasses.replace(make_record([[[2, 0]]]), weights=np.array([[[3.0, 1.0]]], dtype=np.float32))
    run.forward(record)
    retention = run.placement.retention
    assert isinstance(retention, FineMoE)
    assert retention._store.maps[0, 0].tolist() == [0.25 * LENGTH, 0.0, 0.75 * LENGTH, 0.0]


def weighted(*layers: dict[int, float]) -> ForwardRecord:
    """A forward whose layers' tokens have one expert each, of a given gate weight."""
    record = make_record([[[expert] for expert in layer] for layer in layers])
    weights = np.array([[[weight] for weight in layer.values()] for layer in layers], dtype=np.float32)
    return dataclasses.replace(record, weights=weights)


def test_hybrimoe_by_hand() -> None:
    """One layer, two slots; alpha is 1/2 and the two highest scores count."""
    run = Run("hybrimoe:p=2", ExpertShape(1, 6, 1), [2])
    (first,) = run.forward(weighted({0: 0.875, 1: 0.5, 2: 0.25}))
    # S is 7/16, 1/4 and, as a third one, 0 for 2.
    assert (first.kept.tolist(), run.residents()) == ([0, 1], [[0, 1]])
    (second,) = run.forward(weighted({2: 1.0, 3: 0.25, 0: 0.125}))
    # 2: 1/2, 3: 1/8, 0: 7/32, as its score is the third one, 1: 1/8. So 2 takes the place of 1, and 3 stays out.
    assert (second.kept.tolist(), second.evicted, run.residents()) == ([2], ((0, 1),), [[0, 2]])
    scores = run.placement.retention.priority(slice(0, 1))
    assert scores.tolist() == [[7 / 32, 1 / 8, 1 / 2, 1 / 8, 0.0, 0.0]]
    # Where everything crosses the link, nothing absent ranks higher than what is resident.
    assert run.lanes.orders == [[]] * 4


def test_hybrimoe_brings_what_the_host_computed() -> None:
    """Two layers, one slot each, a link so slow that the host computes every miss."""
    run = Run("hybrimoe", ExpertShape(2, 6, 1), [1, 1], hosted=True)
    first = run.forward(weighted({0: 0.5, 1: 0.75}, {2: 0.5, 3: 0.25}))
    assert [d.hosted.tolist() for d in first] == [[0, 1], [2, 3]] and run.residents() == [[], []]
    # After layer 0, layer 1 has no scores yet. After the last one layer 0 follows, where 1 has the highest.
    assert run.lanes.orders == [[], [(0, 1)], [(0, 1)]]
    second = run.forward(weighted({0: 0.5, 1: 0.75}, {2: 0.5, 3: 1.0}))
    # 1 came for layer 0, 2 is ordered for layer 1 and comes. Then 3 has 1/2 + 1/16 there and 2 has 3/8, but layer
    # 0 comes next: 0 has 3/8 and does not outrank 1, which has 9/16.
    assert [d.hits.tolist() for d in second] == [[1], [2]]
    assert run.lanes.orders[3:] == [[(1, 2)], [], []]
    run.forward(weighted({0: 0.5, 1: 0.75}, {2: 0.25, 3: 0.25}))
    assert run.lanes.orders[6] == [(1, 3)] and run.residents() == [[1], [3]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hybrimoe:alpha=1.5", "hybrimoe: alpha is 1.5: it must be in 0..1"),
        ("hybrimoe:n=-1", "n is -1: it must be a whole number of at least 0"),
        ("hybrimoe:p=2.5", "p is 2.5: it must be a whole number"),
        ("finemoe:capacity=0", "finemoe: capacity is 0: it must be a whole number of at least 1"),
        ("finemoe:distance=0", "distance is 0"),
        ("moe-infinity:most=inf", "most is inf"),
        ("moe-infinity:capacity=nan", "capacity is nan"),
    ],
)
def test_parameters_out_of_range(text: str, words: str) -> None:
    shape = ExpertShape(3, 8, 2)
    with pytest.raises(RelumeError, match=words):
        Strategy.parse(text).make(RetentionContext(shape, 6))


def test_parameters_and_tables() -> None:
    shape = ExpertShape(19, 256, 8)
    assert Strategy.parse("hybrimoe:alpha=0.3").parameters == {"alpha": 0.3}
    assert Strategy.parse("hybrimoe").num_bytes(shape) == 0
    for name in ("moe-infinity", "finemoe"):
        assert Strategy.parse(name).num_bytes(shape) == 19_456_000
        assert Strategy.parse(f"{name}:capacity=10").num_bytes(shape) == 194_560
    context = RetentionContext(shape, 19)
    assert MoEInfinity(context, capacity=10.0)._remembered.nbytes == 194_560
    assert FineMoE(context, capacity=10.0)._store.maps.nbytes == 194_560
    assert [FineMoE(RetentionContext(ExpertShape(n, 8, 2), 8))._distance for n in (1, 2, 4, 19, 32)] == [
        1,
        1,
        1,
        6,
        6,
    ]
    # They are prefetches to `isinstance`; this is where mypy sees that they have what one has.
    wanted: list[Callable[[int | None, ResidentPool, Retention], list[Key] | None]] = [
        policy.wanted for policy in (MoEInfinity(context), FineMoE(context), HybriMoE(context))
    ]
    assert len(wanted) == 3 and all(issubclass(policy, Prefetch) for policy in (MoEInfinity, FineMoE, HybriMoE))


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60, deadline=None)
@given(seed=seeds, slots=st.lists(st.integers(0, 8), min_size=3, max_size=3), shared=st.booleans())
def test_what_is_worth_bringing_is_let_in(seed: int, slots: list[int], shared: bool) -> None:
    generator = np.random.default_rng(seed)
    shape = ExpertShape(3, 8, 1)
    retention = HybriMoE(RetentionContext(shape, 1))
    retention._scores[:] = generator.integers(0, 5, (3, 8))
    pool = ResidentPool(shape, sum(slots) if shared else slots)
    for layer in range(3):  # some may be resident that do not rank high
        some = generator.permutation(8)[: generator.integers(0, 9)]
        pool.admit(layer, np.sort(some), retention)
    retention._scores[:] = generator.integers(0, 5, (3, 8))
    scores = generator.random((3, 8)) * generator.integers(0, 2, (3, 8))
    keys = worth_bringing(scores, retention._scores, pool, 99)
    assert keys == sorted(keys, key=lambda key: -scores[key])
    assert all(scores[key] > 0.0 and not pool.resident[key] for key in keys)
    assert worth_bringing(scores, retention._scores, pool, 2) == keys[:2]
    for layer in range(3):
        pool.admit(layer, np.array(sorted(e for its, e in keys if its == layer), dtype=np.int64), retention)
    assert all(pool.resident[key] for key in keys)


def ending_records(shape: ExpertShape, num_forwards: int, generator: np.random.Generator) -> list[ForwardRecord]:
    """Random routing of random tokens, one or two requests at once, which end now and then."""

    def altered(record: ForwardRecord, request: int) -> ForwardRecord:
        (span,) = record.spans
        following = NOTHING if generator.random() < 0.3 else generator.integers(0, 9, span.block_length)
        changed: SpanSignals = dataclasses.replace(
            span,
            request=request,
            token_ids=generator.integers(0, 9, len(span.token_ids)),
            next_token_ids=following,
        )
        weights = generator.random(record.weights.shape, dtype=np.float32)
        return dataclasses.replace(record, spans=(changed,), weights=weights)

    records = []
    for record in random_records(shape, num_forwards, 4, generator):
        found = altered(record, int(generator.integers(0, 2)))
        if generator.random() < 0.5:
            found = joined(found, altered(record, 2))
        records.append(found)
    return records


@settings(max_examples=25, deadline=None)
@given(
    seed=seeds,
    slots=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shared=st.booleans(),
    text=st.sampled_from([*NAMES, "moe-infinity:capacity=3:most=30", "finemoe:capacity=5", "hybrimoe:n=6:p=9"]),
)
def test_what_holds_on_any_trace(seed: int, slots: list[int], shared: bool, text: str) -> None:
    """Two runs decide alike, nobody has more than its slots, and what arrives was ordered and absent."""
    shape = ExpertShape(4, 12, 2)
    records = ending_records(shape, 15, np.random.default_rng(seed))
    runs = [Run(text, shape, sum(slots) if shared else slots) for _ in range(2)]
    for record in records:
        active = [np.unique(ids) for ids in record.expert_ids]
        first, second = (run.forward(record) for run in runs)
        for one, other, used in zip(first, second, active, strict=True):
            assert [str(value) for value in vars(one).values()] == [str(value) for value in vars(other).values()]
            assert np.array_equal(np.union1d(one.hits, one.misses), used)
        pool = runs[0].pool
        assert pool.resident.sum() <= sum(slots) and (shared or (pool.resident.sum(axis=1) <= slots).all())
        for order in runs[0].lanes.orders:
            assert len(order) == len(set(order))
    assert runs[0].lanes.orders == runs[1].lanes.orders


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_golden_hits(name: str, shared: bool) -> None:
    reader = TraceReader(SMALL_TRACE)
    shape = reader.metadata.shape
    results = [played(reader, name, shape, [slots] * 4, shared) for slots in CAPACITIES]
    assert tuple(int(result.hits.sum()) for result in results) == (GOLDEN_SHARED if shared else GOLDEN)[name]
    assert all(result.hits.sum() + result.misses.sum() == ACTIVE for result in results)
    again = played(reader, name, shape, [CAPACITIES[2]] * 4, shared)
    for field in dataclasses.fields(again):
        assert np.array_equal(getattr(again, field.name), getattr(results[2], field.name))
    for slots, result in zip(CAPACITIES, results, strict=True):
        assert (result.resident <= (4 * slots if shared else slots)).all()


def test_prefetching_is_useful_on_the_committed_trace() -> None:
    reader = TraceReader(SMALL_TRACE)
    shape = reader.metadata.shape
    for name in ("moe-infinity", "finemoe"):
        assert played(reader, name, shape, [6] * 4).useful > 0
        assert played(reader, f"{name}:prefetch=none", shape, [6] * 4).prefetches == 0
