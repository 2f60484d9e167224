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


#: What plain `RuntimeError`s say: torch's CPU allocator, threading, and CUDA outside torch's allocator.
_OUT_OF_MEMORY = (
    "allocate memory",
    "can't start new thread",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in RAM or on a GPU."""
    if isinstance(error, PinError):
        return False
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in _OUT_OF_MEMORY)


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
    """Memory that cannot be pinned: no lack of device memory, whatever the driver calls it.

    Attributes:
        left_bytes: that may still be pinned, if the cap was the reason; else 0.
    """

    def __init__(self, text: str, left_bytes: int = 0) -> None:
        super().__init__(text)
        self.left_bytes = left_bytes


#: Bytes that this process has pinned, by address.
_pinned: dict[int, int] = {}


def pin(memory: torch.Tensor) -> None:
    """Pin host memory that is there and filled, `Limits.pin_cap_bytes` in all until `unpin`. Raises `PinError`."""
    cap = find_limits(with_gpus=False).pin_cap_bytes
    others = sum(_pinned.values())
    if memory.numel() > cap - others:
        text = f"at most half of RAM is pinned, {cap / 2**30:.1f} GiB, and these are {memory.numel() / 2**30:.1f}"
        text += f" besides {others / 2**30:.1f} that are pinned" if others else ""
        raise PinError(text, max(0, cap - others))
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise PinError(f"the driver refused to pin {memory.numel() / 2**30:.1f} GiB (code {int(code)})")
    _pinned[memory.data_ptr()] = memory.numel()


def unpin(memory: torch.Tensor) -> None:
    """Undo `pin`, before the memory is given back; nothing if it is not pinned."""
    if _pinned.pop(memory.data_ptr(), None) is not None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor in pinned memory, which torch keeps for the next one once its transfer has ended."""
    return tensor.pin_memory()
