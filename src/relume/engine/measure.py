"""What `relume machine` measures of this computer: its bandwidths, and the expert kernel that the engine uses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from relume.core import Progress
from relume.engine.footprint import READER_THREADS
from relume.experts.kernels import swiglu
from relume.machine.bandwidth import median_seconds, working_bytes
from relume.machine.figures import MachineProfile
from relume.machine.profile import measure_profile
from relume.machine.workers import Workers, one_thread

#: Hidden and expert size of LLaDA2.0-mini: 6 MiB in bfloat16.
HIDDEN, EXPERT_SIZE = 2048, 512


def measure_machine(folder: Path, progress: Progress) -> MachineProfile:
    """Measure this computer, and the disk of `folder`; `progress` counts figures."""
    return measure_profile(expert_kernel, layer_seconds, folder, HIDDEN, EXPERT_SIZE, READER_THREADS, progress)


def layer_seconds(num_threads: int) -> float:
    """Seconds of a layer's experts, as many as are active, computed side by side by so many threads."""
    kernel = expert_kernel(HIDDEN, EXPERT_SIZE, 4, "bfloat16")
    workers = Workers(num_threads)
    try:
        with one_thread():
            return median_seconds(lambda: workers.run([kernel] * 32), 5)
    finally:
        workers.close()


def expert_kernel(hidden: int, expert_size: int, num_tokens: int, dtype: str) -> Callable[[], None]:
    """What computes one expert over `num_tokens` tokens, at each call another one, so that no cache holds it.

    Gathering its tokens and putting away its outputs are part of it.
    """
    kind: torch.dtype = getattr(torch, dtype)
    count = max(1, min(64, working_bytes() // (3 * hidden * expert_size * kind.itemsize)))
    gate_up = torch.full((count, 2 * expert_size, hidden), 0.01, dtype=kind)
    down = torch.full((count, hidden, expert_size), 0.01, dtype=kind)
    x = torch.ones(num_tokens, hidden, dtype=kind)
    rows = torch.arange(num_tokens)
    experts = cycle(zip(gate_up, down, strict=True))

    def run() -> None:
        gathered = x.index_select(0, rows)
        torch.empty(num_tokens, hidden).index_copy_(0, rows, swiglu(gathered, *next(experts)).float())

    return run
