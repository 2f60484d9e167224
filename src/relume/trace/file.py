"""The trace file: Parquet, one row a forward, written and read as a stream. docs/traces.md describes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from relume.core import RelumeError
from relume.trace.columns import SCHEMA, from_batch, to_batch
from relume.trace.metadata import TraceMetadata
from relume.trace.record import ForwardRecord

#: Forwards that a writer holds before it writes them, and that a reader has in memory at a time.
ROW_GROUP = 64


class TraceWriter:
    """Writes records one by one. The file appears under its name when the writer is closed, whole or not at all.

    As a context manager it closes, and after an error discards, what was written.

    Args:
        path: of the file; an existing one is replaced.
        metadata: of the trace.
        row_group: forwards to hold before they are written.

    Raises:
        RelumeError: the file cannot be written.
    """

    def __init__(self, path: Path, metadata: TraceMetadata, row_group: int = ROW_GROUP) -> None:
        self.path = path
        self._shape = metadata.shape
        self._part = path.with_name(path.name + ".part")
        self._schema = SCHEMA.with_metadata(metadata.encode())
        self._row_group = row_group
        self._held: list[ForwardRecord] = []
        if path.is_dir():
            raise RelumeError(f"{path}: the trace cannot be written, this is a folder: name a file")
        with _writing(path):
            self._writer = pq.ParquetWriter(self._part, self._schema, compression="zstd", write_page_checksum=True)

    def write(self, record: ForwardRecord) -> None:
        """Add a forward."""
        num_tokens = sum(len(span.token_ids) for span in record.spans)
        expected = (self._shape.num_layers, num_tokens, self._shape.top_k)
        assert record.expert_ids.shape == record.weights.shape == expected
        assert len(record.misses) == self._shape.num_layers
        self._held.append(record)
        if len(self._held) >= self._row_group:
            self._flush()

    def close(self) -> None:
        """Write what is held and give the file its name."""
        try:
            self._flush()
            with _writing(self.path):
                self._writer.close()
                self._part.replace(self.path)
        finally:
            self._part.unlink(missing_ok=True)

    def discard(self) -> None:
        """Leave no file."""
        with suppress(OSError, pa.ArrowException):  # what went wrong before is what matters
            self._writer.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _flush(self) -> None:
        if self._held:
            with _writing(self.path):
                self._writer.write_batch(to_batch(self._held, self._schema))
            self._held = []


class TraceReader:
    """The records of a file in order, as often as they are asked for; one row group is in memory at a time.

    Attributes:
        metadata: of the trace.
        num_forwards: records in the file.

    Raises:
        RelumeError: the file is missing, truncated, damaged, of another version, or no trace. Damage inside shows
            only when that place is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path), pq.ParquetFile(path) as file:
            schema, self.num_forwards = file.schema_arrow, file.metadata.num_rows
        self.metadata = TraceMetadata.decode(path, schema.metadata)
        if not schema.equals(SCHEMA):
            raise RelumeError(f"{path}: the trace's columns are not those of its version: record it again")

    def __iter__(self) -> Iterator[ForwardRecord]:
        with _reading(self.path), pq.ParquetFile(self.path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=ROW_GROUP):
                yield from from_batch(batch, self.metadata.shape.top_k)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RelumeError(f"{path}: the trace cannot be written ({_reason(error)})") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise RelumeError(f"{path}: no such trace; make one with `relume trace`") from None
    except (OSError, pa.ArrowException) as error:
        raise RelumeError(
            f"{path}: no trace, or one that is truncated or damaged ({_reason(error)}): record it again"
        ) from None


def _reason(error: OSError | pa.ArrowException) -> str:
    """Short: Arrow's own texts go on over several lines."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
