"""Writes checkpoint folders in the official layout, one shard in memory at a time."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from relume.checkpoint.folder import CONFIG_FILE, INDEX_FILE
from relume.core import Progress, RelumeError

DEFAULT_SHARD_BYTES = 2**30
_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(specs: Sequence[TensorSpec], max_bytes: int = DEFAULT_SHARD_BYTES) -> list[list[TensorSpec]]:
    """Cut `specs`, in order, into shards of at most `max_bytes`; a larger tensor is a shard of its own."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


class CheckpointWriter:
    """Writes a new folder; use it as a context manager and give every declared tensor once, in order.

    The folder appears under its name when the block ends without an exception and is complete. Until then it
    is a hidden sibling, which an exception removes and a killed process leaves behind. The tensors of one shard
    are held, in a buffer that is used again for the next.

    Args:
        out: the folder to make; it may exist if it is empty.
        specs: all tensors, in the order in which they will come.
        config: content of config.json.
        files: further files by name: text as it is, mappings as JSON.
        max_shard_bytes: see `plan_shards`.
        progress: called with (bytes since the last call, bytes in all) as tensors come.

    Raises:
        RelumeError: on entering, if `out` holds something or cannot be made; while writing, if the disk is full
            or fails.
    """

    def __init__(
        self,
        out: Path,
        specs: Sequence[TensorSpec],
        config: Mapping[str, Any],
        files: Mapping[str, str | Mapping[str, Any]] | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        progress: Progress | None = None,
    ) -> None:
        assert len({spec.name for spec in specs}) == len(specs) > 0
        self._out = out
        self._partial = out.parent / f".{out.name}.partial-{os.getpid()}"
        self._shards = plan_shards(specs, max_shard_bytes)
        self._texts = {
            name: _as_text(content) for name, content in ({CONFIG_FILE: config} | dict(files or {})).items()
        }
        self._progress = progress or (lambda _added, _total: None)
        self._shard = 0
        self._held: dict[str, torch.Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.num_tensors = len(specs)
        self.num_bytes = sum(spec.num_bytes for spec in specs)

    def __enter__(self) -> Self:
        refuse_existing(self._out)
        with self._disk_errors():
            self._partial.mkdir(parents=True, exist_ok=False)
            self._check_space()
        largest = max(
            sum(-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in specs) for specs in self._shards
        )
        self._buffer = torch.empty(largest, dtype=torch.uint8)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the next tensor, which must have the declared shape and dtype."""
        out = self.reserve(name)
        assert (out.shape, out.dtype) == (tensor.shape, tensor.dtype), (
            f"{name}: {tensor.shape} {tensor.dtype} came"
        )
        out.copy_(tensor)

    def reserve(self, name: str) -> torch.Tensor:
        """The place of the next tensor, for the caller to fill before the next call."""
        if len(self._held) == len(self._shards[self._shard]):
            self._flush()
        assert self._shard < len(self._shards), f"{name} comes beyond what was declared"
        spec = self._shards[self._shard][len(self._held)]
        assert spec.name == name, f"{spec.name} should come next, not {name}"
        end = self._used + spec.num_bytes
        self._held[name] = self._buffer[self._used : end].view(spec.dtype).view(spec.shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._progress(spec.num_bytes, self.num_bytes)
        return self._held[name]

    def _flush(self) -> None:
        """Put the shard, whose tensors have all come, on the disk."""
        with self._disk_errors():
            path = self._partial / self._shard_name(self._shard)
            save_file(self._held, path, metadata={"format": "pt"})
            path.chmod(0o644)  # the library keeps shards to their owner, unlike all other files
        self._held, self._used = {}, 0
        self._shard += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                missing = self._shards[self._shard][len(self._held) :]
                assert not missing and self._shard == len(self._shards) - 1, f"{missing[:1]} never came"
                self._flush()
                self._finish()
        finally:
            self._held, self._buffer = {}, torch.empty(0)
            shutil.rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        weight_map = {
            spec.name: self._shard_name(shard) for shard, specs in enumerate(self._shards) for spec in specs
        }
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        refuse_existing(self._out)
        with self._disk_errors():
            for name, text in (self._texts | {INDEX_FILE: _as_text(index)}).items():
                (self._partial / name).write_text(text, encoding="utf-8")
            self._partial.rename(self._out)  # replaces an empty folder

    def _shard_name(self, shard: int) -> str:
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _check_space(self) -> None:
        try:
            require_space(self._out, self._partial, self.num_bytes)
        except RelumeError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            if_full = f"{self.num_bytes / 2**30:.2f} GiB are needed, nothing was kept"
            raise write_failure(self._out, error, if_full) from None


def write_failure(out: Path, error: Exception, if_full: str) -> RelumeError:
    """What a failed write below `out` means to the user; `if_full` says what to know when the disk is full."""
    if getattr(error, "errno", None) in {errno.ENOSPC, errno.EDQUOT} or "No space left" in str(error):
        return RelumeError(f"{out}: the disk is full; {if_full}")
    return RelumeError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error})")


def require_space(out: Path, folder: Path, num_bytes: int) -> None:
    """Raise `RelumeError`, about `out`, if fewer bytes are free on the disk of an existing `folder`."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise RelumeError(
            f"{out}: {num_bytes / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free; "
            "make room or choose another disk"
        )


def refuse_existing(out: Path) -> None:
    """Raise `RelumeError` unless `out` does not exist or is an empty folder."""
    try:
        if out.is_dir() and any(out.iterdir()):
            raise RelumeError(f"{out}: exists and is not empty; remove it or choose another name")
        if out.exists() and not out.is_dir():
            raise RelumeError(f"{out}: exists and is no folder; choose another name")
    except OSError as error:
        raise RelumeError(f"{out}: cannot be read ({error.strerror})") from None


def _as_text(content: str | Mapping[str, Any]) -> str:
    return content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
