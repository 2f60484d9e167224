"""Copies parts of a checkpoint folder into another, a chunk in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from relume.checkpoint.files import Files
from relume.checkpoint.folder import INDEX_FILE
from relume.checkpoint.pack import PACK_FILE
from relume.checkpoint.tensor_file import DTYPES, TensorEntry

CHUNK_BYTES = 1 << 22
#: Endings of the small files of a checkpoint that are no weights: configuration, tokenizer, chat template.
_TEXT_ENDINGS = {".json", ".jinja", ".model", ".txt"}


def text_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that are neither tensors nor about where tensors are."""
    left_out = {INDEX_FILE, PACK_FILE}
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _TEXT_ENDINGS and path.name not in left_out and path.is_file()
    )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that there is at any time the old one or the new one."""
    fresh = path.with_name(f".{path.name}.partial")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def copy_tensors(entries: Sequence[TensorEntry], path: Path, advance: Callable[[int], None]) -> None:
    """Write a safetensors file with the very bytes of `entries`; it appears when it is complete.

    Args:
        entries: in the order in which they are written.
        path: of the file.
        advance: told of the bytes written since the last call.

    Raises:
        OSError: it cannot be written.
        RelumeError: a source cannot be read.
    """
    fresh = path.with_name(f".{path.name}.partial")
    files = Files()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    try:
        with fresh.open("wb") as file:
            file.write(_header(entries))
            for entry in entries:
                for begin in range(0, entry.num_bytes, CHUNK_BYTES):
                    chunk = buffer[: min(CHUNK_BYTES, entry.num_bytes - begin)]
                    files.fill(entry.path, entry.offset + begin, chunk, entry.name)
                    file.write(chunk)
                    advance(len(chunk))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        files.close()


def _header(entries: Sequence[TensorEntry]) -> bytes:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": names[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text
