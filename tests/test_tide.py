"""Interval refresh: when, of what, what it costs, and the interval that is solved."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relume import DecodingConfig, Engine, RelumeError, Request
from relume.core import Phase
from relume.machine.hardware import load_hardware
from relume.simulate.intervals import compare_intervals, longest_block
from relume.strategy.budget import uniform
from relume.strategy.profile import Profile
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.curves import INTERVALS, RefreshCurves
from relume.strategy.refresh.drift import WINDOW, DriftMonitor
from relume.strategy.refresh.program import GAP, solve_layers
from relume.strategy.refresh.schedule import Iteration, IterationWatch, RefreshTimer
from relume.strategy.refresh.solve import (
    layer_seconds,
    plan_of,
    published_curve,
    solve_interval,
    solve_intervals,
)
from relume.strategy.retention.context import RetentionContext
from relume.strategy.retention.tide import UNSOLVED, Tide
from relume.strategy.strategies import Strategy
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, read_model_profile, write_model_profile
from relume.trace.views import layer_uses, phase_of, span_inputs
from terminal import run
from traces import SMALL_CONFIG, SMALL_TRACE, make_span, played, small_records

SHAPE = SMALL_CONFIG.shape
COSTS = RefreshCosts(transfer_s=3e-4, device_s=2e-5, host_s=1.5e-4, host_start_s=6e-5)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return gather_profile(small_records(), SHAPE)


@pytest.fixture(scope="module")
def curves(profile: Profile) -> RefreshCurves:
    assert profile.refresh is not None
    return profile.refresh


# When


@given(
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    interval=st.integers(1, 12),
    lasts=st.lists(st.booleans(), min_size=120, max_size=120),
)
def test_a_refresh_is_due_as_a_plain_count_says(blocks: list[int], interval: int, lasts: list[bool]) -> None:
    timer, draws = RefreshTimer(np.array([interval])), iter(lasts)
    since: int | None = None  # iterations since a refresh; what is due before any is due at once
    for length in blocks:
        for step in range(length):
            last = next(draws)
            wanted = (step == 0 or since is None or since >= interval) and not last
            due = bool(timer.begin_forward(Iteration(True, step == 0, last))[0])
            assert due == wanted
            since = 1 if due else (None if since is None else since + 1)
    assert not timer.begin_forward(Iteration(False, False, False)).any()


def test_the_first_and_the_last_iteration_of_a_block_are_told_beforehand() -> None:
    watch = IterationWatch()
    seen = []
    for masked, committed, goes_on in ((4, 1, True), (3, 2, True), (2, 1, True), (1, 1, False), (4, 1, True)):
        masks, commits = np.arange(4) < masked, np.arange(4) < committed
        span = make_span(4, masked=masks, committed=commits, next_start=0 if goes_on else 4)
        iteration = watch.begin_forward([span])
        seen.append((iteration.first, iteration.last))
        watch.end_forward([span])
    # The third has no more masks than the second committed, so it is taken for the last; the fourth surely is.
    assert seen == [(True, False), (False, False), (False, True), (False, True), (True, False)]
    prefill = make_span(4, Phase.PREFILL)
    assert watch.begin_forward([prefill, make_span(4)]) == Iteration(False, False, False)


def test_requests_of_a_batch_have_one_iteration_together() -> None:
    watch = IterationWatch()
    watch.end_forward([make_span(4, request=1)])
    spans = [make_span(4, request=1), make_span(4, request=2)]
    assert not watch.begin_forward(spans).first and watch.begin_forward(spans[1:]).first


# Of what


def tide(profile: Profile | None = None, **parameters: float) -> Tide:
    slots = (6,) * SHAPE.num_layers
    return Tide(RetentionContext(SHAPE, sum(slots), profile, slots=slots, costs=COSTS), **parameters)


def test_the_residents_are_the_most_hit_of_the_block_and_frozen_in_between() -> None:
    """Against a plain transcription: dictionaries of hits, one refresh after the other."""
    interval, slots, decay = 3, 6, 0.5
    records = small_records()
    result = played(records, f"tide:interval={interval}:decay={decay}", SHAPE, [slots] * SHAPE.num_layers)
    watch, timer = IterationWatch(), RefreshTimer(np.array([interval]))
    residents = [set(range(slots)) for _ in range(SHAPE.num_layers)]
    hits = [dict.fromkeys(range(SHAPE.num_experts), 0.0) for _ in range(SHAPE.num_layers)]
    ever = [dict.fromkeys(range(SHAPE.num_experts), 0) for _ in range(SHAPE.num_layers)]
    for number, record in enumerate(records):
        iteration = watch.begin_forward(span_inputs(record))
        due = bool(timer.begin_forward(iteration)[0])
        for layer, use in enumerate(layer_uses(record, SHAPE.num_experts)):
            active = set(np.unique(use.expert_ids).tolist())
            assert result.hits[number, layer] == len(active & residents[layer])
            if iteration.denoising:
                for expert in hits[layer]:
                    count = int((use.expert_ids == expert).sum())
                    hits[layer][expert] = (0.0 if iteration.first else decay * hits[layer][expert]) + count
                    ever[layer][expert] += count
            if due:
                order = sorted(
                    residents[layer] | active,
                    key=lambda expert: (
                        -hits[layer][expert],
                        -ever[layer][expert],
                        expert not in residents[layer],
                        expert,
                    ),
                )
                residents[layer] = set(order[:slots])
        watch.end_forward(record.spans)
    assert result.evictions > 0


@pytest.mark.parametrize("interval", [1, 2, 5, 31])
def test_the_measured_curve_is_what_a_replay_has(curves: RefreshCurves, interval: int) -> None:
    """Hits and promotions of every number of slots, to the last expert; both begin without a profile."""
    records = small_records()
    denoising = np.array([phase_of(record) is Phase.DENOISE for record in records])
    row = interval - 1
    for column, slots in enumerate(curves.slots[1:-1].tolist(), start=1):
        result = played(records, f"tide:interval={interval}", SHAPE, [slots] * SHAPE.num_layers)
        share = curves.share[:3, row, None] * denoising.sum()
        missed = (share * (curves.brought + curves.missed)[:3, row, column]).sum(axis=0)
        assert missed == pytest.approx(result.misses[denoising].sum(axis=0), rel=1e-6)
        hits = (share * curves.hits[:3, row, column]).sum(axis=0)
        assert hits == pytest.approx(result.hits[denoising].sum(axis=0), rel=1e-6)
        promoted = float((share * curves.brought[:3, row, column]).sum())
        assert promoted == pytest.approx(result.evictions, rel=1e-6), "as many leave as come"


def test_nothing_moves_but_in_refreshes_and_not_where_a_block_is_foreseen_to_end() -> None:
    records = small_records()
    policy = tide(interval=2)
    watch = IterationWatch()
    refreshed = 0
    for record in records:
        iteration = watch.begin_forward(span_inputs(record))
        policy.begin_forward(span_inputs(record))
        for use in layer_uses(record, SHAPE.num_experts):
            policy.observe(use)
            admitted = policy.admits(use)
            assert not (admitted & ~use.active).any()
            refreshed += int(admitted.any())
            assert not admitted.any() or (iteration.denoising and not iteration.last)
            assert not admitted.any() or sum(span.masked.sum() for span in record.spans) > 1
        policy.end_forward(record.spans)
        watch.end_forward(record.spans)
    assert refreshed


# The cost model


def test_costs_are_those_of_the_machine(curves: RefreshCurves) -> None:
    work = replace(small_work(), expert_bytes=6 * 2**20)
    hardware = load_hardware("rtx4090")
    costs = RefreshCosts.of(hardware, work, curves)
    assert costs.transfer_s == hardware.transfer_s(work.expert_bytes) and costs.disk_share == 0.0
    small = load_hardware("rtx4090")
    assert RefreshCosts.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    nothing = RefreshCosts(1.0, 0.1, inf, 0.0)
    assert RefreshCosts.from_dict(json.loads(json.dumps(nothing.to_dict()))) == nothing
    held = small.host_experts(10**9)
    many = RefreshCosts.of(small, replace(work, expert_bytes=10**9), curves)
    assert many.disk_share == pytest.approx(1 - held / (SHAPE.num_layers * SHAPE.num_experts))


def small_work() -> Any:
    from relume.cli.simulate import work_of

    return work_of("llada2-mini").with_moe_layers(SHAPE.num_layers)


def test_the_longer_lane_counts_and_chance_lengthens_it() -> None:
    def layer_s(costs: RefreshCosts, brought: float, missed: float, deviation: float = 0.0) -> float:
        numbers = (np.array(value) for value in (4.0, brought, missed, deviation, deviation))
        return float(costs.layer_s(*numbers))

    link_s = 8 * COSTS.transfer_s + COSTS.device_s
    host_s = 10 * COSTS.host_s + COSTS.host_start_s
    assert layer_s(COSTS, 8, 10) == pytest.approx(max(link_s, host_s))
    assert layer_s(COSTS, 0, 0) == pytest.approx(4 * COSTS.device_s)
    assert layer_s(COSTS, 8, 10, 3.0) > layer_s(COSTS, 8, 10, 1.0) > layer_s(COSTS, 8, 10)
    alone = replace(COSTS, host_s=inf)
    assert layer_s(alone, 8, 10) == pytest.approx(18 * COSTS.transfer_s + COSTS.device_s)
    rng = np.random.default_rng(0)
    draws = np.maximum(rng.normal(link_s, 2 * COSTS.transfer_s, 200_000), 0)
    both = np.maximum(draws, rng.normal(host_s, 2 * COSTS.host_s, 200_000))
    assert layer_s(COSTS, 8, 10, 2.0) == pytest.approx(both.mean(), rel=0.01)


def test_the_solved_interval_is_the_best_of_all(curves: RefreshCurves) -> None:
    slots = np.full(SHAPE.num_layers, 6)
    for costs in (COSTS, replace(COSTS, transfer_s=5e-3), replace(COSTS, host_s=5e-3), replace(COSTS, host_s=inf)):
        plan = solve_interval(curves, costs, slots)
        every = [plan_of(curves, costs, slots, np.full(SHAPE.num_layers, n), "given") for n in INTERVALS]
        assert plan.experts_s == pytest.approx(min(other.experts_s for other in every))
        assert plan.curve == pytest.approx([other.experts_s for other in every])
        apart = solve_intervals(curves, costs, slots)
        assert apart.experts_s <= plan.experts_s + 1e-12


def test_the_published_formulas_are_those_of_a_calculator(curves: RefreshCurves) -> None:
    slots = np.full(SHAPE.num_layers, int(curves.slots[3]))
    drift = float(curves.drift[0][3])
    interval = 4
    io = COSTS.transfer_s * slots[0] / interval * (1 - (1 - drift) ** interval)
    gone = sum(1 - (1 - drift) ** j for j in range(interval)) / interval
    expected = SHAPE.num_layers * (io + COSTS.host_s * slots[0] * gone)
    assert published_curve(curves, COSTS, slots)[interval - 1] == pytest.approx(expected)


def test_a_drift_that_made_the_curve_is_found_again(curves: RefreshCurves) -> None:
    drift, number = 0.07, 2
    replaced = curves.slots[number] * (1 - (1 - drift) ** INTERVALS)
    brought = np.zeros_like(curves.brought)
    brought[:2, :, number] = replaced[:, None]
    found, error = replace(curves, brought=brought).drift
    assert found[number] == pytest.approx(drift, abs=1e-3) and error[number] < 1e-3


# The program over layers


@pytest.mark.parametrize("total", [16, 24, 33, 60])
def test_the_program_is_as_good_as_dynamic_programming(curves: RefreshCurves, total: int) -> None:
    """Slots one by one, the best interval of each: every split that the program may choose from, and more."""
    uneven = spread(curves)
    plan = solve_layers(uneven, COSTS, total, SHAPE)
    steps = range(SHAPE.top_k, SHAPE.num_experts + 1)
    cost = {
        number: layer_seconds(uneven, COSTS, np.full(SHAPE.num_layers, number)).all.min(axis=0) for number in steps
    }
    best = {0: 0.0}
    for layer in range(SHAPE.num_layers):
        following: dict[int, float] = {}
        for (used, seconds), number in itertools.product(best.items(), steps):
            if used + number <= total:
                key = used + number
                following[key] = min(following.get(key, inf), seconds + float(cost[number][layer]))
        best = following
    optimum = min(best.values())
    single = solve_interval(uneven, COSTS, np.array(uniform(total, SHAPE)))
    assert sum(plan.slots) <= total and plan.gap <= GAP
    assert plan.experts_s <= single.experts_s + 1e-12, "never worse than one interval and equal slots"
    if plan.method == "layers":
        assert plan.experts_s == pytest.approx(optimum, rel=2 * GAP)
    else:
        assert optimum > single.experts_s * 0.97 and "would save" in plan.notes[0]


def spread(curves: RefreshCurves) -> RefreshCurves:
    """Layers that differ more than those of the small trace."""
    scale = np.linspace(0.3, 1.0, SHAPE.num_layers)
    return replace(curves, hits=curves.hits * scale, brought=curves.brought * scale, missed=curves.missed * scale)


def test_layers_that_differ_get_slots_and_intervals_of_their_own(curves: RefreshCurves) -> None:
    plan = solve_layers(spread(curves), COSTS, 24, SHAPE)
    assert plan.method == "layers" and len(set(plan.slots)) > 1 and sum(plan.slots) <= 24


def test_a_busy_link_is_spared(curves: RefreshCurves) -> None:
    uneven = spread(curves)
    free = solve_layers(uneven, COSTS, 24, SHAPE)
    share = 0.5 * free.lanes_s["link"] / free.experts_s
    spared = solve_layers(uneven, replace(COSTS, link_share=share), 24, SHAPE)
    single = solve_interval(uneven, replace(COSTS, link_share=share), np.array(uniform(24, SHAPE)))
    assert single.intervals[0] > 1 and single.experts_s >= spared.experts_s - 1e-12
    assert spared.lanes_s["link"] <= share * spared.experts_s * (1 + 1e-6)
    assert spared.experts_s >= free.experts_s - 1e-12


def test_a_program_out_of_time_says_so_and_one_interval_is_taken(curves: RefreshCurves) -> None:
    plan = solve_layers(spread(curves), COSTS, 24, SHAPE, time_limit_s=1e-9)
    single = solve_interval(spread(curves), COSTS, np.array(uniform(24, SHAPE)))
    assert plan.method == "measured" and plan.intervals == single.intervals and plan.slots == single.slots
    assert "ran out of time" in plan.notes[0] and "interval of" in plan.notes[0]


# The strategy


def test_without_what_a_solution_needs_it_says_so(profile: Profile) -> None:
    bare = Tide(RetentionContext(SHAPE, 24))
    assert "no profile" in bare.notes[0] and str(UNSOLVED) in bare.notes[0]
    uncharged = Tide(RetentionContext(SHAPE, 24, profile, slots=(6,) * 4))
    assert "costs" in uncharged.notes[0]
    shared = Tide(RetentionContext(SHAPE, 24, profile, costs=COSTS))
    assert "share their slots" in shared.notes[0]
    assert tide(profile).notes == () and tide(interval=3).notes == ()


@pytest.mark.parametrize(
    "text",
    ["tide:interval=1.5", "tide:interval=-1", "tide:decay=2", "tide:margin=0", "tide:link=0", "lru:dispatch=own"],
)
def test_senseless_arguments_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(RelumeError) as caught:
        played(small_records()[:1], text, SHAPE, [6] * SHAPE.num_layers)
    assert "\n" not in str(caught.value)


def test_another_drift_solves_the_interval_again(profile: Profile) -> None:
    """A profile that promised much drift: what is seen corrects it, and where that pays the plan follows."""
    assert profile.refresh is not None
    wild = replace(profile, refresh=profile.refresh.scaled(6.0))
    slow = replace(COSTS, host_s=3e-5, transfer_s=5e-4)  # to move much costs much
    context = RetentionContext(SHAPE, 24, wild, slots=(6,) * SHAPE.num_layers, costs=slow)
    policy = Tide(context, margin=0.3)
    before = policy.refresh_plan
    assert before is not None
    refreshes = 0
    while refreshes < 2 * WINDOW:
        for record in small_records():
            policy.begin_forward(span_inputs(record))
            admitted = 0
            for use in layer_uses(record, SHAPE.num_experts):
                policy.observe(use)
                admitted += int(policy.admits(use).any())
            refreshes += bool(admitted)
            policy.end_forward(record.spans)  # nothing was ever placed: the residents do not drift at all
    assert policy.drift_changes == 1
    assert policy.refresh_plan is not before and policy.refresh_plan is not None
    assert policy.refresh_plan.intervals != before.intervals
    monitor = DriftMonitor(0.3)
    assert not any(monitor.take(10.0, 10.5) for _ in range(5 * WINDOW)), "within the margin nothing changes"


def test_other_slots_are_planned_for(profile: Profile) -> None:
    policy = tide(profile)
    few = (3,) * SHAPE.num_layers
    policy.resized(few)
    assert policy.refresh_plan is not None and policy.refresh_plan.slots == few
    assert policy.intervals == tide(profile).intervals or policy.refresh_plan.intervals == policy.intervals


def test_a_replay_begins_with_the_recorded_intervals(profile: Profile) -> None:
    context = RetentionContext(
        SHAPE, 24, profile, slots=(6,) * SHAPE.num_layers, costs=COSTS, intervals=(2, 5, 7, 9)
    )
    assert Tide(context).intervals == Tide(context, by_layer=1).intervals == (2, 5, 7, 9)


def test_a_profile_keeps_its_curves(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    write_model_profile(profile, path)
    found = read_model_profile(path, SHAPE).refresh
    assert found is not None and profile.refresh is not None
    for name in RefreshCurves.names():
        assert np.array_equal(getattr(found, name), getattr(profile.refresh, name)), name


PROMPTS = ("How many times is a in banana?", "Reverse the word planet.", "What is 23 + 58?")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "strategy", ["tide:interval=1", "tide:interval=2", "tide:interval=7", "tide", "tide-layers"]
)
def test_every_interval_gives_the_same_tokens_and_a_replay_the_same_hits(
    tmp_path: Path, strategy: str, batch: int
) -> None:
    decoding = DecodingConfig(max_tokens=32, threshold=1.0)
    requests = [Request(messages=[{"role": "user", "content": text}], decoding=decoding) for text in PROMPTS]
    with Engine.load("demo", dtype="float32", strategy="full", max_batch=batch) as engine:
        expected = [result.canvas for result in engine.generate_batch(requests)]
    for memory in ("10", "25%"):
        options: dict[str, Any] = {"expert_memory": memory, "hardware": "rtx4090", "max_batch": batch}
        with Engine.load("demo", dtype="float32", strategy=strategy, **options) as engine:
            with engine.record(tmp_path / "trace"):
                results = engine.generate_batch(requests)
            assert [result.canvas for result in results] == expected
            engine._model.experts.check_integrity()
        assert all(result.statistics.lossless for result in results)
        done = run("simulate", tmp_path / "trace", "--json")
        assert done.returncode == 0, done.stderr
        (row, _) = json.loads(done.stdout.splitlines()[-1])["rows"]
        reader = TraceReader(tmp_path / "trace")
        misses = sum(len(layer) for record in reader for layer in record.misses)
        active = sum(len(np.unique(layer)) for record in reader for layer in record.expert_ids)
        assert row["hit_rate_all"] == pytest.approx(1 - misses / active, abs=1e-12)


# The commands


def test_bench_tide_prints_a_row_for_each_machine_and_budget(tmp_path: Path, profile: Profile) -> None:
    path, plot = tmp_path / "p.npz", tmp_path / "curves.png"
    write_model_profile(profile, path)
    done = run(
        *("bench", "tide", SMALL_TRACE, "--profile", path, "--hardware", "rtx4090,h100-80"),
        *("--expert-memory", "25%,50%", "--work", "llada2-mini", "--plot", plot, "--json"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["hardware"], row["expert_memory"]) for row in rows] == [
        ("rtx4090", "25%"), ("rtx4090", "50%"), ("h100-80", "25%"), ("h100-80", "50%"),
    ]  # fmt: skip
    for row in rows:
        assert {"solved_interval", "solved_ms", "best_interval", "best_ms", "model_error"} <= set(row)
        assert row["kind"] == "simulated" and len(row["curve_ms"]) == len(INTERVALS)
        assert row["best_ms"] <= row["solved_ms"] == pytest.approx(row["best_ms"], rel=0.05)
        assert abs(row["model_error"]) <= 0.15
    assert plot.stat().st_size > 10_000 and "simulated" in done.stdout
    done = run("bench", "tide", SMALL_TRACE, "--work", "llada2-mini")
    assert done.returncode == 2 and "--profile" in done.stderr


def test_intervals_beyond_the_longest_block_are_simulated_once(tmp_path: Path, profile: Profile) -> None:
    path, counts = tmp_path / "p.npz", []
    write_model_profile(profile, path)
    (row,), _ = compare_intervals(
        SMALL_TRACE,
        path,
        ["25%"],
        [load_hardware("a100-40")],
        small_work(),
        lambda done, total: counts.append(total),
    )
    longest = longest_block(TraceReader(SMALL_TRACE))
    assert 1 < longest < len(INTERVALS) and len(set(row.curve_ms[longest - 1 :])) == 1
    assert counts[0] == (longest + 2) * TraceReader(SMALL_TRACE).num_forwards


def test_plan_shows_the_interval_the_curve_and_why() -> None:
    plan = ("plan", "demo", "--hardware", "rtx4090", "--expert-memory", "16")
    done = run(*plan, "--strategy", "tide", "--json")
    assert done.returncode == 0, done.stderr
    refresh = json.loads(done.stdout.splitlines()[-1])["refresh"]
    assert refresh["method"] == "measured" and len(set(refresh["intervals"])) == 1
    assert refresh["iteration_ms"] == pytest.approx(min(refresh["curve_ms"]))
    assert set(refresh["lanes_ms"]) == {"link", "device", "host"} and refresh["kind"] == "simulated"
    done = run(*plan, "--strategy", "tide", "--tide-interval", "3")
    assert "Refresh interval, as given: every 3 iterations" in done.stdout and "Why:" in done.stdout
    done = run(*plan, "--strategy", "oled", "--tide-interval", "3")
    assert done.returncode == 2 and "--strategy tide" in done.stderr


def test_an_interval_from_the_command_line_is_followed() -> None:
    document = generated("--tide-interval", "2")
    assert document["statistics"]["strategy"] == "tide:interval=2"
    assert document["token_ids"] == generated()["token_ids"]


def generated(*options: object) -> dict[str, Any]:
    done = run(
        *("generate", "demo", "What is 23 + 58?", "--max-tokens", "24", "--strategy", "tide"),
        *("--hardware", "rtx4090", "--expert-memory", "16", *options, "--json"),
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def test_the_strategies_are_named() -> None:
    assert Strategy.parse("refresh-always").parameters == {"interval": 1}
    assert Strategy.parse("tide").dispatch == "own" and Strategy.parse("tide-layers").budget == "refresh"
