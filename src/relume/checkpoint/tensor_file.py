"""Where tensors lie inside safetensors files, and reading them without a second copy.

The format: 8 bytes little-endian header length, a JSON header, the data. relume reads byte ranges itself
because it needs single experts in place, and the file and offset of a failed read; writing uses the
safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from relume.checkpoint.files import Files, Signature, signature_of
from relume.core import RelumeError

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file, which `signature` tells from others and from itself after a change.

    `offset` counts bytes from the start of the file.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    signature: Signature

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def row(self, index: int) -> TensorEntry:
        """The sub-tensor at `index` of the first dimension."""
        offset = self.offset + index * (self.num_bytes // self.shape[0])
        return replace(self, name=f"{self.name}[{index}]", shape=self.shape[1:], offset=offset)


def read_header(path: Path, names: Container[str] | None = None) -> dict[str, TensorEntry]:
    """Entries of one safetensors file, all or those in `names`.

    Raises:
        RelumeError: the file is missing, unreadable, no safetensors file, or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            signature = signature_of(file.fileno())
            size = signature[0]
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise RelumeError(
                    f"{path}: no complete safetensors header in its {size} bytes; fetch this file again"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise RelumeError(f"{path}: this shard is missing; fetch it again") from None
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        if isinstance(error, RelumeError):
            raise
        raise RelumeError(f"{path}: its safetensors header is damaged; fetch this file again") from None
    if not isinstance(header, dict):
        raise RelumeError(f"{path}: its safetensors header is damaged; fetch this file again")
    entries = {}
    for name, info in header.items():
        if name == "__metadata__" or (names is not None and name not in names):
            continue
        entries[name] = entry = _entry(path, name, info, 8 + length, signature)
        end = entry.offset + entry.num_bytes
        if end > size:
            raise RelumeError(
                f"{path}: truncated: {name} needs the bytes {entry.offset}..{end} but the file ends at {size}; "
                "fetch this file again"
            )
    return entries


def _entry(path: Path, name: str, info: dict[str, object], base: int, signature: Signature) -> TensorEntry:
    try:
        dtype, shape, offsets = str(info["dtype"]), info["shape"], info["data_offsets"]
        begin, end = (int(offset) for offset in offsets)  # type: ignore[attr-defined]
        shape = tuple(int(size) for size in shape)  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError):
        raise RelumeError(f"{path}: its header describes {name} wrongly; fetch this file again") from None
    if dtype not in DTYPES:
        raise RelumeError(f"{path}: {name} has the type {dtype}; relume reads {', '.join(DTYPES)}")
    entry = TensorEntry(name, path, DTYPES[dtype], shape, base + begin, signature)
    if end - begin != entry.num_bytes:
        raise RelumeError(
            f"{path}: {name} of shape {list(shape)} needs {entry.num_bytes} bytes; its header gives {end - begin}"
        )
    return entry


class TensorReader:
    """Reads entries into tensors that the caller owns, through one file descriptor per file."""

    def __init__(self) -> None:
        self._files = Files()

    def read(self, entry: TensorEntry, out: torch.Tensor) -> None:
        """Fill `out` (contiguous, any device and float type) with the tensor of `entry`.

        Beyond `out`, at most the tensor's own bytes are held, and only if type or device differ.

        Raises:
            RelumeError: the file ended early or could not be read (names file and offset), or is no longer the one
                that `entry` was found in.
        """
        if tuple(out.shape) != entry.shape:
            raise RelumeError(f"{entry.name} has the shape {list(entry.shape)}; {list(out.shape)} was expected")
        self._files.expect(entry.path, entry.signature)
        direct = out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out if direct else torch.empty(entry.shape, dtype=entry.dtype)
        if target.numel():
            buffer = target.reshape(-1).view(torch.uint8).numpy().data
            self._files.fill(entry.path, entry.offset, buffer, entry.name)
        if not direct:
            out.copy_(target)

    def close(self) -> None:
        """Close all files; the reader can go on to be used."""
        self._files.close()
