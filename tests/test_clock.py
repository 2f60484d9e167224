"""The virtual clock: layers worked out by hand, and what holds whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.clock.virtual import VirtualClock, held_experts
from relume.core import Phase, SpanInput
from relume.experts.host import spread
from relume.machine.figures import KernelTimes, MachineProfile, Measurement
from relume.machine.hardware import Hardware, ProfiledHardware, load_hardware, measured_hardware
from relume.machine.work import WorkShape
from relume.strategy.dispatch.lanes import lane_seconds
from relume.strategy.lanes import Key, Lanes
from relume.strategy.use import ExpertShape, LayerUse

MS = 1e-3
MEGABYTE = 10**6  # of an expert
SHAPE = ExpertShape(num_layers=3, num_experts=8, top_k=2)
#: Next to nothing but experts, so that times are round.
WORK = WorkShape(
    hidden_size=10,
    expert_size=10,
    num_layers=4,
    num_dense_layers=1,
    attention_parameters=1,
    query_group=1,
    shared_parameters=0,
    dense_parameters=0,
    router_parameters=1,
    head_parameters=1,
    kv_bytes_per_position=2,
    expert_bytes=MEGABYTE,
    itemsize=2,
)
#: An expert takes 1 ms over the link, 0.1 ms on the device, 2 ms on the host after 0.5 ms, and 4 ms from disk.
ROUND = {
    "device.bandwidth": 10.0,
    "link.bandwidth": 1.0,
    "host.bandwidth": 0.5,
    "disk.bandwidth": 0.25,
    "host.start": 500.0,
}
NOTHING = {"device.launch", "device.sampling", "link.latency", "link.router_sync", "host.call"}


def machine(**changes: float) -> Hardware:
    """`ROUND`, changed; keys with `_` for the dot. RAM holds everything."""
    shipped = load_hardware("rtx4090")
    values = dict.fromkeys(NOTHING, 0.0) | ROUND | {"device.bandwidth_share": 1.0}
    values |= {key.replace("_", ".", 1): value for key, value in changes.items()}
    constants = {key: replace(old, value=values.get(key, old.value)) for key, old in shipped.constants.items()}
    return ProfiledHardware("round", "round", constants)


def span(start: int = 0, length: int = 4) -> SpanInput:
    tokens, nothing = np.zeros(length, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return SpanInput(0, Phase.DENOISE, start, length, tokens, tokens == 0, start, nothing)


def use(layer: int, experts: Sequence[int]) -> LayerUse:
    """Each expert used by one token."""
    ids = np.array(experts, dtype=np.int64).reshape(-1, 1)
    return LayerUse(layer, ids, np.ones(ids.shape, dtype=np.float32), np.ones(len(ids), dtype=bool), 8)


def run(
    clock: VirtualClock, layer: int, hits: Sequence[int], brought: Sequence[int], hosted: Sequence[int] = ()
) -> None:
    """A layer from its start, what has arrived apart."""
    clock.begin_layer(layer)
    misses = np.array(sorted([*brought, *hosted]), dtype=np.int64)
    case = clock.case(use(layer, [*hits, *misses]), np.array(hits, dtype=np.int64), misses, np.zeros(len(misses)))
    clock.run_layer(layer, misses, case, np.isin(misses, brought))


def make(hardware: Hardware | None = None, slots: int = 4) -> VirtualClock:
    clock = VirtualClock(hardware or machine(), WORK, SHAPE, slots)
    clock.begin_forward([span()])
    return clock


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def test_it_is_what_strategies_see() -> None:
    lanes: Lanes = make()
    assert lanes.arrived(0) == []


def test_a_layer_of_hits_transfers_and_host_compute() -> None:
    clock = make()
    run(clock, 0, hits=[0, 1], brought=[2, 3], hosted=[4])
    # Device: two hits until 0.2 ms, then 2 when it arrives at 1 ms, and 3, which arrives at 2 ms: 2.1 ms.
    # Host: 0.5 ms to start, 2 ms to compute: 2.5 ms, which is when the layer ends.
    assert clock.now == near(2.5 * MS)
    assert clock.device_s == near(0.4 * MS)
    assert clock.stall_s == near(2.1 * MS)
    assert clock.host_s == near(2.5 * MS)
    assert clock.link_s == near(2 * MS)
    assert clock.bytes_over_link == 2 * MEGABYTE
    assert clock.bytes_from_disk == 0


def test_tokens_that_do_not_vote_are_computed_too() -> None:
    clock = make(machine(device_float32=1e-3, device_bfloat16=1e-3, device_compute_share=1.0))
    clock.begin_layer(0)
    ids = np.array([[0], [0], [1]])
    layer = LayerUse(0, ids, np.ones((3, 1), dtype=np.float32), np.array([False, False, True]), 8)
    case = clock.case(layer, np.array([0]), np.array([1]), np.zeros(1))
    # 300 weights for two tokens are 1200 operations at 1 GFLOP/s, 1.2 us: less than the 100 us of reading them.
    assert case.resident_s == near(0.1 * MS)
    assert case.counts.tolist() == [1]
    assert layer.token_counts[0] == 2


def test_a_prefetch_that_is_partly_across_when_it_is_demanded() -> None:
    clock = make()
    clock.order([(1, 7)])
    run(clock, 0, hits=[0, 1], brought=[])  # 0.2 ms, in which a fifth of 7 crosses
    clock.begin_layer(1)
    assert clock.arrived(1) == []
    case = clock.case(use(1, [6, 7]), np.array([], dtype=np.int64), np.array([6, 7]), np.zeros(2))
    assert case.transfer_s.tolist() == [near(1 * MS), near(0.8 * MS)]
    clock.run_layer(1, np.array([6, 7]), case, np.array([True, True]))
    # Both cross by 0.2 + 1.8 ms, and the last one is computed by 2.1 ms.
    assert clock.now == near(2.1 * MS)
    assert clock.link_s == near(2 * MS)
    assert clock.bytes_over_link == 2 * MEGABYTE
    run(clock, 2, hits=[0] * 1, brought=[])
    assert clock.arrived(1) == []  # it is not brought again


def test_a_prefetch_that_arrives_is_told_of_once() -> None:
    clock = make()
    clock.order([(2, 5), (1, 3), (2, 1), (1, 4)])
    run(clock, 0, hits=[], brought=[], hosted=[0])  # 2.5 ms: two are across, and half of a third
    assert clock.arrived(0) == []
    assert clock.arrived(1) == [3]
    assert clock.arrived(1) == []
    run(clock, 1, hits=[], brought=[], hosted=[0])  # until 5 ms
    assert clock.arrived(2) == [1, 5]
    assert clock.arrived(1) == [4]
    assert clock.link_s == near(4 * MS)  # then there was nothing to do
    assert clock.bytes_over_link == 4 * MEGABYTE


def test_what_is_demanded_goes_first_and_a_prefetch_keeps_its_progress() -> None:
    clock = make()
    clock.order([(1, 3)])
    run(clock, 0, hits=[0, 1, 2, 4], brought=[5])
    # No time had passed: 5 crosses until 1 ms and is computed until 1.1 ms, of which 3 has the last 0.1.
    run(clock, 1, hits=[0, 1], brought=[])  # until 1.3 ms, all of it for 3
    run(clock, 2, hits=[], brought=[6])  # until 2.3 ms it waits, then it has 0.1 again
    case = clock.case(use(1, [3]), np.array([], dtype=np.int64), np.array([3]), np.zeros(1))
    assert case.transfer_s.tolist() == [near(0.6 * MS)]
    assert clock.link_s == near(2.4 * MS)


def test_the_link_waits_while_no_slot_is_free() -> None:
    clock = make(slots=1)
    clock.order([(1, 3), (1, 4)])
    run(clock, 0, hits=[], brought=[], hosted=[0])  # 2.5 ms
    assert clock.link_s == near(1 * MS)
    assert clock.arrived(1) == [3]
    run(clock, 0, hits=[], brought=[], hosted=[0])
    assert clock.link_s == near(2 * MS)
    assert clock.arrived(1) == [4]
    none = make(slots=0)
    none.order([(1, 3)])
    run(none, 0, hits=[], brought=[], hosted=[0])
    assert none.link_s == 0


def test_what_is_dropped_or_computed_on_the_host_has_crossed_in_vain() -> None:
    clock = make()
    clock.order([(1, 3), (1, 4)])
    run(clock, 0, hits=[0, 1], brought=[])  # a fifth of 3
    clock.order([(1, 3), (2, 4)])  # stays the first
    run(clock, 1, hits=[0, 1], brought=[])  # another fifth
    assert clock.bytes_over_link == 0
    clock.order([(2, 4), (1, 3)])  # does not
    assert clock.bytes_over_link == pytest.approx(0.4 * MEGABYTE, rel=1e-3)
    run(clock, 1, hits=[0], brought=[])  # a tenth of 4
    run(clock, 2, hits=[0], brought=[], hosted=[4])
    # The host computes 4, so it stays where it is. Meanwhile 3 crosses, from its beginning.
    assert clock.bytes_over_link == pytest.approx(1.5 * MEGABYTE, rel=1e-3)
    assert clock.arrived(1) == [3]
    assert clock.arrived(2) == []


def test_what_host_memory_does_not_hold_comes_from_disk() -> None:
    # 80% of 8.75 MB hold 7 experts: 0 and 1 of each of the three layers, and 2 of the first.
    clock = make(machine(host_memory=8.75 * MEGABYTE / 2**30))
    clock.begin_layer(1)
    case = clock.case(use(1, [1, 2]), np.array([], dtype=np.int64), np.array([1, 2]), np.zeros(2))
    assert case.transfer_s.tolist() == [near(1 * MS), near(5 * MS)]
    assert case.host_s.tolist() == [near(2 * MS), np.inf]
    assert case.must_transfer.tolist() == [False, True]
    clock.run_layer(1, np.array([1, 2]), case, np.array([False, True]))
    assert clock.now == near(5.1 * MS)
    assert (clock.bytes_over_link, clock.bytes_from_disk) == (MEGABYTE, MEGABYTE)
    first = clock.case(use(0, [2]), np.array([], dtype=np.int64), np.array([2]), np.zeros(1))
    assert first.transfer_s.tolist() == [near(1 * MS)]


@pytest.mark.parametrize("held", [0, 1, 7, 8, 24, 100])
def test_host_memory_holds_what_the_engine_would_hold(held: int) -> None:
    expected = np.zeros((3, 8), dtype=bool)
    for key in spread(held, 3, 8):
        expected[key] = True
    assert np.array_equal(held_experts(held, SHAPE), expected)


def test_everything_but_experts() -> None:
    work = WorkShape(
        hidden_size=10,
        expert_size=10,
        num_layers=4,
        num_dense_layers=1,
        attention_parameters=1000,
        query_group=4,
        shared_parameters=300,
        dense_parameters=5000,
        router_parameters=80,
        head_parameters=20_000,
        kv_bytes_per_position=40,
        expert_bytes=MEGABYTE,
        itemsize=2,
    )
    hardware = machine(device_launch=2.0, link_router_sync=30.0, device_sampling=70.0)
    clock = VirtualClock(hardware, work, SHAPE)
    clock.begin_forward([span(start=6, length=4), span(start=0, length=5)])
    # Bytes at 10 GB/s: 2 x 1000 of attention's weights, once; 10 and 5 positions of K/V, 40 bytes each; 2 x 5000.
    attention = 2000 + 600
    assert clock.device_s == pytest.approx((attention + 10_000) / 10e9)
    assert clock.overhead_s == pytest.approx(12 * 2e-6)
    before = clock.device_s, clock.overhead_s
    clock.begin_layer(0)
    assert clock.device_s - before[0] == pytest.approx((attention + 160 + 600) / 10e9)
    assert clock.overhead_s - before[1] == pytest.approx(12 * 2e-6 + 30e-6)
    before = clock.device_s, clock.overhead_s
    clock.end_forward(3)
    assert clock.device_s - before[0] == pytest.approx(40_000 / 10e9)
    assert clock.overhead_s - before[1] == pytest.approx(70e-6)
    before = clock.device_s, clock.overhead_s
    clock.end_forward(0)
    assert before == (clock.device_s, clock.overhead_s)
    assert clock.now == pytest.approx(clock.device_s + clock.overhead_s)


def test_long_forwards_are_bound_by_computing() -> None:
    hardware = machine(device_bfloat16=1e-3, device_compute_share=0.5)  # 0.5 GFLOP/s
    work = replace(WORK, attention_parameters=100, router_parameters=1, kv_bytes_per_position=20, query_group=3)
    clock = VirtualClock(hardware, work, SHAPE)
    clock.begin_forward([span(start=1000, length=50)])
    # 2 x 100 x 50 for the weights; for 1050 positions of 10 numbers, 2 x 10 500 x 150 queries of all heads.
    assert clock.now == pytest.approx((10_000 + 3_150_000) / 0.5e9)


def test_this_computer_reads_from_its_disk_alone() -> None:
    def figure(value: float | None) -> Measurement:
        return Measurement(value, "MB/s" if value == 500.0 else "GB/s", "2026-11-30")

    times = {dtype: {n: figure(ms) for n, ms in ((1, 1.0), (11, 2.0))} for dtype in ("float32", "bfloat16")}
    kernel = KernelTimes(10, 10, figure(0.5), times)
    profile = MachineProfile(
        "a computer", "/", 600, figure(20.0), figure(500.0), figure(None), figure(None), figure(2.0), kernel
    )
    clock = VirtualClock(measured_hardware(profile), replace(WORK, num_layers=3, num_dense_layers=0), SHAPE)
    clock.begin_forward([span()])
    clock.begin_layer(0)
    start = clock.now
    case = clock.case(use(0, [0, 5]), np.array([0]), np.array([5]), np.zeros(1))
    assert case.must_transfer.all()
    clock.run_layer(0, np.array([5]), case, np.array([True]))
    # 1 MB at 500 MB/s, then 1 ms to compute it.
    assert clock.now - start == pytest.approx(3 * MS)
    assert clock.bytes_from_disk == clock.bytes_over_link == MEGABYTE


@dataclass(frozen=True)
class Layer:
    expert_ids: list[list[int]]
    resident: list[bool]
    transferred: list[bool]
    ordered: list[Key] | None


@dataclass(frozen=True)
class Forward:
    start: int
    layers: list[Layer]


def layers(prefetch: bool) -> st.SearchStrategy[Layer]:
    expert = st.integers(0, 7)
    keys = st.lists(st.tuples(st.integers(0, 2), expert), max_size=8)
    flags = st.lists(st.booleans(), min_size=8, max_size=8)
    return st.builds(
        Layer,
        st.lists(st.lists(expert, min_size=2, max_size=2, unique=True), min_size=4, max_size=4),
        flags,
        flags,
        st.none() | keys if prefetch else st.none(),
    )


def forwards(prefetch: bool) -> st.SearchStrategy[list[Forward]]:
    one = st.builds(Forward, st.integers(0, 1000), st.lists(layers(prefetch), min_size=3, max_size=3))
    return st.lists(one, min_size=1, max_size=4)


#: Numbers that are not round, with every overhead, and RAM for some of the experts.
ODD = {
    "device_launch": 3.7,
    "device_sampling": 11.0,
    "link_latency": 7.3,
    "link_router_sync": 13.1,
    "host_call": 5.9,
    "host_memory": 17 * MEGABYTE / 2**30,
}


def play(clock: VirtualClock, script: list[Forward]) -> list[tuple[float, ...]]:
    """The clock after each step; checks on the way what must always hold."""
    states: list[tuple[float, ...]] = [(0.0,) * 7]

    def note() -> None:
        busy = (clock.device_s, clock.stall_s, clock.overhead_s, clock.host_s, clock.link_s)
        states.append((clock.now, *busy, float(clock.bytes_over_link)))
        assert all(new >= old for old, new in zip(states[-2], states[-1], strict=True))
        assert clock.now == pytest.approx(clock.device_s + clock.stall_s + clock.overhead_s)
        assert clock.link_s <= clock.now * (1 + 1e-9)
        assert clock.host_s <= clock.now * (1 + 1e-9)
        assert 0 <= clock.bytes_from_disk <= clock.bytes_over_link

    for forward in script:
        clock.begin_forward([span(forward.start)])
        note()
        for number, layer in enumerate(forward.layers):
            clock.begin_layer(number)
            note()
            arrived = clock.arrived(number)
            assert arrived == sorted(set(arrived))
            ids = np.array(layer.expert_ids)
            routed = LayerUse(number, ids, np.ones(ids.shape, dtype=np.float32), np.ones(4, dtype=bool), 8)
            active, resident = np.unique(ids), np.array(layer.resident)
            resident[arrived] = True
            hits, misses = active[resident[active]], active[~resident[active]]
            case = clock.case(routed, hits, misses, np.zeros(len(misses)))
            assert (case.transfer_s >= 0).all()
            transferred = np.array(layer.transferred)[misses] | case.must_transfer
            start = clock.now
            clock.run_layer(number, misses, case, transferred)
            note()
            lanes = lane_seconds(case, transferred)
            assert clock.now - start == pytest.approx(max(lanes))
            assert max(lanes) >= case.resident_s + case.device_s[transferred].sum() - 1e-12
            assert max(lanes) >= case.transfer_s[transferred].sum() - 1e-12
            assert max(lanes) >= case.host_s[~transferred].sum() - 1e-12
            if layer.ordered is not None:
                clock.order(layer.ordered)
                note()
        clock.end_forward(4)
        note()
    return states


@settings(max_examples=80, deadline=None)
@given(forwards(prefetch=True), st.integers(0, 3))
def test_time_passes_forwards_and_always_alike(script: list[Forward], slots: int) -> None:
    first = play(VirtualClock(machine(**ODD), WORK, SHAPE, slots), script)
    assert first == play(VirtualClock(machine(**ODD), WORK, SHAPE, slots), script)  # to the last bit


@settings(max_examples=60, deadline=None)
@given(
    forwards(prefetch=False),
    st.sampled_from(["device_bandwidth", "link_bandwidth", "host_bandwidth", "disk_bandwidth"]),
    st.floats(1.0, 50.0),
)
def test_more_bandwidth_is_never_slower(script: list[Forward], which: str, factor: float) -> None:
    key = which.replace("_", ".", 1)
    slow = play(VirtualClock(machine(**ODD), WORK, SHAPE), script)
    fast = play(VirtualClock(machine(**ODD, **{which: ROUND[key] * factor}), WORK, SHAPE), script)
    assert all(new[0] <= old[0] * (1 + 1e-12) for old, new in zip(slow, fast, strict=True))
