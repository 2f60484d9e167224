"""What a machine is: shipped profiles that say where each number is from, a user's own, and this computer."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relume.core import RelumeError
from relume.machine.figures import KernelTimes, MachineProfile, Measurement
from relume.machine.hardware import HARDWARE, THIS, ProfiledHardware, load_hardware, measured_hardware
from relume.machine.work import WorkShape
from relume.model.sizes import model_sizes
from relume.synth.shapes import make_shape

NAMES = {"rtx4060", "rtx3090", "rtx4090", "a100-40", "h100-80", "h200"}


def test_shipped_profiles() -> None:
    assert set(HARDWARE) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_shipped_profile_is_whole_and_sourced(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.title
    for key, constant in hardware.constants.items():
        assert constant.source.strip(), key
        assert "http" not in constant.source
    # What is shipped is plausible: a link slower than what lies at both its ends, and a disk slower than the link.
    assert hardware.si("device.bandwidth") > hardware.si("host.bandwidth") > hardware.si("link.bandwidth")
    assert hardware.si("link.bandwidth") > hardware.si("disk.bandwidth")
    lanes = hardware.si("link.pcie_lanes") * 2 ** hardware.si("link.pcie_generation") / 8 * 0.985e9
    assert 0.7 * lanes < hardware.si("link.bandwidth") < 0.95 * lanes


def test_what_an_rtx4090_takes() -> None:
    hardware = load_hardware("rtx4090")
    # An expert of LLaDA2.0-mini: 3 * 2048 * 512 weights, 6.29 MB. A launch of 4 us, then either reading it
    # at 0.91 * 1008 GB/s, 6.86 us, or for many tokens computing 2 * 3.15 M * n operations at 0.6 * 165.2 TFLOP/s.
    parameters = 3 * 2048 * 512
    few, many = hardware.device_kernel_s(np.array([1, 1000]), parameters, 2)
    assert few == pytest.approx(4e-6 + 6_291_456 / (0.91 * 1008e9))
    assert many == pytest.approx(4e-6 + 2 * parameters * 1000 / (0.6 * 165.2e12))
    # A quarter of the bytes is read in a quarter of the time.
    assert hardware.device_kernel_s(np.array([1]), parameters, 2, parameters // 2)[0] == pytest.approx(
        4e-6 + 6_291_456 / 4 / (0.91 * 1008e9)
    )
    # float32 has twice the bytes, and a rate of its own.
    assert hardware.device_kernel_s(np.array([1000]), parameters, 4)[0] == pytest.approx(
        4e-6 + 2 * parameters * 1000 / (0.6 * 82.6e12)
    )
    assert hardware.host_kernel_s(np.array([1]), parameters, 2)[0] == pytest.approx(20e-6 + 6_291_456 / 42e9)
    assert hardware.host_kernel_s(np.array([100]), parameters, 2)[0] == pytest.approx(
        20e-6 + 2 * parameters * 100 / 1.5e12
    )
    assert hardware.transfer_s(6_291_456) == pytest.approx(3e-6 + 6_291_456 / 23.9e9)
    assert hardware.disk_s(6_291_456) == pytest.approx(6_291_456 / 6.3e9)
    assert hardware.dense_s(1e6, 1, 2) == pytest.approx(2e6 / (0.91 * 1008e9))
    assert hardware.layer_overhead_s == pytest.approx(12 * 4e-6)


def rtx4060_as(tmp_path: Path, old: str, new: str) -> str:
    """A user's own file: the shipped one with a line changed."""
    lines = HARDWARE["rtx4060"].read_text().splitlines()
    assert sum(line.startswith(old) for line in lines) == 1
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(new if line.startswith(old) else line for line in lines))
    return str(path)


def test_a_users_own_profile(tmp_path: Path) -> None:
    disk = 'start = { value = 1, unit = "ms", source = "my stopwatch" }'
    hardware = load_hardware(rtx4060_as(tmp_path, "start", disk))
    assert hardware.name == "mine"
    assert hardware.si("host.start") == pytest.approx(1e-3)
    assert hardware.constants["host.start"].source == "my stopwatch"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("start", "", "host.start missing"),
        ("title", "", "title is missing"),
        ("call", 'cal = { value = 1, unit = "us", source = "s" }', "unknown key host.cal"),
        ("[disk]", "[disc]", "unknown key disc.bandwidth"),
        ("title", 'title = "t"\nspeed = 3', "unknown key speed"),
        ("call", "call = 20", "host.call is 20: give value, unit and source"),
        ("call", 'call = { value = 20, unit = "us" }', "give value, unit and source"),
        ("call", 'call = { value = 20, unit = "us", source = " " }', "host.call has no source"),
        ("call", 'call = { value = 20, unit = "s", source = "s" }', "host.call is in 's': use us or ms"),
        ("call", 'call = { value = "20", unit = "us", source = "s" }', "host.call is '20'"),
        ("call", 'call = { value = -1, unit = "us", source = "s" }', "host.call is -1"),
        ("compute_share", 'compute_share = { value = 2, unit = "share", source = "s" }', "a share above 0"),
        ("latency", 'latency = { value = nan, unit = "us", source = "s" }', "link.latency is nan"),
        ("call", "call = [", "mine.toml"),
    ],
)
def test_a_faulty_profile_is_one_clear_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(RelumeError, match=r"mine\.toml") as caught:
        load_hardware(rtx4060_as(tmp_path, old, new))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RelumeError, match=r"unknown hardware profile 'rtx5': choose one of a100-40, .*this, or"):
        load_hardware("rtx5")
    with pytest.raises(RelumeError, match=r"none\.toml: cannot be read"):
        load_hardware(str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RelumeError, match="run `relume machine`"):
        load_hardware(THIS)


def profile(**changes: Any) -> MachineProfile:
    def figure(value: float | None, unit: str) -> Measurement:
        return Measurement(value, unit, "2026-11-30")

    # An expert of 10 x 10, 300 weights, at 1 ms for one token and 2 ms for eleven.
    times = {dtype: {n: figure(ms, "ms") for n, ms in ((1, 1.0), (11, 2.0))} for dtype in ("float32", "bfloat16")}
    made = MachineProfile(
        identity="a computer",
        folder="/",
        read_bytes=600,
        memory_read=figure(20.0, "GB/s"),
        disk_direct=figure(500.0, "MB/s"),
        disk_buffered=figure(400.0, "MB/s"),
        host_to_device=figure(None, "GB/s"),
        compute_threads=figure(2.0, "threads"),
        expert_kernel=KernelTimes(10, 10, figure(0.5, "ms"), times),
    )
    return replace(made, **changes)


def test_this_computer_as_measured() -> None:
    hardware = measured_hardware(profile())
    assert (hardware.name, hardware.title) == (THIS, "a computer")
    assert {constant.source for constant in hardware.constants.values()} == {"measured on 2026-11-30"}
    # 1 ms for one token and 0.1 ms for each more; twice the weights take the call's 0.5 ms once.
    assert hardware.device_kernel_s(np.array([6, 1, 6]), 300, 4).tolist() == pytest.approx([1.5e-3, 1e-3, 1.5e-3])
    assert hardware.device_kernel_s(np.array([1]), 600, 2).tolist() == pytest.approx([1.5e-3])
    assert hardware.dense_s(600, 1, 2) == pytest.approx(1.5e-3)
    assert hardware.host_kernel_s(np.array([1, 2]), 300, 4).tolist() == [inf, inf]
    # The disk is the link, and nothing lies in host memory.
    assert hardware.link_is_disk
    assert hardware.transfer_s(1e6) == hardware.disk_s(1e6) == pytest.approx(2e-3)
    assert hardware.si("host.memory") == hardware.layer_overhead_s == 0
    # Weights cannot be read faster than memory allows: 20 GB at 20 GB/s.
    fast = replace(hardware, kernel=replace(profile().expert_kernel, hidden=10**9))
    assert fast.dense_s(10e9, 1, 2) == pytest.approx(1.0)


@pytest.mark.parametrize("part", ["memory", "disk", "float32 kernels"])
def test_what_was_not_measured_is_said(part: str) -> None:
    nothing = Measurement(None, "x", "2026-11-30", "no luck")
    changes: dict[str, dict[str, Any]] = {
        "memory": {"memory_read": nothing},
        "disk": {"disk_direct": nothing, "disk_buffered": nothing},
        "float32 kernels": {"expert_kernel": replace(profile().expert_kernel, times={})},
    }
    with pytest.raises(RelumeError, match=f"{part}.* not measured: run `relume machine`"):
        measured_hardware(profile(**changes[part]))
    assert measured_hardware(profile(disk_direct=nothing)).disk_s(1e6) == pytest.approx(2.5e-3)


@pytest.mark.parametrize("name", ["llada2-mini", "llada2-flash", "sdar-30b"])
def test_the_work_of_published_shapes(name: str) -> None:
    shape = make_shape(name)
    config, parts = shape.config, model_sizes(shape.family, shape.config).parts
    work = WorkShape.of(config, 2, 2 * config.parameters_per_expert)
    assert work.attention_parameters * work.num_layers == parts["attention"]
    assert work.dense_parameters * work.num_dense_layers == parts["dense_layers"]
    assert work.shared_parameters * work.num_moe_layers == parts["shared_experts"]
    # A router's bias, where there is one, is one number an expert.
    biases = config.router.num_experts * work.num_moe_layers * config.router.has_bias
    assert work.router_parameters * work.num_moe_layers + biases == parts["routers"]
    assert work.head_parameters * (1 if config.tie_embeddings else 2) == parts["embeddings"]
    assert work.kv_bytes_per_position * work.num_layers == 2 * config.kv_values_per_token
    assert work.expert_parameters == config.parameters_per_expert
    assert work.query_group * config.num_kv_heads == config.num_heads


def test_impossible_work() -> None:
    config = make_shape("llada2-mini").config
    with pytest.raises(RelumeError, match="itemsize is 3"):
        WorkShape.of(config, 3, 100)
    with pytest.raises(RelumeError, match="expert_bytes is 0"):
        WorkShape.of(config, 2, 0)
    with pytest.raises(RelumeError, match="no layer holds experts"):
        replace(WorkShape.of(config, 2, 100), num_dense_layers=20)


def test_a_profile_can_be_made_in_code() -> None:
    hardware = load_hardware("h200")
    with pytest.raises(RelumeError, match=r"disk.bandwidth missing"):
        ProfiledHardware("x", "x", {key: c for key, c in hardware.constants.items() if key != "disk.bandwidth"})
