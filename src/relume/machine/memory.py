"""Memory that this process takes."""

from __future__ import annotations

import contextlib
import mmap
import resource
import sys

import torch


def peak_rss_bytes() -> int:
    """The largest resident set that this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch's CPU allocator says so in a plain `RuntimeError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def allocate_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """`[num_bytes]` uint8, at the start of a page; on Linux in huge pages where the kernel gives them."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(1, num_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
