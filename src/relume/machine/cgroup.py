"""Memory limits and CPU quotas of the control groups that this process lies in, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: A limit from here on is how version 1 spells "none".
_UNLIMITED = 2**60


@dataclass(frozen=True)
class MemoryGroup:
    """One level that limits memory.

    Attributes:
        source: what a user would look up: the version and the file.
        limit_bytes: the most that its processes may hold.
        used_bytes: what they hold, without the page cache that the kernel drops before it refuses anything.
    """

    source: str
    limit_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class _MemoryFiles:
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    inherited: str | None


_MEMORY = {
    # Inside a container the upper levels may be out of sight; `hierarchical_memory_limit` knows them.
    1: _MemoryFiles(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
        "hierarchical_memory_limit",
    ),
    # `memory.high` counts as a limit: beyond it the kernel slows the process down to a crawl.
    2: _MemoryFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"), None),
}
#: Files that hold a quota and its period, in microseconds.
_QUOTA = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Every level with a limit, from the process's own group up to the mount. Odd files count as no limit.

    Args:
        root: the directory that holds `proc` and `sys`.
    """
    return [group for version, level in _levels("memory", root) for group in _memory_limits(version, level, root)]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time by the tightest quota of all levels, `None` without one. Odd files count as none.

    Args:
        root: the directory that holds `proc` and `sys`.
    """
    quotas = []
    for version, level in _levels("cpu", root):
        fields = " ".join(read_text(level / name) for name in _QUOTA[version]).split()
        numbers = [_whole(field) for field in fields]
        if len(numbers) == 2 and numbers[0] and numbers[1]:  # else "max" or -1
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def read_text(path: Path) -> str:
    """The file's text, or an empty one if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):  # the latter for a path that cannot be one
        return ""


def read_fields(path: Path) -> dict[str, int]:
    """Whole numbers by name, from lines such as `inactive_file 4096` or `MemTotal: 16 kB` (then in bytes)."""
    fields = {}
    for line in read_text(path).splitlines():
        name, *values = line.replace(":", " ").split()[:3] or [""]
        value = _whole(values[0]) if values else None
        if value is not None:
            fields[name] = value * (1024 if values[1:] == ["kB"] else 1)
    return fields


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 20 else None


def _memory_limits(version: int, level: Path, root: Path) -> list[MemoryGroup]:
    files = _MEMORY[version]
    statistics = read_fields(level / "memory.stat")
    limits = {name: _whole(read_text(level / name).strip()) for name in files.limits}
    if files.inherited is not None:
        limits[f"memory.stat ({files.inherited})"] = statistics.get(files.inherited)
    cache = sum(statistics.get(name, 0) for name in files.cache)
    used = max(0, (_whole(read_text(level / files.usage).strip()) or 0) - cache)
    shown = PurePosixPath("/") / level.relative_to(root)
    return [
        MemoryGroup(f"cgroup v{version}, {shown}/{name}", limit, used)
        for name, limit in limits.items()
        if limit is not None and 0 < limit < _UNLIMITED
    ]


def _levels(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and directory of each level that may limit, from the process's own groups up to their mounts."""
    mounts = _mounts(controller, root)
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 1 if controller in controllers.split(",") else None if controllers else 2
        if version is None or not path:
            continue
        mount_root, mount = mounts[version]
        own = PurePosixPath(path)
        # A container may see its own group as the mount's root, or (`/../..`) a group outside of what is mounted.
        own = own.relative_to(mount_root) if own.is_relative_to(mount_root) else PurePosixPath()
        top = root / mount
        level = top if ".." in own.parts else top / own
        yield version, level
        while level != top:
            level = level.parent
            yield version, level


def _mounts(controller: str, root: Path) -> dict[int, tuple[str, str]]:
    """By version: which group is mounted, and where (relative to `root`)."""
    found: dict[int, tuple[str, str]] = {}
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place, system = left.split(), right.split()
        if len(place) < 5 or len(system) < 3:
            continue
        is_v1 = system[0] == "cgroup" and controller in system[2].split(",")
        if is_v1 or system[0] == "cgroup2":
            found.setdefault(1 if is_v1 else 2, (place[3], place[4].lstrip("/")))
    return {1: ("/", f"sys/fs/cgroup/{controller}"), 2: ("/", "sys/fs/cgroup")} | found
