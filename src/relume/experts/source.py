"""Where experts come from: a checkpoint on disk, in place, or a copy of some of them in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from relume.checkpoint.files import Files, Pause, direct_read_problem
from relume.checkpoint.folder import Checkpoint
from relume.checkpoint.tensor_file import TensorEntry
from relume.core import RelumeError
from relume.experts.formats import DenseFormat, Views
from relume.experts.staging import StagedReads

#: Tensors of one expert that lie at most this far apart are read together.
LARGEST_GAP = 1 << 16


class ExpertSource(ABC):
    """Reads experts into slots; safe to use from several threads.

    Attributes:
        fallbacks: what could not be had as asked, one line each.
    """

    def __init__(self) -> None:
        self.fallbacks: list[str] = []

    @abstractmethod
    def read(self, layer: int, expert: int, views: Views, pause: Pause | None = None) -> int:
        """Fill a slot's tensors; returns the bytes read from disk. `layer` counts MoE layers from 0.

        What `pause` is for says `Files.fill`.

        Raises:
            RelumeError: the bytes cannot be had; names file and offset.
        """

    def held(self, layer: int, expert: int) -> Views | None:
        """The expert's tensors where they lie in host memory, if they do."""
        del layer, expert
        return None

    def pinned(self, layer: int, expert: int) -> bool:
        """Whether a GPU can copy it from where it is held while nobody waits."""
        del layer, expert
        return False

    @property
    def holds_any(self) -> bool:
        """Whether `held` may find something."""
        return False

    @abstractmethod
    def place(self, layer: int, expert: int) -> str:
        """Where an expert is read from: the file and the byte, for messages."""

    def prepare(self, progress: Callable[[int], None]) -> None:  # noqa: B027 (most need none)
        """What has to be done once before the first read; `progress` is told of bytes read. Raises as `read`."""

    def close(self) -> None:  # noqa: B027 (memory needs no closing)
        """Release what is open; reading opens it again."""


@dataclass(frozen=True)
class Run:
    """Neighbouring tensors of one file that are read at once; each with its index among gate, up and down."""

    path: Path
    offset: int
    num_bytes: int
    entries: tuple[tuple[int, TensorEntry], ...]

    @property
    def names(self) -> str:
        """Of the tensors, for messages."""
        return ", ".join(entry.name for _, entry in self.entries)


class CheckpointExperts(ExpertSource):
    """Experts of a checkpoint in the official layout, one by one or stacked.

    Args:
        checkpoint: the folder.
        prefixes: official name of each MoE layer's experts, up to `.experts`.
        num_experts: of a layer.
        expert_format: of the slots.
        direct: bypass the page cache, where the file system allows it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefixes: Sequence[str],
        num_experts: int,
        expert_format: DenseFormat,
        direct: bool,
    ) -> None:
        super().__init__()
        self._format = expert_format
        files = open_files(checkpoint.expert(prefixes[0], 0)[0].path, direct, self.fallbacks)
        self._runs = [
            [coalesce(checkpoint.expert(prefix, expert)) for expert in range(num_experts)] for prefix in prefixes
        ]
        entries = [entry for layer in self._runs for runs in layer for run in runs for _, entry in run.entries]
        try:
            # Opened now, files that others replace stay readable, and are never taken for the others.
            for path, signature in {entry.path: entry.signature for entry in entries}.items():
                files.expect(path, signature)
        except RelumeError:
            files.close()
            raise
        longest = max((run.num_bytes for layer in self._runs for runs in layer for run in runs), default=0)
        self._reads = StagedReads(files, longest)
        self.staging_bytes = self._reads.staging_bytes

    def read(self, layer: int, expert: int, views: Views, pause: Pause | None = None) -> int:
        """See `ExpertSource.read`."""
        parts = self._format.parts(views)
        num_bytes = 0
        for run in self._runs[layer][expert]:
            data = self._reads.read(run.path, run.offset, run.num_bytes, run.names, pause)
            for index, entry in run.entries:
                begin = entry.offset - run.offset
                _copy(data[begin : begin + entry.num_bytes], entry, parts[index])
            num_bytes += run.num_bytes
        return num_bytes

    def place(self, layer: int, expert: int) -> str:
        """See `ExpertSource.place`."""
        run = self._runs[layer][expert][0]
        return f"{run.path}: {run.names} at byte {run.offset}"

    def close(self) -> None:
        """Close the shards."""
        self._reads.close()


def open_files(path: Path, direct: bool, fallbacks: list[str]) -> Files:
    """Files to read experts from, past the page cache if that is asked for and works for `path`.

    Otherwise it adds to `fallbacks`.
    """
    problem = direct_read_problem(path) if direct else None
    if problem is not None:
        fallbacks.append(f"experts are read through the page cache, because direct reads failed: {problem}")
    return Files(direct and problem is None)


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
