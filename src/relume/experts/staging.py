"""Reading byte ranges of files through page-aligned memory, one piece of it for each thread."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from relume.checkpoint.files import AlignedBuffer, Files, Pause
from relume.machine.pages import PAGE


class StagedReads:
    """Reads up to `num_bytes` at once; safe to use from several threads.

    Args:
        files: how they are read; closed with this.
        num_bytes: of the longest read.

    Attributes:
        staging_bytes: that a thread stages a read in.
    """

    def __init__(self, files: Files, num_bytes: int) -> None:
        self._files = files
        self.staging_bytes = (num_bytes // PAGE + 2) * PAGE
        self._staging = threading.local()

    def read(self, path: Path, offset: int, num_bytes: int, what: str, pause: Pause | None = None) -> torch.Tensor:
        """`[num_bytes]` uint8, valid until this thread's next read. Pauses and raises as `Files.fill`."""
        buffer: AlignedBuffer | None = getattr(self._staging, "buffer", None)
        if buffer is None:
            buffer = self._staging.buffer = AlignedBuffer(self.staging_bytes)
        if self._files.direct:
            return torch.from_numpy(self._files.fill_direct(path, offset, num_bytes, buffer, what, pause))
        data = buffer.bytes[:num_bytes]
        self._files.fill(path, offset, data.data, what, pause)
        return torch.from_numpy(data)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._files.close()
