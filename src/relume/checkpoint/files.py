"""Open files by path, and reading byte ranges of them from several threads.

A read names the file and the byte where it failed, so that a user of 30 shards knows which one to fetch again.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from relume.core import RelumeError
from relume.machine.pages import PAGE, whole_pages

#: Called before each part of a read that may be kept waiting; see `Files.fill`.
Pause = Callable[[], None]
#: Part of a read that may be kept waiting.
_PART_BYTES = 1 << 20
#: Of an open file: what changes when it is written to, or replaced.
Signature = tuple[int, int, int]


class AlignedBuffer:
    """Page-aligned memory for direct reads; its bytes as a numpy array."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, max(PAGE, num_bytes))
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)


class Files:
    """Descriptors of the files that are read, one each; safe to use from several threads.

    Args:
        direct: bypass the page cache.
    """

    def __init__(self, direct: bool = False) -> None:
        self.direct = direct
        self._opened: dict[Path, tuple[int, Signature]] = {}
        self._lock = threading.Lock()

    def expect(self, path: Path, signature: Signature) -> None:
        """Open a file now; reads fail unless it still is the one that `signature` was taken of.

        Raises:
            RelumeError: it cannot be opened.
        """
        self._opened[path] = self._open(path), signature

    def fill(self, path: Path, offset: int, buffer: memoryview, what: str, pause: Pause | None = None) -> None:
        """Read `len(buffer)` bytes from `offset` on. `what` they are is named in errors.

        With `pause` they are read in parts, before each of which it is called; what it raises ends the read.

        Raises:
            RelumeError: the file ends early, cannot be read, or was changed since it was opened, or see `expect`.
        """
        self._read(path, offset, buffer, len(buffer), what, pause)

    def fill_direct(
        self,
        path: Path,
        offset: int,
        num_bytes: int,
        buffer: AlignedBuffer,
        what: str,
        pause: Pause | None = None,
    ) -> np.ndarray:
        """Read through `buffer`, which must hold the range widened to pages; returns the bytes asked for.

        Raises:
            RelumeError: as `fill`.
        """
        start = offset - offset % PAGE
        wide = whole_pages(offset + num_bytes - start)
        self._read(path, start, buffer.bytes[:wide].data, offset + num_bytes - start, what, pause)
        return buffer.bytes[offset - start : offset - start + num_bytes]

    def close(self) -> None:
        """Close all files; they are opened again when needed."""
        with self._lock:
            for descriptor, _ in self._opened.values():
                os.close(descriptor)
            self._opened.clear()

    def _read(
        self, path: Path, offset: int, buffer: memoryview, needed: int, what: str, pause: Pause | None
    ) -> None:
        """Fill at least `needed` bytes of `buffer`; direct reads may end in the middle of the last page."""
        descriptor = self._open(path)
        done = 0
        part = len(buffer)
        while done < needed:
            if pause is not None:
                part = _PART_BYTES
                pause()
            try:
                count = os.preadv(descriptor, [buffer[done : done + part]], offset + done)
            except OSError as error:
                raise RelumeError(
                    f"{path}: reading {what} at byte {offset + done} failed ({error.strerror}); if it stays so, "
                    "fetch this file again"
                ) from None
            end = done + count
            if self.direct and end < needed:
                end -= end % PAGE  # the next direct read must begin at a page
            if end == done:  # nothing came, or no page of a direct read: trying again would go on for ever
                raise RelumeError(
                    f"{path}: truncated: {what} ends early, at byte {offset + done + count} of the needed "
                    f"{offset + needed}; fetch this file again"
                )
            done = end
        if signature_of(descriptor) != self._opened[path][1]:
            raise RelumeError(f"{path}: changed while it was in use; load the model again")

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._opened:
                try:
                    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
                except OSError as error:
                    raise RelumeError(f"{path}: cannot be opened ({error.strerror})") from None
                self._opened[path] = descriptor, signature_of(descriptor)
            return self._opened[path][0]


def direct_read_problem(path: Path) -> str | None:
    """Why the file cannot be read past the page cache; `None` if it can."""
    files = Files(direct=True)
    try:
        files.fill_direct(path, 0, min(PAGE, path.stat().st_size), AlignedBuffer(PAGE), "the first page")
    except (OSError, RelumeError, AttributeError) as error:  # AttributeError: no O_DIRECT on this system
        return str(error)
    finally:
        files.close()
    return None


def signature_of(descriptor: int) -> Signature:
    """Of a file as it is now."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino
