"""What a process may use, read from fake systems; and the figures that are measured once and kept."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from relume.cli import machine as command
from relume.core import RelumeError
from relume.machine import bandwidth, profile
from relume.machine.cgroup import cpu_quota, memory_groups
from relume.machine.figures import KernelTimes, MachineProfile, Measurement
from relume.machine.limits import count_numa_nodes, find_limits, find_memory
from relume.machine.threads import effective_cores
from terminal import RELUME

MIB, GIB = 2**20, 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"  # 16 and 8 GiB
V2_MOUNT = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_NONE = "9223372036854771712"


def system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in ({"proc/meminfo": MEMINFO} | dict(files)).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def no_limit(_name: str) -> int | None:
    return None


def memory(root: Path, files: Mapping[str, str]) -> tuple[int, int, str]:
    found = find_memory(system(root, files), no_limit)
    return found.total_bytes, found.available_bytes, found.source


V2 = {"proc/self/cgroup": "0::/user/app\n", "proc/self/mountinfo": V2_MOUNT}
V1 = {"proc/self/cgroup": "4:memory:/user/app\n0::/\n", "proc/self/mountinfo": V1_MOUNT}
G2, G1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (16 * GIB, 8 * GIB, "RAM")),
        (V2, (16 * GIB, 8 * GIB, "RAM")),
        (V2 | {f"{G2}/user/app/memory.max": "max\n"}, (16 * GIB, 8 * GIB, "RAM")),
        (
            V2 | {f"{G2}/user/app/memory.max": f"{4 * GIB}\n", f"{G2}/user/app/memory.current": f"{GIB}\n"},
            (4 * GIB, 3 * GIB, "cgroup v2, /sys/fs/cgroup/user/app/memory.max"),
        ),
        (  # an outer level is tighter, and fuller
            V2
            | {
                f"{G2}/user/app/memory.max": str(4 * GIB),
                f"{G2}/user/memory.max": str(2 * GIB),
                f"{G2}/user/memory.current": str(1536 * MIB),
            },
            (2 * GIB, 512 * MIB, "cgroup v2, /sys/fs/cgroup/user/memory.max"),
        ),
        (  # page cache is no use of memory that counts
            V2
            | {
                f"{G2}/user/app/memory.max": str(4 * GIB),
                f"{G2}/user/app/memory.current": str(4 * GIB),
                f"{G2}/user/app/memory.stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
            },
            (4 * GIB, 3 * GIB, "cgroup v2, /sys/fs/cgroup/user/app/memory.max"),
        ),
        (
            V2 | {f"{G2}/user/app/memory.high": str(3 * GIB), f"{G2}/user/app/memory.max": "max"},
            (3 * GIB, 3 * GIB, "cgroup v2, /sys/fs/cgroup/user/app/memory.high"),
        ),
        (  # a container: its own group is what is mounted
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "proc/self/mountinfo": V2_MOUNT.replace("0:26 /", "0:26 /docker/abc"),
                f"{G2}/memory.max": str(GIB),
            },
            (GIB, GIB, "cgroup v2, /sys/fs/cgroup/memory.max"),
        ),
        (  # a group outside of what this process can see
            {"proc/self/cgroup": "0::/../../other\n", f"{G2}/memory.max": str(GIB)},
            (GIB, GIB, "cgroup v2, /sys/fs/cgroup/memory.max"),
        ),
        (V1 | {f"{G1}/user/app/memory.limit_in_bytes": V1_NONE}, (16 * GIB, 8 * GIB, "RAM")),
        (
            V1
            | {
                f"{G1}/user/app/memory.limit_in_bytes": str(6 * GIB),
                f"{G1}/user/app/memory.usage_in_bytes": str(5 * GIB),
                f"{G1}/user/app/memory.stat": f"inactive_file 9\ntotal_inactive_file {GIB}\n"
                f"total_active_file {GIB}\nhierarchical_memory_limit {V1_NONE}\n",
                f"{G1}/memory.limit_in_bytes": V1_NONE,
            },
            (6 * GIB, 3 * GIB, "cgroup v1, /sys/fs/cgroup/memory/user/app/memory.limit_in_bytes"),
        ),
        (  # the limiting level is out of sight
            V1 | {f"{G1}/user/app/memory.stat": f"hierarchical_memory_limit {5 * GIB}\n"},
            (
                5 * GIB,
                5 * GIB,
                "cgroup v1, /sys/fs/cgroup/memory/user/app/memory.stat (hierarchical_memory_limit)",
            ),
        ),
        (  # both versions mounted, as in transition: either may limit
            {
                "proc/self/cgroup": "4:memory:/a\n0::/b\n",
                "proc/self/mountinfo": V1_MOUNT + V2_MOUNT.replace("cgroup rw", "cgroup/unified rw"),
                f"{G1}/a/memory.limit_in_bytes": str(6 * GIB),
                f"{G2}/unified/b/memory.max": str(2 * GIB),
            },
            (2 * GIB, 2 * GIB, "cgroup v2, /sys/fs/cgroup/unified/b/memory.max"),
        ),
    ],
)
def test_the_tightest_memory_limit(tmp_path: Path, files: dict[str, str], expected: tuple[int, int, str]) -> None:
    assert memory(tmp_path, files) == expected


@pytest.mark.parametrize(
    "text", ["", "\n", "banana", "-1", "0", "1.5G", "9" * 6000, "٣", "\x00", ":::::", "0::a\x00b"]
)
def test_odd_files_count_as_no_limit(tmp_path: Path, text: str) -> None:
    files = {
        "memory.max": text,
        "memory.high": text,
        "memory.current": text,
        "memory.stat": f"inactive_file {text}\n{text}",
    }
    groups = {f"{G2}/user/app/{name}": content for name, content in files.items()}
    total, available, _ = memory(tmp_path, V2 | groups)
    assert total in {16 * GIB, 3}  # an Arabic three is a number
    assert available <= total
    for name in ("proc/self/cgroup", "proc/self/mountinfo", "proc/self/status"):
        assert memory(tmp_path, {name: text})[0] in {16 * GIB, 3}
    assert find_memory(system(tmp_path, {"proc/meminfo": text}), no_limit).total_bytes > 0


CPU_MOUNT = "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
CPU_V1 = {"proc/self/cgroup": "3:cpu,cpuacct:/user/app\n0::/\n", "proc/self/mountinfo": CPU_MOUNT}
C1 = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (V2, None),
        (V2 | {f"{G2}/user/app/cpu.max": "max 100000\n"}, None),
        (V2 | {f"{G2}/user/app/cpu.max": "150000 100000\n"}, 1.5),
        (  # an outer level is tighter
            V2 | {f"{G2}/user/app/cpu.max": "800000 100000\n", f"{G2}/user/cpu.max": "100000 50000\n"},
            2.0,
        ),
        (  # a container: its own group is what is mounted
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "proc/self/mountinfo": V2_MOUNT.replace("0:26 /", "0:26 /docker/abc"),
                f"{G2}/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        (CPU_V1 | {f"{C1}/user/app/cpu.cfs_quota_us": "-1\n", f"{C1}/user/app/cpu.cfs_period_us": "9\n"}, None),
        (
            CPU_V1
            | {
                f"{C1}/user/app/cpu.cfs_quota_us": "-1\n",
                f"{C1}/user/app/cpu.cfs_period_us": "100000\n",
                f"{C1}/user/cpu.cfs_quota_us": "50000\n",
                f"{C1}/user/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (V1 | {f"{G1}/user/app/cpu.max": "1 1\n"}, None),  # memory is not where the quota stands
        *((V2 | {f"{G2}/user/app/cpu.max": text}, None) for text in ("", "1", "0 9", "9 0", "a b", "1 2 3")),
    ],
)
def test_the_tightest_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: float | None
) -> None:
    root = system(tmp_path, files)
    assert cpu_quota(root) == expected
    for cores in (2, 16):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores), raising=False)
        assert effective_cores(root) == (cores if expected is None else max(1, min(cores, round(expected))))


def test_a_system_without_proc_still_has_memory(tmp_path: Path) -> None:
    assert memory_groups(tmp_path) == []
    assert find_memory(tmp_path, no_limit).total_bytes > GIB
    (tmp_path / "proc").write_text("a file")
    assert find_memory(tmp_path, no_limit).source == "RAM"


def test_limits_of_address_space_and_data(tmp_path: Path) -> None:
    status = {"proc/self/status": f"VmSize: {GIB // 1024} kB\nVmData: {512} kB\nRssAnon: {256 * 1024} kB\n"}
    root = system(tmp_path, status)
    found = find_memory(root, {"RLIMIT_AS": 3 * GIB}.get)
    assert (found.total_bytes, found.available_bytes, found.source) == (3 * GIB, 2 * GIB, "RLIMIT_AS")
    assert found.usable_bytes == 2 * GIB + 256 * MIB  # what the process holds is its own to use
    found = find_memory(root, {"RLIMIT_DATA": 2 * GIB}.get)
    assert (found.total_bytes, found.source) == (2 * GIB, "RLIMIT_DATA")
    assert find_memory(root, {"RLIMIT_AS": MIB}.get).available_bytes == 0  # already beyond


def test_pinning_is_capped_at_half_of_ram_and_nothing_is_assumed_of_numa(tmp_path: Path) -> None:
    root = system(tmp_path, V2 | {f"{G2}/user/app/memory.max": str(4 * GIB)})
    limits = find_limits(root, {"RLIMIT_MEMLOCK": 64 * MIB}.get, with_gpus=False)
    assert (limits.pin_cap_bytes, limits.lockable_bytes, limits.gpus) == (2 * GIB, 64 * MIB, ())
    assert limits.numa_nodes is None
    for node in ("node0", "node1", "nodes", "online"):
        (root / "sys/devices/system/node" / node).mkdir(parents=True)
    assert count_numa_nodes(root) == 2


def test_this_machine() -> None:
    limits = find_limits()
    assert limits.cores >= 1
    assert 0 < limits.memory.available_bytes <= limits.memory.usable_bytes <= limits.memory.total_bytes
    assert profile.machine_identity()


def test_disk_reads_a_scratch_file_that_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = os.preadv

    def count(*arguments: Any) -> int:
        read.append(real(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", count)
    with bandwidth.scratch_file(tmp_path, 10_000) as path:
        assert path.stat().st_size == 16 * 12288  # whole pages
        assert bandwidth.disk_read(path, 10_000, direct=False, num_threads=4) > 0
        assert sum(read) % (16 * 12288) == 0 and len(read) >= 3 * 16
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with bandwidth.scratch_file(tmp_path, 4096) as path, monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(bandwidth.NotMeasuredError, match=r"refuses O_DIRECT \(Invalid argument\)"):
            bandwidth.disk_read(path, 4096, direct=True, num_threads=4)
        path.write_bytes(b"")
        patch.undo()
        with pytest.raises(bandwidth.NotMeasuredError, match="ended early"):
            bandwidth.disk_read(path, 4096, direct=False, num_threads=4)
    (tmp_path / "file").touch()
    with (
        pytest.raises(bandwidth.NotMeasuredError, match="cannot write there"),
        bandwidth.scratch_file(tmp_path / "file", 4096),
    ):
        pass


def test_repeats_are_few() -> None:
    calls: list[int] = []
    bandwidth.median_seconds(lambda: calls.append(1), repeats=7)
    assert len(calls) == 8


def figure(value: float | None, unit: str = "ms") -> Measurement:
    return Measurement(value, unit, "2026-11-30", None if value else "no reason at all")


def kernel_times(**times: dict[int, float]) -> KernelTimes:
    rows = {dtype: {tokens: figure(ms) for tokens, ms in row.items()} for dtype, row in times.items()}
    return KernelTimes(10, 10, figure(1.0), rows)


def a_profile(identity: str = "this") -> MachineProfile:
    return MachineProfile(
        identity=identity,
        folder="/models",
        read_bytes=6 * MIB,
        memory_read=figure(20.0, "GB/s"),
        disk_direct=figure(None, "MB/s"),
        disk_buffered=figure(900.0, "MB/s"),
        host_to_device=figure(None, "GB/s"),
        compute_threads=figure(2.0, "threads"),
        expert_kernel=kernel_times(float32={1: 2.0, 2: 3.0, 8: 9.0}, bfloat16={1: 1.0, 32: 2.0}),
    )


def test_kernel_times_between_and_beyond_what_was_measured() -> None:
    times = kernel_times(float32={1: 2.0, 2: 3.0, 8: 9.0}, bfloat16={1: 3.0})
    for tokens, expected in ((1, 2.0), (0.5, 2.0), (1.5, 2.5), (2, 3.0), (5, 6.0), (16, 17.0)):
        assert times.estimate_ms("float32", tokens, 300) == pytest.approx(expected)
    assert times.estimate_ms("float32", 1, 3000) == pytest.approx(1.0 + 10.0)  # a call costs 1 ms anyway
    assert times.estimate_ms("float32", 1, 3) == pytest.approx(1.01)
    assert times.estimate_ms("bfloat16", 1, 300) is None
    assert times.estimate_ms("float16", 1, 300) is None


def test_the_way_of_reading_that_the_engine_takes_counts() -> None:
    both = replace(a_profile(), disk_direct=figure(400.0))
    assert (both.disk_read(direct=True).value, both.disk_read(direct=False).value) == (400.0, 900.0)
    assert a_profile().disk_read(direct=True).value == 900.0  # the engine falls back likewise


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile, "machine_identity", lambda: "this")
    return tmp_path / "cache" / "relume" / "machine.json"


def test_figures_are_kept_for_each_computer(cache: Path) -> None:
    assert profile.read_profile() == (None, None)
    other = replace(a_profile("other"), read_bytes=1)
    assert profile.save_profile(other) is None
    assert profile.load_profile() is None  # a home folder that came from elsewhere
    assert profile.save_profile(a_profile()) is None
    assert profile.load_profile() == a_profile()
    assert set(json.loads(cache.read_text())["machines"]) == {"this", "other"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 0, "machines": {}}',
        '{"version": 1}',
        '{"version": 1, "machines": {"this": {}}}',
        '{"version": 1, "machines": {"this": 3}}',
        json.dumps({"version": 1, "machines": {"this": asdict(a_profile()) | {"memory_read": {"value": "fast"}}}}),
        json.dumps({"version": 1, "machines": {"this": asdict(replace(a_profile(), memory_read=figure(-1.0)))}}),
    ],
)
def test_a_damaged_or_old_file_is_measured_again_with_one_note(
    cache: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    assert profile.load_profile() is None
    monkeypatch.setattr("relume.engine.measure.measure_machine", lambda *_: a_profile())
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert command.measured_profile(refresh=False, folder=None) == a_profile()
    assert capsys.readouterr().err.count("\n") == 1
    assert profile.load_profile() == a_profile()
    assert [path.name for path in cache.parent.iterdir()] == ["machine.json"]


def test_measuring_only_when_needed(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[Path] = []

    def measure(folder: Path, _progress: object) -> MachineProfile:
        measured.append(folder)
        return replace(a_profile(), folder=str(folder))

    monkeypatch.setattr("relume.engine.measure.measure_machine", measure)
    for refresh, folder, times in ((False, None, 1), (False, None, 1), (True, None, 2), (False, tmp_path, 3)):
        command.measured_profile(refresh, folder)
        assert len(measured) == times
    command.measured_profile(False, tmp_path)
    assert len(measured) == 3
    with pytest.raises(RelumeError, match="no such folder"):
        command.measured_profile(False, tmp_path / "absent")


def test_a_busy_machine_and_an_unwritable_cache_are_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("relume.engine.measure.measure_machine", lambda *_: a_profile())
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    assert command.measured_profile(refresh=True, folder=None) == a_profile()
    notes = capsys.readouterr().err.splitlines()
    assert any("busy" in line for line in notes)
    assert any("the figures are not kept" in line for line in notes)


def test_an_interrupted_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile.save_profile(a_profile())
    before = cache.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    remark = profile.save_profile(replace(a_profile(), read_bytes=1))
    assert remark is not None and "No space left" in remark
    assert cache.read_bytes() == before
    assert [path.name for path in cache.parent.iterdir()] == ["machine.json"]


def test_everything_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "memory_read", lambda: 12.3456)
    asked: list[tuple[int, int, int, str]] = []
    steps: list[tuple[int, int]] = []

    def kernel(*arguments: Any) -> Any:
        asked.append(arguments)
        return lambda: None

    def layer_seconds(num_threads: int) -> float:
        return 1.0 / num_threads

    found = profile.measure_profile(kernel, layer_seconds, tmp_path, 64, 32, 4, lambda *step: steps.append(step))
    assert found.compute_threads.value == effective_cores()
    assert found.memory_read.value == 12.35
    assert found.read_bytes == 3 * 64 * 32 * 2
    assert asked[1:] == [(64, 32, n, dtype) for dtype in ("float32", "bfloat16") for n in (1, 2, 4, 8, 16, 32)]
    assert steps == [(1, 18)] * 18
    assert MachineProfile.from_json(json.loads(json.dumps(asdict(found)))) == found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({1: 8, 2: 4, 4: 2, 6: 1}, 6), ({1: 1, 2: 2, 4: 4, 6: 9}, 1), ({1: 8, 2: 4, 4: 3.9, 6: 3.85}, 2)],
)
def test_the_number_of_threads_is_chosen_by_measurement(seconds: dict[int, float], best: int) -> None:
    assert profile.best_num_threads(seconds.__getitem__, 6) == best


def test_the_command_measures_once_and_then_shows(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        return subprocess.run(
            [RELUME, "machine", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            timeout=100,
        )

    document = json.loads(run("--json").stdout.splitlines()[-1])
    assert document["kind"] == "measured"
    for group in ("limits", "bandwidths"):
        for found in document[group].values():
            assert {"value", "unit", "measured_at"} <= set(found)
    assert document["bandwidths"]["memory_read"]["value"] > 0
    assert document["openmp"]["OMP_WAIT_POLICY"] == "PASSIVE"
    again = json.loads(run("--json").stdout)
    assert again["bandwidths"] == document["bandwidths"]
    table = run().stdout
    for text in ("memory read", "GB/s", "MB/s", "GiB", "32 tokens, bfloat16", "wait policy PASSIVE"):
        assert text in table
