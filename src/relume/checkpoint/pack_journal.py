"""What is packed so far, so that a later run goes on where this one ended.

The journal's first line is the pack that is being made; each further line is the checksum of one record, written
after the record. Whoever comes back trusts the files of finished layers, for these were synchronised, and checks
the records of the layer that was not finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

from relume.checkpoint.pack import JOURNAL_FILE, Pack
from relume.core import RelumeError


class Journal:
    """The journal of a folder, locked for this process. Opening it forgets what is not whole.

    Args:
        folder: of the pack.
        pack: what is made, without checksums.

    Attributes:
        pack: what is made; its source as the first run called it.
        checksums: of the records that are there, in their order.

    Raises:
        RelumeError: another process packs here, or another pack was begun here.
        OSError: it cannot be read or written.
    """

    def __init__(self, folder: Path, pack: Pack) -> None:
        self._folder = folder
        self.pack = pack
        self.checksums: list[int] = []
        self._path = folder / JOURNAL_FILE
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except BlockingIOError:
            self.close()
            raise RelumeError(f"{folder}: another relume pack is writing it; wait for its end") from None
        except BaseException:
            self.close()
            raise

    def append(self, checksum: int) -> None:
        """Note a record that was written."""
        write_all(self._file, memoryview(f"{checksum}\n".encode()))
        self.checksums.append(checksum)

    def remove(self) -> None:
        """End: the pack is complete."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes in."""
        os.close(self._file)

    def _resume(self) -> None:
        first, *lines = self._path.read_bytes().splitlines(keepends=True) or [b""]
        if not first.endswith(b"\n"):  # killed while it was begun
            os.ftruncate(self._file, 0)
            write_all(self._file, memoryview(json.dumps(self.pack.to_dict()).encode() + b"\n"))
            return
        try:
            found = Pack.from_dict(json.loads(first))
        except ValueError:  # RelumeError is one
            raise RelumeError(f"{self._path}: is damaged; remove {self._folder} and pack again") from None
        require_same(self._folder, found, self.pack)
        self.pack = found
        self.checksums = _leading_checksums(lines)
        del self.checksums[self._whole_records() :]
        os.ftruncate(self._file, len(first) + sum(map(len, lines[: len(self.checksums)])))

    def _whole_records(self) -> int:
        """How many of the journal's records are in their files."""
        count, each = len(self.checksums), self.pack.num_experts
        for layer, name in enumerate(self.pack.files):
            first, path = layer * each, self._folder / name
            wanted = min(each, count - first)
            if wanted <= 0:
                break
            whole = min(wanted, path.stat().st_size // self.pack.record_bytes if path.exists() else 0)
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
                data = file.read(self.pack.record_bytes)[: self.pack.expert_bytes]
                if zlib.crc32(data) != self.checksums[first + index]:
                    return index
        return wanted


def require_same(folder: Path, found: Pack, wanted: Pack) -> None:
    """Raise `RelumeError` unless what was found in a folder is what is to be made, checksums and names aside."""
    if replace(found, checksums=(), source=wanted.source) == wanted:
        return
    groups = f" in groups of {found.group_size}" if found.group_size else ""
    raise RelumeError(
        f"{folder}: holds another pack, of {found.source} as {found.name}{groups} "
        f"(fingerprint {found.fingerprint[:8]}); remove it or choose another name"
    )


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`. Raises `OSError`."""
    while len(data):
        data = data[os.write(descriptor, data) :]


def _leading_checksums(lines: list[bytes]) -> list[int]:
    """The checksums of a journal up to the first line that is not whole."""
    found = []
    for line in lines:
        if not line.endswith(b"\n") or not line.strip().isdigit():
            break
        found.append(int(line))
    return found
