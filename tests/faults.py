"""A disk that misbehaves on purpose, and what must hold of an engine whatever it does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relume import Engine, RelumeError

Read = Callable[[int, list[memoryview], int], int]


class Disk:
    """Stands between relume and `os.preadv`.

    Attributes:
        count: reads so far.
        fail_at: the number of the read that fails, with an I/O error.
        most: bytes that one read gives.
        delay_s: that a read takes longer.
        stuck: numbers of reads that do not end before `released` is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fail_at: int | None = None
        self.most: int | None = None
        self.delay_s = 0.0
        self.stuck: set[int] = set()
        self.released = threading.Event()
        self._lock = threading.Lock()
        self._real: Read = os.preadv
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            number, self.count = self.count, self.count + 1
        if number in self.stuck:
            assert self.released.wait(60)
        if number == self.fail_at:
            raise OSError(5, "Input/output error")
        time.sleep(self.delay_s)
        count = self._real(descriptor, buffers, offset)
        return count if self.most is None else min(count, self.most)


def check_memory(engine: Engine) -> None:
    """Slots and residents agree, and every slot holds the very bytes of its expert."""
    memory = engine._model.experts
    memory.check_integrity()
    scratch = torch.empty(memory.arena.format.slot_bytes, dtype=torch.uint8)
    expected = memory.arena.format.views(scratch)
    for (layer, expert), lease in memory.leases.items():
        memory.loader.source.read(layer, expert, expected)
        found = memory.arena.views(lease)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (layer, expert)


def check_error(error: RelumeError, folder: Path, reason: str = "") -> None:
    """One line that names a shard, a byte and the reason."""
    text = str(error)
    assert "\n" not in text
    assert any(f"{path}: " in text for path in folder.glob("*.safetensors")), text
    assert "byte" in text and reason in text, text


def relume_threads() -> set[threading.Thread]:
    """The threads that relume has started and not ended."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("relume-")}


def num_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (one of them is its own)


def options(reads: str = "direct", **more: Any) -> dict[str, Any]:
    """Of an engine that cannot hold its experts."""
    return {"dtype": "float32", "strategy": "lru", "expert_memory": "25%", "num_threads": 1, "reads": reads} | more
