"""Memory that this process takes."""

from __future__ import annotations

import contextlib
import mmap
import resource
import sys

import torch

from relume.machine.limits import find_limits


def peak_rss_bytes() -> int:
    """The largest resident set that this process ever had, in bytes."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:  # noqa: PTH123
        # getrusage would count what the parent had when it started this process.
        for line in status:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch's CPU allocator and threading say so in plain `RuntimeError`s."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in ("allocate memory", "can't start new thread"))


def allocate_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """`[num_bytes]` uint8, at the start of a page; on Linux in huge pages where the kernel gives them."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if hasattr(mmap, "MAP_PRIVATE"):
        # Shared, which is the default, it would get no huge pages, and no limit on data would count it.
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, max(1, num_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


class PinError(RuntimeError):
    """Memory that cannot be pinned: no lack of device memory, whatever the driver calls it."""


def pin(memory: torch.Tensor) -> None:
    """Pin host memory that is there and filled, at most `Limits.pin_cap_bytes`. Raises `PinError`."""
    cap = find_limits(with_gpus=False).pin_cap_bytes
    if memory.numel() > cap:
        wanted = memory.numel() / 2**30
        raise PinError(f"at most half of RAM is pinned, {cap / 2**30:.1f} GiB, and these are {wanted:.1f}")
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise PinError(f"the driver refused to pin {memory.numel() / 2**30:.1f} GiB (code {int(code)})")
