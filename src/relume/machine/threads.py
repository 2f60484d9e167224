"""OpenMP settings, applied before torch starts its threads.

torch's thread pool busy-waits between operations. As soon as another process wants a core, two-thread
work slows down several times. A passive wait policy costs little on an idle machine and avoids that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from relume.machine.cgroup import cpu_quota  # the standard library alone, as everything here

_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def effective_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its CPU affinity, limited by its control groups' quota.

    Args:
        root: the directory that holds `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, round(quota)))


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


def numpy_on_one_thread(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep numpy's matrix products on the thread that asks for them, unless the user set something else.

    Two processes that simulate, each with OpenBLAS's threads for small products, wait for each other most of the
    time: one such run took 133 s instead of 26 s. It must come before numpy is imported; torch is not concerned.
    """
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
