"""Memory limits of the control groups that this process lies in, version 1 and 2."""

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
class _Version:
    name: str
    mount: str
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    inherited: str | None


# `memory.high` counts as a limit: beyond it the kernel slows the process down to a crawl.
_V2 = _Version(
    "cgroup v2",
    "sys/fs/cgroup",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    None,
)
# Inside a container the upper levels may be out of sight; `hierarchical_memory_limit` knows them.
_V1 = _Version(
    "cgroup v1",
    "sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "hierarchical_memory_limit",
)


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """Every level with a limit, from the process's own group up to the mount. Odd files count as no limit.

    Args:
        root: the directory that holds `proc` and `sys`.
    """
    found = []
    for version, mount, own in _own_groups(root):
        level = mount / own
        while True:
            found += _read_level(version, level, root)
            if level == mount:
                break
            level = level.parent
    return found


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


def _read_level(version: _Version, level: Path, root: Path) -> list[MemoryGroup]:
    statistics = read_fields(level / "memory.stat")
    limits = {name: _whole(read_text(level / name).strip()) for name in version.limits}
    if version.inherited is not None:
        limits[f"memory.stat ({version.inherited})"] = statistics.get(version.inherited)
    cache = sum(statistics.get(name, 0) for name in version.cache)
    used = max(0, (_whole(read_text(level / version.usage).strip()) or 0) - cache)
    shown = PurePosixPath("/") / level.relative_to(root)
    return [
        MemoryGroup(f"{version.name}, {shown}/{name}", limit, used)
        for name, limit in limits.items()
        if limit is not None and 0 < limit < _UNLIMITED
    ]


def _own_groups(root: Path) -> Iterator[tuple[_Version, Path, PurePosixPath]]:
    """Each version with its mount point and the process's own group below it."""
    mounts = _mounts(root)
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = _V1 if "memory" in controllers.split(",") else None if controllers else _V2
        if version is None or not path:
            continue
        mount_root, mount = mounts.get(version.name, ("/", version.mount))
        own = PurePosixPath(path)
        # A container may see its own group as the mount's root, or (`/../..`) a group outside of what is mounted.
        own = own.relative_to(mount_root) if own.is_relative_to(mount_root) else PurePosixPath()
        yield version, root / mount, PurePosixPath() if ".." in own.parts else own


def _mounts(root: Path) -> dict[str, tuple[str, str]]:
    """By version: which group is mounted, and where (relative to `root`)."""
    found: dict[str, tuple[str, str]] = {}
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        place, system = left.split(), right.split()
        if len(place) < 5 or len(system) < 3:
            continue
        is_v1 = system[0] == "cgroup" and "memory" in system[2].split(",")
        if is_v1 or system[0] == "cgroup2":
            version = _V1 if is_v1 else _V2
            found.setdefault(version.name, (place[3], place[4].lstrip("/")))
    return found
