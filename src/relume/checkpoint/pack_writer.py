"""Writes the experts of a packed folder one by one; a later run goes on where this one ended."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from relume.checkpoint.copying import replace_file
from relume.checkpoint.pack import JOURNAL_FILE, PACK_FILE, Pack, read_pack
from relume.checkpoint.pack_journal import Journal, require_same, write_all
from relume.checkpoint.writer import refuse_existing, require_space, write_failure


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
        self._num_records = pack.num_layers * pack.num_experts
        self._other_bytes = other_bytes
        self._journal: Journal | None = None
        self._file: int | None = None
        self.finished = False
        self.num_kept = 0

    def __enter__(self) -> Self:
        try:
            with self.errors():
                if not self._is_there():
                    self._open()
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        if not (self.out / JOURNAL_FILE).exists():
            refuse_existing(self.out)
            parent = next(folder for folder in (self.out, *self.out.absolute().parents) if folder.exists())
            require_space(self.out, parent, self._pack.num_bytes + self._other_bytes)
            self.out.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self.out, self._pack)
        if self._is_there():  # another process has just finished
            return
        self.num_kept = len(self._journal.checksums)

    def _is_there(self) -> bool:
        """Whether the pack is complete."""
        if not (self.out / PACK_FILE).exists():
            return False
        found = read_pack(self.out)
        assert found is not None
        require_same(self.out, found, self._pack)
        found.check_files(self.out)
        (self.out / JOURNAL_FILE).unlink(missing_ok=True)  # the last run may have ended just before
        self.finished, self.num_kept = True, self._num_records
        return True

    def missing(self) -> Iterator[tuple[int, int]]:
        """Layer and expert of what is to be given to `append`, in this order."""
        for index in range(self.num_kept, self._num_records):
            yield divmod(index, self._pack.num_experts)

    def append(self, expert: memoryview) -> None:
        """Write the next expert, of `expert_bytes`."""
        assert self._journal is not None and len(expert) == self._pack.expert_bytes
        layer, index = divmod(len(self._journal.checksums), self._pack.num_experts)
        begin = index * self._pack.record_bytes
        with self.errors():
            if self._file is None:
                self._file = os.open(self.out / self._pack.files[layer], os.O_WRONLY | os.O_CREAT, 0o644)
                os.ftruncate(self._file, begin)
                os.lseek(self._file, begin, os.SEEK_SET)
            try:
                write_all(self._file, expert)
                write_all(self._file, memoryview(bytes(self._pack.record_bytes - self._pack.expert_bytes)))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, begin)  # no half of a record stays
                raise
            if index == self._pack.num_experts - 1:
                os.fsync(self._file)  # before anything of the next layer: see the journal
                os.close(self._file)
                self._file = None
            self._journal.append(zlib.crc32(expert))

    def finish(self) -> None:
        """Declare the folder complete."""
        assert self._journal is not None
        assert len(self._journal.checksums) == self._num_records, "experts are missing"
        with self.errors():
            complete = replace(self._journal.pack, checksums=tuple(self._journal.checksums))
            replace_file(self.out / PACK_FILE, json.dumps(complete.to_dict()).encode() + b"\n")
            self._journal.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        if self._journal is not None:
            self._journal.close()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Within it, an error of writing says what became of the folder."""
        try:
            yield
        except OSError as error:
            if_full = "what was packed is kept: make room, and the same command goes on from there"
            raise write_failure(self.out, error, if_full) from None
