"""What this process may use: cores, memory, lockable memory, GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relume.machine.cgroup import memory_groups, read_fields
from relume.machine.threads import effective_cores

#: What a process holds that has imported relume and torch, at most.
OWN_BYTES = 300 * 2**20


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest of all limits on this process's memory. Swap does not count.

    Attributes:
        total_bytes: the smallest limit.
        available_bytes: what may still be taken, page cache counted as free.
        usable_bytes: what relume may hold in all: what is available, and what importing it has taken already.
        source: where the smallest limit stands.
    """

    total_bytes: int
    available_bytes: int
    usable_bytes: int
    source: str


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Limits:
    """What this process may use.

    Attributes:
        cores: its affinity and quota.
        memory: its RAM.
        lockable_bytes: RLIMIT_MEMLOCK, `None` for no limit. CUDA pins memory outside of it.
        pin_cap_bytes: the most that relume pins: half of RAM. Pinned pages cannot be dropped or moved, and
            WSL and WDDM refuse more.
        numa_nodes: `None` where the system tells nothing.
        gpus: empty without CUDA.
    """

    cores: int
    memory: MemoryLimit
    lockable_bytes: int | None
    pin_cap_bytes: int
    numa_nodes: int | None
    gpus: tuple[Gpu, ...]


#: Gives the soft limit of `RLIMIT_...` in bytes, `None` for no limit.
SoftLimit = Callable[[str], int | None]


def soft_limit(name: str) -> int | None:
    """The soft resource limit called `name` (`RLIMIT_AS`), `None` where there is none."""
    try:
        import resource

        value = resource.getrlimit(getattr(resource, name))[0]
    except (ImportError, AttributeError, OSError, ValueError):
        return None  # a system without resource limits
    return None if value == resource.RLIM_INFINITY else int(value)


def find_limits(root: Path = Path("/"), limit_of: SoftLimit = soft_limit, with_gpus: bool = True) -> Limits:
    """Read all limits; a file that is absent or odd counts as no limit.

    Args:
        root: the directory that holds `proc` and `sys`.
        limit_of: the process's resource limits.
        with_gpus: also ask CUDA, which imports torch.
    """
    memory = find_memory(root, limit_of)
    return Limits(
        cores=effective_cores(),
        memory=memory,
        lockable_bytes=limit_of("RLIMIT_MEMLOCK"),
        pin_cap_bytes=memory.total_bytes // 2,
        numa_nodes=count_numa_nodes(root),
        gpus=find_gpus() if with_gpus else (),
    )


def find_memory(root: Path = Path("/"), limit_of: SoftLimit = soft_limit) -> MemoryLimit:
    """The tightest of RAM, control groups, and the address space and data limits of the process."""
    machine = read_fields(root / "proc/meminfo")
    own = read_fields(root / "proc/self/status")
    total = machine.get("MemTotal") or _physical_bytes()
    found = [("RAM", total, machine.get("MemAvailable", total))]
    found += [
        (group.source, group.limit_bytes, group.limit_bytes - group.used_bytes) for group in memory_groups(root)
    ]
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = limit_of(name)
        if limit is not None:
            found.append((name, limit, limit - own.get(used, 0)))
    source, smallest, _ = min(found, key=lambda entry: entry[1])
    available = max(0, min(smallest, *(free for _, _, free in found)))
    # File pages of the process (torch's libraries) are page cache, and were counted as available above. What else
    # it holds is counted by a plan, but no more than a process takes by itself: the rest is somebody else's.
    usable = min(smallest, available + min(own.get("RssAnon", 0), OWN_BYTES))
    return MemoryLimit(smallest, available, usable, source)


def count_numa_nodes(root: Path = Path("/")) -> int | None:
    """NUMA nodes that the system names, `None` if it names none."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    try:
        return sum(1 for _ in nodes) or None
    except OSError:
        return None


def find_gpus() -> tuple[Gpu, ...]:
    """All CUDA devices that answer; imports torch."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(index)
            found.append(Gpu(torch.cuda.get_device_name(index), free, total))
        except RuntimeError:  # busy in exclusive mode, or lost: as good as absent
            continue
    return tuple(found)


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30  # a system that tells nothing at all: assume a small computer
