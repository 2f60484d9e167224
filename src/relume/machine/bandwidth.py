"""How fast memory, disk, the link to a GPU and an expert are: medians of a few short repeats."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from relume.machine.limits import find_memory
from relume.machine.pages import whole_pages

_SECONDS = 1.0  # of one figure's repeats, unless two take longer
_SCRATCH_READS = 16


class NotMeasuredError(Exception):
    """A figure that this computer cannot give; the text is the reason."""


def working_bytes() -> int:
    """Memory to measure with: more than most processors' caches hold, little of what is free."""
    return min(256 * 2**20, find_memory().available_bytes // 8)


def median_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median duration of `run`, after one call that does not count."""
    run()
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < repeats and (len(taken) < 2 or time.perf_counter() - started < _SECONDS):
        before = time.perf_counter()
        run()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def memory_read() -> float:
    """GB/s at which all threads together read RAM."""
    import torch

    values = torch.ones(working_bytes() // 4)
    return values.nbytes / median_seconds(values.sum) / 1e9


def host_to_device() -> float:
    """GB/s from pinned RAM to the first GPU.

    Raises:
        NotMeasuredError: no GPU, or memory cannot be pinned.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotMeasuredError("no CUDA device")
    try:
        source = torch.empty(working_bytes(), dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise NotMeasuredError(f"memory cannot be pinned ({str(error).splitlines()[0]})") from None
    target = torch.empty_like(source, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return source.nbytes / median_seconds(copy) / 1e9


@contextmanager
def scratch_file(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file on the disk of `folder` that holds several reads of `num_bytes`; gone afterwards.

    Raises:
        NotMeasuredError: nothing can be written there.
    """
    content = random.Random(0).randbytes(whole_pages(num_bytes))  # no file system can compress it
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".relume-") as file:
            for _ in range(_SCRATCH_READS):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise NotMeasuredError(f"{folder}: cannot write there ({error.strerror})") from None


def disk_read(path: Path, num_bytes: int, direct: bool, num_threads: int) -> float:
    """MB/s of reads of `num_bytes` by so many threads, none of which finds its data in the page cache.

    Args:
        path: a `scratch_file` for that size.
        num_bytes: of one read, rounded up to whole pages.
        direct: around the page cache (O_DIRECT); else through it, after dropping it.
        num_threads: reads under way at once.

    Raises:
        NotMeasuredError: the system or the file system does not offer this way of reading.
    """
    if not hasattr(os, "O_DIRECT" if direct else "posix_fadvise"):
        raise NotMeasuredError("this system has no way to read around the page cache")
    size = whole_pages(num_bytes)
    try:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        raise NotMeasuredError(f"the file system refuses O_DIRECT ({error.strerror})") from None
    buffers = [mmap.mmap(-1, size) for _ in range(num_threads)]  # page-aligned
    # Backwards, so that reading ahead does not help: experts are not read in the order of the file either.
    offsets = range((_SCRATCH_READS - 1) * size, -1, -size)

    def read(thread: int) -> None:
        for offset in offsets[thread::num_threads]:
            done = 0
            while done < size:
                count = os.preadv(descriptor, [memoryview(buffers[thread])[done:]], offset + done)
                if count == 0:
                    raise OSError(0, "the file ended early")
                done += count

    def read_all() -> None:
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        list(threads.map(read, range(num_threads)))

    try:
        with ThreadPoolExecutor(num_threads) as threads:
            return len(offsets) * size / median_seconds(read_all) / 1e6
    except OSError as error:
        raise NotMeasuredError(f"reading failed ({error.strerror})") from None
    finally:
        os.close(descriptor)
