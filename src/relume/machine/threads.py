"""OpenMP settings, applied before torch starts its threads.

torch's thread pool busy-waits between operations. As soon as another process wants a core, two-thread
work slows down several times. A passive wait policy costs little on an idle machine and avoids that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def effective_cores() -> int:
    """Cores that this process may use: its CPU affinity, limited by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, quota)) if quota else cores


def configure_threads(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the wait policy and the thread count unless the user did; return what cannot take effect.

    OpenMP reads these when torch is imported, so a program that imports torch before relume gets a note.
    """
    wanted = dict(_DEFAULTS, OMP_NUM_THREADS=str(effective_cores()))
    missing = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(missing)
    if "torch" in sys.modules and "OMP_WAIT_POLICY" in missing:
        return ["torch was imported before relume: its threads busy-wait (import relume first)"]
    return []


def _cgroup_quota() -> int | None:
    """Whole cores of the CPU quota of cgroup v2 or v1, `None` without one."""
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            with open(quota_file) as file:  # noqa: PTH123 (runs before anything else is imported)
                fields = file.read().split()
            if period_file is not None:
                with open(period_file) as file:  # noqa: PTH123
                    fields += file.read().split()
            quota, period = fields[0], fields[1]
            if quota not in {"max", "-1"}:
                return max(1, round(int(quota) / int(period)))
        except (OSError, ValueError, IndexError):
            continue
    return None
