"""Memory that this process takes."""

from __future__ import annotations

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
