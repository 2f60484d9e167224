"""Writes the experts of a packed folder one by one, so that a later run goes on where this one ended.

The journal's first line is the pack that is being made; each further line is the checksum of one record, written
after the record. Whoever comes back trusts the files of finished layers, for these were synchronised, and checks
the records of the layer that was not finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from relume.checkpoint.copying import replace_file
from relume.checkpoint.pack import JOURNAL_FILE, PACK_FILE, Pack, read_pack
from relume.checkpoint.writer import refuse_existing, require_space, write_failure
from relume.core import RelumeError


class PackWriter:
    """Makes or completes a packed folder; use it as a context manager.

    Args:
        out: the folder, which holds nothing or an unfinished pack of the same source in the same format.
        pack: what is made, without checksums.
        other_bytes: of what is written beside the experts, for the check of free space.

    Attributes:
        finished: all of it was there already.
        num_kept: experts that an earlier run has packed.

    Raises:
        RelumeError: on entering: `out` holds something else, another process writes it, or too little space is
            free; inside: the disk is full or fails. What was written stays.
    """

    def __init__(self, out: Path, pack: Pack, other_bytes: int) -> None:
        self.out = out
        self._pack = pack
        self._other_bytes = other_bytes
        self._journal: IO[bytes] | None = None
        self._file: int | None = None
        self._checksums: list[int] = []
        self.finished = False
        self.num_kept = 0

    def __enter__(self) -> Self:
        with self.errors():
            self._open()
        return self

    def _open(self) -> None:
        if self._is_there():
            self.finished = True
            self.num_kept = self._pack.num_layers * self._pack.num_experts
            return
        journal = self.out / JOURNAL_FILE
        if not journal.exists():
            refuse_existing(self.out)
            parent = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.exists())
            require_space(self.out, parent, self._pack.num_bytes + self._other_bytes)
            self.out.mkdir(parents=True, exist_ok=True)
        self._journal = journal.open("a+b", buffering=0)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RelumeError(f"{self.out}: another relume pack is writing it; wait for its end") from None
        self._resume(self._journal)
        missing = (self._pack.num_layers * self._pack.num_experts - self.num_kept) * self._pack.record_bytes
        require_space(self.out, self.out, missing)

    def _is_there(self) -> bool:
        if not (self.out / PACK_FILE).exists():
            return False
        found = read_pack(self.out)
        assert found is not None
        self._require_same(found)
        found.check_files(self.out)
        (self.out / JOURNAL_FILE).unlink(missing_ok=True)  # the last run may have ended just before
        return True

    def _require_same(self, found: Pack) -> None:
        if replace(found, checksums=(), source=self._pack.source) == self._pack:
            return
        groups = f" in groups of {found.group_size}" if found.group_size else ""
        raise RelumeError(
            f"{self.out}: holds another pack, of {found.source} as {found.name}{groups} "
            f"(fingerprint {found.fingerprint[:8]}); remove it or choose another name"
        )

    def _resume(self, journal: IO[bytes]) -> None:
        """Keep the records that are whole, forget everything behind them."""
        journal.seek(0)
        first, *lines = journal.read().splitlines(keepends=True) or [b""]
        if not first.endswith(b"\n"):  # killed while it was begun
            journal.truncate(0)
            journal.write(json.dumps(self._pack.to_dict()).encode() + b"\n")
            return
        try:
            found = Pack.from_dict(json.loads(first))
        except ValueError:  # RelumeError is one
            raise RelumeError(f"{self.out / JOURNAL_FILE}: is damaged; remove {self.out} and pack again") from None
        self._require_same(found)
        self._pack = found
        self._checksums = _leading_checksums(lines)
        del self._checksums[self._whole_records() :]
        self.num_kept = len(self._checksums)
        journal.truncate(len(first) + sum(map(len, lines[: self.num_kept])))

    def _whole_records(self) -> int:
        """How many of the journal's records are in their files."""
        count, each = len(self._checksums), self._pack.num_experts
        for layer, name in enumerate(self._pack.files):
            first, path = layer * each, self.out / name
            wanted = min(each, count - first)
            if wanted <= 0:
                break
            whole = min(wanted, path.stat().st_size // self._pack.record_bytes if path.exists() else 0)
            if first + wanted == count:  # the layer that was being written
                whole = self._matching(path, first, whole)
            if whole < wanted:
                return first + whole
        return count

    def _matching(self, path: Path, first: int, wanted: int) -> int:
        """How many records at the begin of a file have the checksums that the journal holds from `first` on."""
        if not wanted:
            return 0
        with path.open("rb") as file:
            for index in range(wanted):
                data = file.read(self._pack.record_bytes)[: self._pack.expert_bytes]
                if zlib.crc32(data) != self._checksums[first + index]:
                    return index
        return wanted

    def missing(self) -> Iterator[tuple[int, int]]:
        """Layer and expert of what is to be given to `append`, in this order."""
        each = self._pack.num_experts
        for index in range(self.num_kept, self._pack.num_layers * each):
            yield divmod(index, each)

    def append(self, expert: memoryview) -> None:
        """Write the next expert, of `expert_bytes`."""
        assert self._journal is not None and len(expert) == self._pack.expert_bytes
        layer, index = divmod(len(self._checksums), self._pack.num_experts)
        begin = index * self._pack.record_bytes
        checksum = zlib.crc32(expert)
        with self.errors():
            if self._file is None:
                self._file = os.open(self.out / self._pack.files[layer], os.O_WRONLY | os.O_CREAT, 0o644)
                os.ftruncate(self._file, begin)
                os.lseek(self._file, begin, os.SEEK_SET)
            try:
                _write(self._file, expert)
                _write(self._file, memoryview(bytes(self._pack.record_bytes - self._pack.expert_bytes)))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, begin)  # no half of a record stays
                raise
            if index == self._pack.num_experts - 1:
                self._close_file()
            _write(self._journal.fileno(), memoryview(f"{checksum}\n".encode()))
        self._checksums.append(checksum)

    def finish(self) -> None:
        """Declare the folder complete."""
        whole = self._pack.num_layers * self._pack.num_experts
        assert len(self._checksums) == whole, "experts are missing"
        with self.errors():
            self._pack = replace(self._pack, checksums=tuple(self._checksums))
            replace_file(self.out / PACK_FILE, json.dumps(self._pack.to_dict()).encode() + b"\n")
            (self.out / JOURNAL_FILE).unlink()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._journal is not None:
            self._journal.close()

    def _close_file(self) -> None:
        """Put the file of a finished layer on the disk for good."""
        assert self._file is not None
        os.fsync(self._file)
        os.close(self._file)
        self._file = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Within it, an error of writing says what became of the folder."""
        try:
            yield
        except OSError as error:
            if_full = "what was packed is kept: make room, and the same command goes on from there"
            raise write_failure(self.out, error, if_full) from None


def _leading_checksums(lines: list[bytes]) -> list[int]:
    """The checksums of a journal up to the first line that is not whole."""
    found = []
    for line in lines:
        if not line.endswith(b"\n") or not line.strip().isdigit():
            break
        found.append(int(line))
    return found


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
