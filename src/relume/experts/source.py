"""Where experts come from: a checkpoint on disk, in place, or a copy of some of them in host memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from relume.checkpoint.files import PAGE, AlignedBuffer, Files
from relume.checkpoint.folder import Checkpoint
from relume.checkpoint.tensor_file import TensorEntry
from relume.experts.formats import DenseFormat, Views

#: Tensors of one expert that lie at most this far apart are read together.
LARGEST_GAP = 1 << 16


class ExpertSource(ABC):
    """Reads experts into slots; safe to use from several threads."""

    @abstractmethod
    def read(self, layer: int, expert: int, views: Views) -> int:
        """Fill a slot's tensors; returns the bytes read from disk. `layer` counts MoE layers from 0.

        Raises:
            RelumeError: the bytes cannot be had; names file and offset.
        """

    def close(self) -> None:  # noqa: B027 (memory needs no closing)
        """Release what is open; reading opens it again."""


@dataclass(frozen=True)
class Run:
    """Neighbouring tensors of one file that are read at once; each with its index among gate, up and down."""

    path: Path
    offset: int
    num_bytes: int
    entries: tuple[tuple[int, TensorEntry], ...]


class CheckpointExperts(ExpertSource):
    """Experts of a checkpoint in the official layout, one by one or stacked.

    Args:
        checkpoint: the folder.
        prefixes: official name of each MoE layer's experts, up to `.experts`.
        num_experts: of a layer.
        expert_format: of the slots.
        direct: bypass the page cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefixes: Sequence[str],
        num_experts: int,
        expert_format: DenseFormat,
        direct: bool,
    ) -> None:
        self._format = expert_format
        self._files = Files(direct)
        self._runs = [
            [coalesce(checkpoint.expert(prefix, expert)) for expert in range(num_experts)] for prefix in prefixes
        ]
        longest = max((run.num_bytes for layer in self._runs for runs in layer for run in runs), default=0)
        #: Bytes that a thread stages a read in.
        self.staging_bytes = (longest // PAGE + 2) * PAGE
        self._staging = threading.local()

    def read(self, layer: int, expert: int, views: Views) -> int:
        """See `ExpertSource.read`."""
        parts = self._format.parts(views)
        num_bytes = 0
        for run in self._runs[layer][expert]:
            data = self._stage(run)
            for index, entry in run.entries:
                begin = entry.offset - run.offset
                _copy(data[begin : begin + entry.num_bytes], entry, parts[index])
            num_bytes += run.num_bytes
        return num_bytes

    def close(self) -> None:
        """Close the shards."""
        self._files.close()

    def _stage(self, run: Run) -> torch.Tensor:
        buffer: AlignedBuffer | None = getattr(self._staging, "buffer", None)
        if buffer is None:
            buffer = self._staging.buffer = AlignedBuffer(self.staging_bytes)
        what = ", ".join(entry.name for _, entry in run.entries)
        if self._files.direct:
            return torch.from_numpy(self._files.fill_direct(run.path, run.offset, run.num_bytes, buffer, what))
        data = buffer.bytes[: run.num_bytes]
        self._files.fill(run.path, run.offset, data.data, what)
        return torch.from_numpy(data)


def coalesce(entries: Sequence[TensorEntry]) -> list[Run]:
    """Group the tensors of one expert into as few reads as their places allow."""
    runs: list[Run] = []
    for index, entry in sorted(enumerate(entries), key=lambda pair: (pair[1].path, pair[1].offset)):
        end = entry.offset + entry.num_bytes
        if runs and runs[-1].path == entry.path:
            last = runs[-1]
            if entry.offset - (last.offset + last.num_bytes) <= LARGEST_GAP:
                merged = (*last.entries, (index, entry))
                runs[-1] = Run(last.path, last.offset, max(last.num_bytes, end - last.offset), merged)
                continue
        runs.append(Run(entry.path, entry.offset, entry.num_bytes, ((index, entry),)))
    return runs


def _copy(data: torch.Tensor, entry: TensorEntry, out: torch.Tensor) -> None:
    """Bytes to a tensor of any float type and device."""
    if data.storage_offset() % entry.dtype.itemsize:  # a header of odd length
        data = data.clone()
    out.copy_(data.view(entry.dtype).view(entry.shape))
