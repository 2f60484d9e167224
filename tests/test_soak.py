"""Whatever is asked in whatever order, tokens are those of a model that is resident, and nothing leaks."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoints import LLADA22, make_tensors, write_checkpoint
from faults import Disk, check_error, check_memory, num_descriptors, relume_threads
from relume import DecodingConfig, Engine, GenerationResult, RelumeError, Request
from relume.strategy.strategies import STRATEGIES as ALL_STRATEGIES
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, write_model_profile

STRATEGIES = sorted(set(ALL_STRATEGIES) - {"belady"})
BUDGETS = [10, 25, 40, 60, 90]
MIB = 2**20


class Soak:
    """One engine after another, each asked at random."""

    def __init__(self, folder: Path, disk: Disk, seed: int) -> None:
        self.folder = write_checkpoint(folder / "model", LLADA22, make_tensors(LLADA22, 3), num_shards=2)
        self.disk = disk
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.others = relume_threads()
        # How a prompt is cut into forwards is no part of the promise: products of other sizes round differently.
        self.prefill_blocks = self.draw.choice([None, 1])
        self.reference = Engine.load(
            self.folder, dtype="float32", strategy="full", prefill_blocks=self.prefill_blocks
        )
        self.profile = folder / "profile.npz"
        with self.reference.record(folder / "trace"):
            self.reference.generate_batch([self.request() for _ in range(4)])
        reader = TraceReader(folder / "trace")
        write_model_profile(gather_profile(reader, reader.metadata.shape), self.profile)
        self.engine, self.budget = self.load()

    def load(self) -> tuple[Engine, int]:
        """A random engine, and the share of experts that it holds."""
        draw = self.draw
        strategy = draw.choice(STRATEGIES)
        budget = 100 if strategy == "full" else draw.choice(BUDGETS)
        more: dict[str, Any] = (
            {"profile": str(self.profile)} if ALL_STRATEGIES[strategy].retention == "static" else {}
        )
        engine = Engine.load(
            self.folder,
            dtype="float32",
            strategy=strategy,
            expert_memory=f"{budget}%",
            shared_pool=draw.random() < 0.3 and strategy != "full",
            reads=draw.choice(["direct", "buffered"]),
            num_threads=draw.choice([1, 2]),
            max_batch=draw.choice([1, 3, 8]),
            prefill_blocks=self.prefill_blocks,
            **more,
        )
        return engine, budget

    def request(self) -> Request:
        draw = self.draw
        return Request(
            input_ids=[draw.randrange(56) for _ in range(draw.choice([1, 3, 8, 17, 40]))],
            decoding=DecodingConfig.from_mapping(
                {
                    "decoder": draw.choice(["threshold", "joint", "indel"]),
                    "block_length": draw.choice([8, 16]),
                    "threshold": draw.choice([0.3, 0.9]),
                    "max_tokens": draw.choice([3, 12, 24]),
                    "temperature": draw.choice([0.0, 0.0, 1.0]),
                    "seed": draw.randrange(100),
                }
            ),
        )

    def step(self) -> None:
        """Do something, and check everything."""
        action = self.draw.choice(["batch", "batch", "cancel", "fault", "fault", "resize", "short", "replace"])
        getattr(self, action)()
        self.done[action] += 1
        assert len(relume_threads() - self.others) <= 2 * (
            4 + 1 + 2
        )  # of two engines: they read, one ahead, and compute
        check_memory(self.engine)

    def batch(self) -> None:
        requests = [self.request() for _ in range(self.draw.choice([1, 1, 2, 5]))]
        self.compare(self.engine.generate_batch(requests), requests)

    def compare(self, found: list[GenerationResult], requests: list[Request]) -> None:
        expected = self.reference.generate_batch(requests)
        assert [result.canvas for result in found] == [result.canvas for result in expected]
        assert [result.commits for result in found] == [result.commits for result in expected]

    def cancel(self) -> None:
        request = self.request()
        stream = self.engine.stream_request(request)
        for _ in itertools.islice(stream, self.draw.randrange(12)):
            pass
        if self.draw.random() < 0.3:
            return  # simply abandoned
        stream.cancel()
        for _ in stream:
            pass
        (whole,) = self.reference.generate_batch([request])
        part = stream.result.token_ids
        assert part == whole.token_ids[: len(part)]

    def fault(self) -> None:
        requests = [self.request() for _ in range(self.draw.choice([1, 3]))]
        self.disk.fail_at = self.disk.count + self.draw.randrange(60)
        try:
            found = self.engine.generate_batch(requests)
        except RelumeError as error:
            check_error(error, self.folder)
            self.done["failed"] += 1
        else:
            self.compare(found, requests)
        finally:
            self.disk.fail_at = None

    def short(self) -> None:
        self.disk.most = self.draw.choice([4096, 5000])
        self.batch()
        self.disk.most = None

    def resize(self) -> None:
        self.engine.resize_experts(f"{self.draw.choice([b for b in (*BUDGETS, 100) if b <= self.budget])}%")
        self.batch()

    def replace(self) -> None:
        """Another engine; now and then the first attempt to load it fails."""
        self.engine.close()
        if self.draw.random() < 0.3:
            self.disk.fail_at = self.disk.count + self.draw.randrange(60)
            with suppress(RelumeError):
                self.load()[0].close()
            self.disk.fail_at = None
        self.engine, self.budget = self.load()

    def close(self) -> None:
        self.engine.close()
        self.reference.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    threads, descriptors = relume_threads(), num_descriptors()
    soak = Soak(tmp_path, Disk(monkeypatch), seed)
    for _ in range(8):
        soak.step()
    soak.close()
    assert relume_threads() <= threads
    assert num_descriptors() == descriptors


def resident_bytes() -> int:
    """Of this process now, its memory without that of mapped files."""
    gc.collect()
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


@pytest.mark.slow
def test_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two minutes no slot, thread or open file is left behind, and memory stays within 16 MiB."""
    soak = Soak(tmp_path, Disk(monkeypatch), seed=int(time.time()))
    started = time.monotonic()
    held: list[int] = []
    before: tuple[int, int] | None = None
    while time.monotonic() < started + 600:
        soak.step()
        soak.replace()
        if time.monotonic() < started + 120:
            continue
        soak.engine.close()  # counted with the reference alone
        now = len(relume_threads() - soak.others), num_descriptors()
        before = before or now
        assert now == before
        held.append(resident_bytes())
        soak.engine, soak.budget = soak.load()
    soak.close()
    assert soak.done["failed"] > 100
    grown = max(held[-20:]) - max(held[:20])
    print(  # noqa: T201 (shown by -s)
        f"{dict(soak.done)}, {len(held)} samples, anonymous memory {held[0] / MIB:.1f} MiB after the warm-up, "
        f"{held[-1] / MIB:.1f} at the end, most {max(held) / MIB:.1f}; (threads, files) {before}",
        file=sys.stderr,
    )
    assert grown < 16 * MIB
