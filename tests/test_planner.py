"""Every byte has one owner: plans add up, keep to their limit, and name the smallest limit that works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume.config import ModelConfig, RouterConfig, ShapeOverrides
from relume.core import RelumeError
from relume.engine.footprint import Workload
from relume.engine.memory_plan import mebibytes
from relume.engine.planner import Planner
from relume.engine.predict import Prediction, active_experts, hit_rate, predict
from relume.machine.figures import KernelTimes, MachineProfile, Measurement
from relume.machine.profile import VERSION, machine_identity
from relume.model.families import FAMILIES
from relume.model.sizes import model_sizes
from relume.strategy.budget import ExpertMemory
from relume.synth.shapes import make_shape
from terminal import RELUME

MIB, GIB = 2**20, 2**30
GROWING = {"kv_cache", "activations", "logits"}


def planner(name: str = "llada2-mini", **work: Any) -> Planner:
    shape = make_shape(name)
    workload = Workload(**({"compute_itemsize": 2, "stored_itemsize": 2, "context": 4096} | work))
    return Planner(shape.config, model_sizes(shape.family, shape.config), workload)


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    num_experts = draw(st.integers(1, 40))
    num_layers = draw(st.integers(1, 6))
    block_length = draw(st.sampled_from([4, 8, 32]))
    config = ModelConfig(
        family="llada2",
        vocab_size=draw(st.integers(10, 5000)),
        hidden_size=draw(st.integers(8, 300)),
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rotary_dim=8,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        num_dense_layers=draw(st.integers(0, num_layers - 1)),
        dense_size=draw(st.integers(8, 400)),
        expert_size=draw(st.integers(1, 300)),
        shared_size=draw(st.sampled_from([0, 16])),
        router=RouterConfig(num_experts, draw(st.integers(1, num_experts))),
        max_context=8192,
        block_length=block_length,
    )
    on_gpu = draw(st.booleans())
    work = Workload(
        compute_itemsize=draw(st.sampled_from([2, 4])),
        stored_itemsize=draw(st.sampled_from([2, 4])),
        context=draw(st.integers(1, 8192)),
        batch=draw(st.integers(1, 8)),
        prefill_tokens=draw(st.sampled_from([32, 512])),
        on_gpu=on_gpu,
    )
    host = draw(st.integers(0, 100 * MIB)) if on_gpu else 0
    sizes = model_sizes(FAMILIES["llada2"], config)
    return Planner(config, sizes, work, transit_slots=draw(st.integers(0, 12)), host_tier_bytes=host)


def specifications(owner: Planner) -> st.SearchStrategy[ExpertMemory]:
    experts = owner.shape.num_experts
    least = owner.least_slots * owner.slot_bytes
    return st.one_of(
        st.just(ExpertMemory()),
        st.integers(1, experts).map(lambda slots: ExpertMemory(slots=slots)),
        st.floats(1 / experts, 1.0).map(lambda share: ExpertMemory(share=share)),
        st.integers(least, 4 * least).map(lambda size: ExpertMemory(num_bytes=size)),
    )


@settings(max_examples=150, deadline=None)
@given(planners(), st.data(), st.integers(0, 2 * GIB))
def test_a_plan_adds_up_and_keeps_to_its_limit(owner: Planner, data: st.DataObject, spare: int) -> None:
    experts = data.draw(specifications(owner))
    limit = owner.smallest_memory(experts) + spare
    plan = owner.make_plan(limit, experts)
    assert plan.total_bytes == sum(plan.bytes.values()) <= limit == plan.memory_limit_bytes
    assert min(plan.bytes.values()) >= 0
    assert plan.bytes["expert_slots"] == sum(plan.slots_per_layer) * owner.slot_bytes
    assert len(plan.slots_per_layer) == owner.shape.num_layers
    assert min(plan.slots_per_layer) >= 1
    assert max(plan.slots_per_layer) <= owner.shape.num_experts
    assert max(plan.slots_per_layer) - min(plan.slots_per_layer) <= 1
    resident, held = sum(plan.slots_per_layer), plan.host_bytes.get("host_experts", 0)
    everything = owner.shape.num_layers * owner.shape.num_experts
    assert plan.bytes["transit_slots"] == min(owner.transit_slots, everything - resident) * owner.slot_bytes
    assert held % owner.slot_bytes == 0 and held <= owner.host_tier_bytes
    assert bool(plan.host_bytes) == owner.work.on_gpu


@settings(max_examples=150, deadline=None)
@given(planners(), st.data())
def test_the_smallest_memory_works_and_a_byte_less_fails(owner: Planner, data: st.DataObject) -> None:
    experts = data.draw(specifications(owner))
    smallest = owner.smallest_memory(experts)
    plan = owner.make_plan(smallest, experts)
    assert plan.total_bytes == smallest
    with pytest.raises(RelumeError) as caught:
        owner.make_plan(smallest - 1, experts)
    named = re.findall(r"--memory (\d+MiB)", str(caught.value))
    assert named[0] == mebibytes(smallest)
    again = owner.make_plan(ExpertMemory.parse(named[0]).num_bytes or 0, experts)
    assert sum(again.slots_per_layer) >= sum(plan.slots_per_layer)
    slots = re.findall(r"--expert-memory (\d+)", str(caught.value))
    if slots:  # the number that is named fits the memory that is named last, or was given
        memory = named[-1] if len(named) > 1 or experts.is_auto else None
        given_bytes = smallest - 1 if memory is None else ExpertMemory.parse(memory).num_bytes or 0
        owner.make_plan(given_bytes, ExpertMemory.parse(slots[0]))


@settings(max_examples=100, deadline=None)
@given(planners(), st.integers(0, 3 * GIB), st.integers(0, GIB))
def test_more_memory_never_gives_fewer_slots_and_no_slot_is_wasted(owner: Planner, limit: int, more: int) -> None:
    limit = max(limit, owner.smallest_memory())
    plan, larger = owner.make_plan(limit), owner.make_plan(limit + more)
    assert sum(plan.slots_per_layer) <= sum(larger.slots_per_layer)
    everything = owner.shape.num_layers * owner.shape.num_experts
    if sum(plan.slots_per_layer) < everything - owner.transit_slots:
        assert limit - plan.total_bytes < owner.slot_bytes
    complete = owner.smallest_memory(ExpertMemory(share=1.0))
    assert set(owner.make_plan(complete).slots_per_layer) == {owner.shape.num_experts}
    assert owner.make_plan(complete).bytes["transit_slots"] == 0


@settings(max_examples=100, deadline=None)
@given(planners(), st.integers(1, 8192), st.integers(1, 20))
def test_context_and_batch_raise_what_requests_hold_and_nothing_else(
    owner: Planner, context: int, batch: int
) -> None:
    experts = ExpertMemory(slots=1)
    larger = replace(
        owner,
        work=replace(owner.work, context=max(owner.work.context, context), batch=max(owner.work.batch, batch)),
    )
    before = owner.make_plan(owner.smallest_memory(experts), experts)
    after = larger.make_plan(larger.smallest_memory(experts), experts)
    for part, count in before.bytes.items():
        assert after.bytes[part] >= count if part in GROWING else after.bytes[part] == count, part
    assert after.host_bytes == before.host_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100MiB", "holds 16 experts"),
        ("0.3%", "holds 14 experts"),
        ("300", "has only 256"),
    ],
)
def test_an_expert_memory_that_no_memory_helps(text: str, message: str) -> None:
    with pytest.raises(RelumeError, match=message):
        planner().make_plan(64 * GIB, ExpertMemory.parse(text))


def test_sizes_are_rounded_down_to_whole_slots() -> None:
    plan = planner().make_plan(16 * GIB, ExpertMemory(num_bytes=2 * GIB - 1))
    assert plan.expert_memory_bytes == 2046 * MIB  # 341 experts of 6 MiB
    assert plan.slots_per_layer == (18,) * 18 + (17,)


def test_another_type_needs_a_place_to_convert() -> None:
    plain, wide = planner(), planner(compute_itemsize=4)
    limit = 100 * GIB
    assert plain.make_plan(limit).bytes["load_peak"] == 0
    assert wide.make_plan(limit).bytes["load_peak"] == 157184 * 2048 * 2
    assert wide.slot_bytes == 2 * plain.slot_bytes
    assert wide.make_plan(limit).bytes["routers"] == plain.make_plan(limit).bytes["routers"]  # always float32


def test_beside_a_gpu_there_is_ram() -> None:
    owner = replace(planner(on_gpu=True), host_tier_bytes=4 * GIB)
    plan = owner.make_plan(16 * GIB, host_limit_bytes=8 * GIB)
    assert plan.host_bytes["host_experts"] == 4 * GIB // (6 * MIB) * 6 * MIB
    assert "staging" not in plan.bytes and plan.host_bytes["staging"] > 4 * 6 * MIB
    with pytest.raises(RelumeError, match="beside the GPU"):
        owner.make_plan(16 * GIB, host_limit_bytes=4 * GIB)


def test_experts_held_in_ram_beside_the_arena_are_counted() -> None:
    owner = replace(planner(), host_tier_bytes=GIB)
    plan, without = owner.make_plan(16 * GIB), planner().make_plan(16 * GIB)
    held = GIB // (6 * MIB)
    assert plan.bytes["host_experts"] == held * 6 * MIB and plan.host_experts == held
    assert sum(plan.slots_per_layer) <= sum(without.slots_per_layer) - held


def test_what_cannot_be_planned() -> None:
    with pytest.raises(RelumeError, match="the model has 32768"):
        planner(context=32769)
    with pytest.raises(RelumeError, match="batch is 0"):
        planner(batch=0)
    dense = replace(planner().config, num_dense_layers=20)
    with pytest.raises(RelumeError, match="no layers with experts"):
        replace(planner(), config=dense)


def a_profile(disk: float = 1000.0) -> MachineProfile:
    def figure(value: float | None) -> Measurement:
        return Measurement(value, "x", "2026-11-30")

    times = {dtype: {n: figure(ms) for n, ms in ((1, 1.0), (32, 2.0))} for dtype in ("float32", "bfloat16")}
    kernel = KernelTimes(2048, 512, figure(0.01), times)
    return MachineProfile(
        "a computer", "/", 6 * MIB, figure(20.0), figure(disk), figure(None), figure(None), figure(2.0), kernel
    )


def tpot(owner: Planner, limit: int, profile: MachineProfile) -> float:
    found = predict(owner.config, owner.sizes, owner.work, owner.make_plan(limit), profile).tpot_ms
    assert found is not None
    return found


def test_active_experts_of_published_shapes() -> None:
    mini = make_shape("llada2-mini").config
    assert active_experts(mini) == pytest.approx(70, abs=1)
    assert active_experts(replace(mini, block_length=1)) == pytest.approx(8)
    assert active_experts(mini) < active_experts(mini, 4) < 256
    capped = make_shape("llada2-mini", ShapeOverrides(expert_capacity=48)).config
    assert active_experts(capped) == 48


def test_hit_rates_rise_with_the_share_and_never_beyond_what_is_resident() -> None:
    rates = [hit_rate(share / 100, 0.27) for share in range(101)]
    assert rates == sorted(rates) and rates[0] == 0.0 and rates[-1] == 1.0
    assert hit_rate(0.1, 0.9) == pytest.approx(0.1 / 0.9)


def test_predicted_times() -> None:
    owner = planner()
    few, many, all_of_them = 6 * GIB, 16 * GIB, 40 * GIB
    assert tpot(owner, few, a_profile()) > tpot(owner, many, a_profile()) > tpot(owner, all_of_them, a_profile())
    assert tpot(owner, few, a_profile(500.0)) > tpot(owner, few, a_profile(2000.0))
    assert tpot(owner, all_of_them, a_profile(1.0)) == tpot(owner, all_of_them, a_profile(9000.0))
    # By hand: 19 x 70 kernels at 3.7 tokens, 1.05 ms and 5% call; dense weights take 2 ms an expert's worth.
    kernels = 19 * active_experts(owner.config) * (1 + (32 * 8 / active_experts(owner.config) - 1) / 31)
    dense = 0.01 + 1.99 * (owner.sizes.outside_experts - 157184 * 2048) / owner.sizes.per_expert
    assert tpot(owner, all_of_them, a_profile()) == pytest.approx((kernels + dense) * (1 / 2.6 + 1 / 32))


def test_the_way_of_reading_and_host_memory_count() -> None:
    profile = replace(a_profile(100.0), disk_buffered=Measurement(400.0, "MB/s", "2026-11-30"))

    def predicted(owner: Planner, direct: bool) -> Prediction:
        plan = owner.make_plan(32 * GIB, ExpertMemory(slots=32))
        return predict(owner.config, owner.sizes, owner.work, plan, profile, direct)

    def misses_ms(prediction: Prediction) -> float:
        text = " ".join(prediction.reasons)
        return float(re.findall(r"Misses: (\d+) ms", text)[0])

    owner = planner()
    direct, buffered = predicted(owner, True), predicted(owner, False)
    assert misses_ms(direct) == pytest.approx(4 * misses_ms(buffered), rel=0.01)
    assert "100 MB/s around the page cache" in " ".join(direct.reasons)
    assert "400 MB/s through a page cache" in " ".join(buffered.reasons)
    # Half of all experts are in host memory: half of the misses are not read. A copy of 6 MiB takes 0.6 ms of 63.
    held = replace(owner, host_tier_bytes=owner.shape.num_layers * 128 * owner.slot_bytes)
    halved = predicted(held, True)
    assert misses_ms(halved) == pytest.approx(misses_ms(direct) / 2 * 1.01, rel=0.005)
    assert "copied from host memory" in " ".join(halved.reasons)
    assert "host memory" not in " ".join(direct.reasons)


def test_reasons_say_what_is_missing() -> None:
    owner = planner()
    plan = owner.make_plan(8 * GIB)
    without = predict(owner.config, owner.sizes, owner.work, plan, None)
    assert without.tpot_ms is None and "relume machine" in without.reasons[-1]
    unknown = replace(a_profile(), disk_direct=Measurement(None, "MB/s", "2026-11-30"))
    assert predict(owner.config, owner.sizes, owner.work, plan, unknown).tpot_ms is None
    on_gpu = planner(on_gpu=True)
    assert predict(on_gpu.config, on_gpu.sizes, on_gpu.work, plan, a_profile()).tpot_ms is None
    complete = predict(owner.config, owner.sizes, owner.work, plan, a_profile())
    assert any("predicted" in reason for reason in complete.reasons)
    assert any("a computer" in reason for reason in complete.reasons)


MEASURE = """
import json, sys
import relume
from relume import Engine

engine = Engine.load(sys.argv[1])
engine.generate(input_ids=[1] * 900, block_length=32, max_tokens=64, ignore_eos=True)
print([int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def test_a_real_process_stays_within_its_plan_even_without_the_margin(tmp_path: Path) -> None:
    values = LLADA2 | {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 8,
    }
    values |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    write_checkpoint(tmp_path, values, make_tensors(values), tokenizer=True)
    config = FAMILIES["llada2"].read_config(values, {})
    owner = Planner(config, model_sizes(FAMILIES["llada2"], config), Workload(4, 4, context=992))
    plan = owner.make_plan(8 * GIB)
    assert plan.resident_share == 1.0
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, check=True, text=True)
    peak, planned = int(done.stdout), plan.total_bytes - plan.bytes["safety_margin"]
    assert peak <= planned
    assert planned - peak < 128 * MIB  # and the plan is no wild guess


def run(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        [str(RELUME), "plan", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "mini"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(make_shape("llada2-mini").json)))
    return folder


@pytest.mark.parametrize(
    ("name", "outside", "expert"),
    [("llada2-mini", "1.78 GiB", "6.0 MiB"), ("llada2-flash", "5.65 GiB", "24.0 MiB")],
)
def test_published_sizes_are_printed(tmp_path: Path, name: str, outside: str, expert: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(make_shape(name).json)))
    done = run(tmp_path, "--memory", "64GiB", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    cells = {line[0].strip(): line[-1].strip() for line in lines if len(line) > 1}
    assert (cells["outside routed experts"], cells["an expert"]) == (outside, expert)
    assert "relume machine" in done.stdout  # nothing was measured in this cache folder


def test_the_json_document(mini: Path, tmp_path: Path) -> None:
    done = run(mini, "--memory", "8GiB", "--expert-memory", "10%", "--batch", 2, "--json", cache=tmp_path)
    document = json.loads(done.stdout.splitlines()[-1])
    assert sum(document["bytes"].values()) == document["total_bytes"] <= document["memory_limit_bytes"] == 8 * GIB
    assert sum(document["slots_per_layer"]) == 19 * 256 // 10
    assert document["expert_memory_bytes"] == 19 * 256 // 10 * document["bytes_per_expert"]
    assert document["bytes"]["kv_cache"] == 2 * 4096 * 40 * 1024
    assert (document["tpot_ms"], document["kind"]) == (None, "simulated")
    assert document["reasons"] and document["strategy"] == "foresight"
    found = json.loads(run(mini, "--json", "--expert-memory", 8, "--context", 32, cache=tmp_path).stdout)
    assert found["memory_limit_bytes"] > 0  # found, not asked


def test_a_type_that_is_not_declared_is_looked_up_or_said_to_be_assumed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    values = {name: value for name, value in LLADA2.items() if name not in {"dtype", "torch_dtype"}}
    write_checkpoint(folder, values, make_tensors(values))
    document = json.loads(run(folder, "--memory", "2GiB", "--json", cache=tmp_path).stdout)
    per_expert = model_sizes(FAMILIES["llada2"], FAMILIES["llada2"].read_config(values, {})).per_expert
    assert document["bytes_per_expert"] == 4 * per_expert
    assert not any("assumed" in reason for reason in document["reasons"])
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    document = json.loads(run(folder, "--memory", "2GiB", "--json", cache=tmp_path).stdout)
    assert document["bytes_per_expert"] == 2 * per_expert
    assert "bfloat16 are assumed" in document["reasons"][0]


def test_warnings_are_printed(mini: Path, tmp_path: Path) -> None:
    arguments = [mini, "--memory", "8TiB", "--expert-memory", "1"]
    warnings = json.loads(run(*arguments, "--json", cache=tmp_path).stdout)["warnings"]
    assert len(warnings) == 1 and "--memory 8TiB" in warnings[0]
    assert f"Warning: {warnings[0]}." in " ".join(run(*arguments, cache=tmp_path).stdout.split())


def test_a_profile_gives_a_time(mini: Path, tmp_path: Path) -> None:
    (tmp_path / "relume").mkdir()
    kept = {"version": VERSION, "machines": {machine_identity(): asdict(a_profile())}}
    (tmp_path / "relume" / "machine.json").write_text(json.dumps(kept))
    done = run(mini, "--memory", "8GiB", cache=tmp_path)
    assert re.search(r"predicted time of a token +\d+ ms", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--memory", "2GiB"], 1, r"at least --memory \d+MiB, which holds --expert-memory 1"),
        (["--memory", "8GiB", "--expert-memory", "90%"], 1, "give at most --expert-memory"),
        (["--memory", "8GiB", "--context", "40000"], 1, "the model has 32768"),
        (["--device", "cuda:7x"], 1, "--memory 24GiB"),
        (["--memory", "8"], 2, "no size"),
        (["--memory", "much"], 2, "no size"),
        (["--expert-memory", "lots"], 2, "no amount"),
        (["--batch", "0"], 2, "batch"),
    ],
)
def test_wrong_usage_and_too_little(
    mini: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = run(mini, *arguments, cache=tmp_path)
    assert done.returncode == code, done.stderr
    assert re.search(message, " ".join(done.stderr.split()))
    assert "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr.count("\n") == 1
