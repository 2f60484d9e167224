"""Dispatch: the two lanes, each baseline on a case worked out by hand, the balanced plan against brute force."""

from __future__ import annotations

import itertools
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.core import RelumeError
from relume.strategy.dispatch import DISPATCHES
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.dispatch.fiddler import FiddlerMax, FiddlerSum
from relume.strategy.dispatch.freetoken import FreeToken, balanced_fetches
from relume.strategy.dispatch.host import AllHost
from relume.strategy.dispatch.hybrimoe import HybriMoE
from relume.strategy.dispatch.lanes import LinkTimes, lane_seconds, link_order, makespan
from relume.strategy.dispatch.oled import Balanced
from relume.strategy.dispatch.transfer import AllTransfer

NUM_CASES = 10_000
MOST_MISSES = 12
#: Sums of the same times in another order differ by less, relatively.
ROUNDING = 1e-9


def make_case(
    transfer: Sequence[float],
    device: Sequence[float],
    host: Sequence[float],
    *,
    counts: Sequence[int] = (),
    reuse: Sequence[float] = (),
    resident: float = 0.0,
    host_start: float = 0.0,
) -> DispatchCase:
    num_misses = len(transfer)
    return DispatchCase(
        counts=np.array(counts or [1] * num_misses, dtype=np.int64),
        reuse=np.array(reuse or [0.0] * num_misses, dtype=np.float64),
        transfer_s=np.array(transfer, dtype=np.float64),
        device_s=np.array(device, dtype=np.float64),
        host_s=np.array(host, dtype=np.float64),
        resident_s=resident,
        host_start_s=host_start,
    )


def random_case(rng: np.random.Generator, num_misses: int) -> DispatchCase:
    """One layer's misses on a random machine; the link takes 1 for an expert in host memory."""
    tail = rng.uniform(0.8, 3.0)
    counts = np.minimum(rng.pareto(tail, num_misses) + 1.0, 32.0).astype(np.int64)
    # The weights of an expert are read once, then each further token costs a share of that.
    host = np.exp(rng.uniform(np.log(0.05), np.log(20.0))) * (
        1.0 + rng.choice([0.0, 0.05, 0.2, 1.0]) * (counts - 1)
    )
    device = np.exp(rng.uniform(np.log(0.005), np.log(2.0))) * (1.0 + rng.choice([0.0, 0.02, 0.2]) * (counts - 1))
    transfer = np.ones(num_misses)
    if rng.random() < 0.3:  # measured times scatter
        host *= rng.uniform(0.8, 1.25, num_misses)
    host_start = rng.uniform(0.0, 2.0) * host.min() if rng.random() < 0.5 else 0.0
    if rng.random() < 0.3:  # some lie on the disk
        on_disk = rng.random(num_misses) < rng.uniform(0.1, 0.6)
        reading = rng.uniform(1.0, 20.0)
        transfer[on_disk] += reading
        host[on_disk] += rng.choice([0.0, reading, inf])  # cached by the system, read first, or not to be had
    if rng.random() < 0.2:
        host[rng.random(num_misses) < rng.uniform(0.0, 0.5)] = inf
    resident = rng.uniform(0.0, 1.5) * transfer.sum() if rng.random() < 0.5 else 0.0
    reuse = rng.random(num_misses) * (counts if rng.random() < 0.5 else 1.0)
    if rng.random() < 0.2:
        reuse = np.round(reuse)
    return DispatchCase(counts, reuse, transfer, device, host, resident, host_start)


def shortest_makespan(case: DispatchCase) -> float:
    """The minimum over all subsets, computed without the code under test."""
    transfer, device = case.transfer_s.tolist(), case.device_s.tolist()
    first = sorted((i for i in range(case.num_misses) if transfer[i] < device[i]), key=lambda i: transfer[i])
    last = sorted((i for i in range(case.num_misses) if transfer[i] >= device[i]), key=lambda i: -device[i])
    subsets = np.arange(1 << case.num_misses)
    arrived, host = np.zeros(len(subsets)), np.full(len(subsets), case.host_start_s)
    free = np.full(len(subsets), case.resident_s)
    for expert in first + last:
        crosses = (subsets >> expert & 1).astype(bool)
        arrived[crosses] += transfer[expert]
        free[crosses] = np.maximum(arrived, free)[crosses] + device[expert]
        host[~crosses] += case.host_s[expert]
    host[-1] = 0.0
    return float(np.maximum(free, host).min())


@st.composite
def cases(draw: st.DrawFn, most_misses: int = MOST_MISSES) -> DispatchCase:
    seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-6, 100.0))
    times = st.tuples(seconds, seconds, st.one_of(st.just(inf), seconds), st.floats(0.0, 9.0), st.integers(1, 32))
    misses = draw(st.lists(times, max_size=most_misses))
    transfer, device, host, reuse, counts = zip(*misses, strict=True) if misses else ((), (), (), (), ())
    resident, host_start = draw(seconds), draw(seconds)
    return make_case(transfer, device, host, counts=counts, reuse=reuse, resident=resident, host_start=host_start)


# The lanes


def test_lanes_of_a_case_worked_out_by_hand() -> None:
    """The device is busy until 2. Transfers of 2, 3 and 4; expert 1 is the host's.

    Expert 2 transfers no longer than it computes, so it goes first: it arrives at 2 and is done at 5. Then by
    falling device time: expert 3 arrives at 2 + 4 = 6, when the device has been free for 1, and is done at 8;
    expert 0 arrives at 9 and is done at 10.
    """
    case = make_case([3, 9, 2, 4], [1, 9, 3, 2], [5, 6, 7, 8], resident=2.0, host_start=0.5)
    transferred = np.array([True, False, True, True])
    assert link_order(case, transferred).tolist() == [2, 3, 0]
    assert lane_seconds(case, transferred) == (10.0, 6.5)
    assert makespan(case, transferred) == 10.0


def test_an_empty_lane_ends_at_once() -> None:
    case = make_case([1, 1], [2, 2], [3, 4], resident=5.0, host_start=0.5)
    assert lane_seconds(case, np.zeros(2, dtype=bool)) == (5.0, 7.5)
    assert lane_seconds(case, np.ones(2, dtype=bool)) == (9.0, 0.0)
    nothing = make_case([], [], [], resident=5.0, host_start=0.5)
    assert lane_seconds(nothing, np.zeros(0, dtype=bool)) == (5.0, 0.0)


def test_the_links_order_has_ties_by_index() -> None:
    case = make_case([1, 1, 3, 3, 3], [2, 1, 2, 2, 1], [1] * 5)
    assert link_order(case, np.ones(5, dtype=bool)).tolist() == [0, 1, 2, 3, 4]
    assert link_order(case, np.array([False, True, True, False, True])).tolist() == [1, 2, 4]


@given(cases(most_misses=5))
def test_no_order_of_the_link_ends_the_device_lane_earlier(case: DispatchCase) -> None:
    def device_end(order: Sequence[int]) -> float:
        arrived, free = 0.0, case.resident_s
        for expert in order:
            arrived += float(case.transfer_s[expert])
            free = max(arrived, free) + float(case.device_s[expert])
        return free

    everything = np.ones(case.num_misses, dtype=bool)
    ends = lane_seconds(case, everything)[0]
    assert ends == pytest.approx(device_end(link_order(case, everything).tolist()), rel=ROUNDING)
    assert ends <= min(map(device_end, itertools.permutations(range(case.num_misses)))) * (1.0 + ROUNDING)


@given(cases(), st.data())
def test_one_more_transfer_costs_at_least_its_marginal_cost(case: DispatchCase, data: st.DataObject) -> None:
    times = LinkTimes.of(case)
    transferred = [data.draw(st.booleans()) for _ in range(case.num_misses)]
    ends = times.ends(transferred)[0]
    for position, cost in enumerate(times.marginal(transferred)):
        if not transferred[position]:
            with_it = [*transferred[:position], True, *transferred[position + 1 :]]
            assert times.ends(with_it)[0] >= (ends + cost) * (1.0 - ROUNDING)


# Every dispatch


@pytest.mark.parametrize("name", DISPATCHES)
@settings(max_examples=40)
@given(case=cases())
def test_every_plan_transfers_what_the_host_cannot_compute(name: str, case: DispatchCase) -> None:
    dispatch = DISPATCHES[name]()
    before = [case.transfer_s.copy(), case.host_s.copy()]
    plan = dispatch.plan(case)
    assert plan.dtype == np.bool_ and plan.shape == (case.num_misses,)
    assert plan[np.isinf(case.host_s)].all()
    assert np.isfinite(makespan(case, plan))
    assert np.array_equal(plan, DISPATCHES[name]().plan(case))
    assert np.array_equal(before[0], case.transfer_s) and np.array_equal(before[1], case.host_s)


def test_dispatches_are_found_by_name() -> None:
    assert set(DISPATCHES) == {"transfer", "host", "fiddler", "fiddler-max", "hybrimoe", "freetoken", "balanced"}
    with pytest.raises(RelumeError, match="unknown dispatch 'gpu': choose one of balanced, fiddler"):
        DISPATCHES["gpu"]


# Each baseline


def test_all_transfer_brings_everything() -> None:
    assert AllTransfer().plan(make_case([9, 9], [1, 1], [1, inf])).tolist() == [True, True]


def test_all_host_brings_only_what_it_must() -> None:
    assert AllHost().plan(make_case([1, 1, 1], [1, 1, 1], [9, inf, 9])).tolist() == [False, True, False]


#: Fiddler's own constants, 7 a token on the host and 70 on the device: 11 tokens are dearer on the host, 10 cost
#: the same, which leaves them on the device, and 9 are cheaper.
FIDDLERS = make_case([60] * 3, [10] * 3, [63, 70, 77], counts=[9, 10, 11], resident=500.0, host_start=500.0)
#: The device takes 20 for each. All of the first three are dearer on the host (sum 63), but one after the other
#: they end at 60. The longer lane by number on the device: 0: 71, 1: 20 or 46, 2: 40 or 24, 3: 60, 4: 80.
FIDDLERS_LANES = make_case([15] * 4, [5] * 4, [25, 22, 21, 3])


def test_fiddler_takes_the_cheaper_way_for_each() -> None:
    assert FiddlerSum().plan(FIDDLERS).tolist() == [False, True, True]
    assert FiddlerSum().plan(FIDDLERS_LANES).tolist() == [True, True, True, False]


def test_fiddler_max_takes_the_shorter_of_the_longer_lanes() -> None:
    assert FiddlerMax().plan(FIDDLERS_LANES).tolist() == [True, True, False, False]
    # With the last one on the device the lanes end at 70 and 133, with the last two at 140 and 63.
    assert FiddlerMax().plan(FIDDLERS).tolist() == [False, False, True]


def fiddlers_lanes(case: DispatchCase, transferred: np.ndarray) -> tuple[float, float]:
    device = (case.transfer_s + case.device_s)[transferred].sum()
    return float(device), float(case.host_s[~transferred].sum())


@settings(max_examples=60)
@given(cases(most_misses=8), st.floats(0.0, 50.0), st.floats(0.0, 50.0))
def test_fiddlers_plans_are_its_minima_when_the_device_cost_is_one_constant(
    case: DispatchCase, transfer: float, device: float
) -> None:
    num_misses = case.num_misses
    case = make_case([transfer] * num_misses, [device] * num_misses, case.host_s.tolist())
    partitions = [np.array(bits, dtype=bool) for bits in itertools.product((False, True), repeat=num_misses)]
    for dispatch, of in ((FiddlerSum(), sum), (FiddlerMax(), max)):
        least = min(of(fiddlers_lanes(case, partition)) for partition in partitions)
        assert of(fiddlers_lanes(case, dispatch.plan(case))) == pytest.approx(least, rel=ROUNDING)


def test_hybrimoe_meets_in_the_middle() -> None:
    """Tokens 3, 1, 4, 2: the order is 2, 0, 3, 1. Transfer 2, device 1, a token on the host 1, host start 1.

    The residents keep the device until 3. Expert 2 would end there at 4, expert 1 on the host at 2: the host takes
    1. Then 4 against 2 + 2 = 4 for expert 3: a tie, the device takes 2, and the link is free at 2. Expert 0 would
    arrive at 4 and end at 5, expert 3 on the host at 4: the host takes 3. The last one, 0: 5 on the device against
    4 + 3 = 7.
    """
    case = make_case([2] * 4, [1] * 4, [3, 1, 4, 2], counts=[3, 1, 4, 2], resident=3.0, host_start=1.0)
    assert HybriMoE().plan(case).tolist() == [True, False, True, False]


def test_hybrimoe_waits_for_the_link() -> None:
    """Expert 0 must cross: it arrives at 5 and is done at 6. Expert 1 would arrive at 10, and the host ends at 9.

    If it took 4 to arrive and 10 on the host, both would end at 10.
    """
    case = make_case([5, 5], [1, 1], [inf, 9], counts=[1, 9])
    assert HybriMoE().plan(case).tolist() == [True, False]
    assert HybriMoE().plan(make_case([5, 4], [1, 1], [inf, 10], counts=[1, 9])).tolist() == [True, True]


def test_freetoken_fetches_its_share_of_those_with_most_tokens() -> None:
    """The link brings an expert in 2, the host computes one in 1 in the mean: f = (1/2) / (1/2 + 1) = 1/3.

    Of 4 misses that is 4/3. F = 1 gives max(1 * 2/3, 3 * 1/3) = 1, F = 2 gives max(2 * 2/3, 2 * 1/3) = 4/3. So one
    is fetched, of the two with 5 tokens the first. If the host cannot compute expert 0, that is the one.
    """
    case = make_case([2] * 4, [9] * 4, [0.5, 1.5, 0.5, 1.5], counts=[1, 5, 2, 5])
    assert FreeToken().plan(case).tolist() == [False, True, False, False]
    forced = make_case([2] * 4, [9] * 4, [inf, 1.5, 0.5, 1.0], counts=[1, 5, 2, 5])
    assert FreeToken().plan(forced).tolist() == [True, False, False, False]


@given(st.integers(0, 64), st.floats(0.0, 1.0))
def test_freetokens_share_is_the_best_integer(num_misses: int, share: float) -> None:
    def slower_lane(fetches: int) -> float:
        return max(fetches * (1.0 - share), (num_misses - fetches) * share)

    fetches = balanced_fetches(num_misses, share)
    assert 0 <= fetches <= num_misses and abs(fetches - share * num_misses) <= 1.0 + ROUNDING
    assert slower_lane(fetches) == pytest.approx(min(map(slower_lane, range(num_misses + 1))), abs=ROUNDING)


# The balanced plan


def test_of_equal_experts_those_of_highest_reuse_are_brought() -> None:
    """One end at 5 and 12, two at 9 and 8, three at 13 and 4."""
    case = make_case([4] * 4, [1] * 4, [4] * 4, reuse=[1, 4, 2, 3])
    assert Balanced().plan(case).tolist() == [False, True, False, True]


#: By reuse the first two are brought: 9 and 3; only the first: 5 and 11. By worth only expert 1 is: 5 and 6.
REUSE_OR_WORTH = make_case([4] * 3, [1] * 3, [3, 8, 3], reuse=[3, 2, 1])


def test_reuse_leads_only_within_the_slack() -> None:
    assert Balanced(max_swaps=0).plan(REUSE_OR_WORTH).tolist() == [False, True, False]
    assert Balanced(max_swaps=0, slack=0.4).plan(REUSE_OR_WORTH).tolist() == [False, True, False]
    assert Balanced(max_swaps=0, slack=0.6).plan(REUSE_OR_WORTH).tolist() == [True, True, False]


def test_a_swap_that_shortens_the_longer_lane_is_made() -> None:
    """Expert 0 leaves the link: 5 and 6 in place of 9 and 3."""
    assert Balanced(max_swaps=1, slack=0.6).plan(REUSE_OR_WORTH).tolist() == [False, True, False]


def test_a_swap_that_keeps_the_makespan_is_made_for_reuse() -> None:
    """By worth expert 0 is brought: 9 and 7.5. Expert 1 in its place: 9 and 8.5, at a higher reuse.

    Expert 2 has the highest reuse of all, but in their place it would leave 15 to the host.
    """
    case = make_case([8] * 3, [1] * 3, [8, 7, 0.5], reuse=[0, 5, 10])
    assert Balanced(max_swaps=0).plan(case).tolist() == [True, False, False]
    assert Balanced().plan(case).tolist() == [False, True, False]


@given(cases(), st.integers(0, 6), st.sampled_from([0.0, 0.02, 1.0]))
def test_never_worse_than_either_lane_alone(case: DispatchCase, max_swaps: int, slack: float) -> None:
    balanced = makespan(case, Balanced(max_swaps, slack).plan(case))
    for other in (AllTransfer(), AllHost()):
        assert balanced <= makespan(case, other.plan(case)) * (1.0 + ROUNDING)


@given(cases(), st.integers(0, 5))
def test_swaps_are_bounded_and_never_make_it_longer(case: DispatchCase, max_swaps: int) -> None:
    start = Balanced(max_swaps=0).plan(case)
    plans = [Balanced(max_swaps=swaps).plan(case) for swaps in (max_swaps, max_swaps + 1)]
    assert np.count_nonzero(plans[0] != start) <= 2 * max_swaps
    assert makespan(case, plans[1]) <= makespan(case, plans[0]) <= makespan(case, start)


@pytest.mark.parametrize("options", [{"max_swaps": -1}, {"slack": -0.1}, {"slack": float("nan")}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*: it must be 0 or more"):
        Balanced(**options)  # type: ignore[arg-type]


def random_small_cases() -> list[DispatchCase]:
    rng = np.random.default_rng(0)
    return [random_case(rng, int(rng.integers(1, MOST_MISSES + 1))) for _ in range(NUM_CASES)]


def relative(dispatch: Dispatch, small: Sequence[DispatchCase], best: np.ndarray) -> np.ndarray:
    """Makespans over the least possible ones."""
    return np.asarray(np.array([makespan(case, dispatch.plan(case)) for case in small]) / best)


def is_contested(small: Sequence[DispatchCase], best: np.ndarray) -> np.ndarray:
    """Neither lane alone comes within 5% of the minimum."""
    one_lane = np.minimum(relative(AllTransfer(), small, best), relative(AllHost(), small, best))
    return np.asarray(one_lane > 1.05)


def test_nearly_always_within_five_percent_of_the_minimum() -> None:
    small = random_small_cases()
    best = np.array([shortest_makespan(case) for case in small])
    ratios = relative(Balanced(), small, best)
    assert ratios.min() >= 1.0 - ROUNDING, "the oracle found no minimum"
    assert (ratios <= 1.05).mean() >= 0.99
    contested = is_contested(small, best)
    assert contested.mean() > 0.25, "most cases are decided by one lane"
    assert (ratios[contested] <= 1.05).mean() >= 0.99


def quickest(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=3))


@pytest.mark.slow
def test_print_quality_and_time() -> None:
    """Figures to read with -s; times depend on the machine, so nothing is asserted of them."""
    small = random_small_cases()
    best = np.array([shortest_makespan(case) for case in small])
    contested = is_contested(small, best)
    rng = np.random.default_rng(1)
    large = [random_case(rng, 40) for _ in range(200)]
    lines = [f"{NUM_CASES} cases, {contested.sum()} contested; microseconds for 40 misses, best of 60 a case"]
    for name in DISPATCHES:
        dispatch = DISPATCHES[name]()
        ratios = relative(dispatch, small, best)
        within = ratios <= 1.05
        # Rounds over all cases lie apart in time, so that one noisy spell does not decide.
        rounds = [[quickest(partial(dispatch.plan, case)) for case in large] for _ in range(20)]
        median, most_of_them, slowest = np.quantile(np.min(rounds, axis=0) * 1e6, [0.5, 0.9, 1.0])
        lines.append(
            f"{name:12} within 5%: {within.sum()}, of contested {within[contested].mean():.4f}, "
            f"mean {ratios.mean():.4f}, worst {ratios.max():.3f}; "
            f"time: median {median:.0f}, 90% {most_of_them:.0f}, slowest {slowest:.0f}"
        )
    print("\n".join(lines))  # noqa: T201 (shown by -s)
