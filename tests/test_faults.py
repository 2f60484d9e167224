"""Whatever fails, and wherever: one clear line, never a wrong token, and the next request is served as ever."""

from __future__ import annotations

import itertools
import linecache
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import LLADA2, make_tensors, write_checkpoint
from faults import Disk, check_error, check_memory, num_descriptors, options, relume_threads
from relume import DecodingConfig, Engine, RelumeError, Request
from relume.config import EngineConfig
from relume.experts import executor, loader
from relume.experts.formats import DenseFormat, Views

READS = ["direct", "buffered"]
REQUESTS = [
    Request(input_ids=[3 * i + j for j in range(5 + 3 * i)], decoding=DecodingConfig(max_tokens=8, block_length=8))
    for i in range(3)
]
SHORT = Request(input_ids=[7, 8, 9], decoding=DecodingConfig(max_tokens=5, block_length=8, threshold=0.2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    return write_checkpoint(path, LLADA2, make_tensors(LLADA2), num_shards=2)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder whose files may be harmed."""
    return write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2), num_shards=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of `REQUESTS` and `SHORT` with every expert resident and no fault."""
    with Engine.load(folder, dtype="float32", strategy="full") as engine:
        return [result.canvas for result in engine.generate_batch([*REQUESTS, SHORT])]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.released.set()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    threads, descriptors = relume_threads(), num_descriptors()
    yield
    assert relume_threads() <= threads
    assert num_descriptors() == descriptors


def run(engine: Engine, request: Request) -> tuple[int, ...]:
    (result,) = engine.generate_batch([request])
    return result.canvas


def check_alive(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    """Memory is in order, and the next request gets its tokens."""
    check_memory(engine)
    assert run(engine, SHORT) == expected[-1]
    check_memory(engine)


@pytest.mark.parametrize(
    ("reads", "strategy", "stride"),
    [("direct", "lru", 1), ("buffered", "lru", 3), ("direct", "counts", 5), ("direct", "least-stale", 5)],
)
def test_any_read_of_a_request_may_fail(
    folder: Path, expected: list[tuple[int, ...]], disk: Disk, reads: str, strategy: str, stride: int
) -> None:
    with Engine.load(folder, **options(reads, strategy=strategy)) as engine:
        for number in itertools.count(0, stride):
            disk.fail_at = disk.count + number
            try:
                tokens = run(engine, SHORT)
            except RelumeError as error:
                check_error(error, folder, "Input/output error")
            else:
                assert tokens == expected[-1]
                break
            disk.fail_at = None
            check_alive(engine, expected)
        assert number > 20


@pytest.mark.parametrize("reads", READS)
def test_a_failed_read_ends_a_batch_and_nothing_else(
    folder: Path, expected: list[tuple[int, ...]], disk: Disk, reads: str
) -> None:
    with Engine.load(folder, **options(reads, max_batch=2, num_threads=2)) as engine:
        engine.generate_batch(REQUESTS)
        before = disk.count
        engine.generate_batch(REQUESTS)
        for number in range(0, (disk.count - before) * 3 // 4, 67):
            disk.fail_at = disk.count + number
            with pytest.raises(RelumeError, match="Input/output error") as caught:
                engine.generate_batch(REQUESTS)
            check_error(caught.value, folder)
            disk.fail_at = None
            check_alive(engine, expected)
        assert [result.canvas for result in engine.generate_batch(REQUESTS)] == expected[:-1]


@pytest.mark.parametrize("strategy", ["full", "lru"])
@pytest.mark.parametrize("reads", READS)
def test_any_read_of_loading_may_fail(folder: Path, disk: Disk, reads: str, strategy: str) -> None:
    """Of dense weights, and of the experts that `full` loads at once."""
    wanted = options(reads, strategy=strategy, expert_memory="auto" if strategy == "full" else "25%")
    for number in itertools.count():
        threads, descriptors = relume_threads(), num_descriptors()
        disk.count, disk.fail_at = 0, number
        try:
            Engine.load(folder, **wanted).close()
        except RelumeError as error:
            if "page cache" not in str(error):
                check_error(error, folder)
        else:
            if number >= disk.count:
                break
            assert reads == "direct"  # the trial of direct reads failed, and they are not used
        assert relume_threads() <= threads
        assert num_descriptors() == descriptors
    assert number > (60 if strategy == "full" else 30)


def test_one_slot_of_each_layer_is_enough(folder: Path, expected: list[tuple[int, ...]]) -> None:
    """Fewer than the three experts of one token."""
    with Engine.load(folder, **options(expert_memory="1", max_batch=4)) as engine:
        assert [result.canvas for result in engine.generate_batch([*REQUESTS, SHORT])] == expected
        assert engine._model.experts.pool.slots == [1, 1]
        check_memory(engine)


def test_a_stream_that_failed_does_not_go_on(folder: Path, expected: list[tuple[int, ...]], disk: Disk) -> None:
    with Engine.load(folder, **options()) as engine:
        disk.fail_at = disk.count + 12
        stream = engine.stream_request(REQUESTS[0])
        with pytest.raises(RelumeError, match="Input/output error"):
            list(stream)
        with pytest.raises(RelumeError, match="start the request again, or cancel it"):
            next(stream)
        stream.cancel()
        assert list(stream) == []
        assert stream.result.finish_reason == "cancelled"
        check_alive(engine, expected)


@pytest.mark.parametrize(
    ("reads", "most"),
    [
        ("buffered", 100),
        ("buffered", 4096),
        ("direct", 4096),
        ("direct", 4097),
        ("direct", 5000),
        ("direct", 8191),
    ],
)
def test_short_reads_are_continued(
    folder: Path, expected: list[tuple[int, ...]], disk: Disk, reads: str, most: int
) -> None:
    disk.most = most
    with Engine.load(folder, **options(reads)) as engine:
        assert [run(engine, request) for request in (*REQUESTS, SHORT)] == expected
        disk.most = None
        check_memory(engine)


def test_direct_reads_of_less_than_a_page_end(folder: Path, expected: list[tuple[int, ...]], disk: Disk) -> None:
    """There is no way to go on from the middle of a page: it must not be tried for ever."""
    with Engine.load(folder, **options()) as engine:
        disk.most = 1000
        with pytest.raises(RelumeError, match="ends early") as caught:
            run(engine, SHORT)
        check_error(caught.value, folder)
        disk.most = None
        check_alive(engine, expected)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.61])
def test_a_file_that_is_truncated_while_in_use(
    own: Path, expected: list[tuple[int, ...]], reads: str, kept: float
) -> None:
    with Engine.load(own, **options(reads)) as engine:
        assert run(engine, SHORT) == expected[-1]
        for shard in own.glob("*.safetensors"):
            os.truncate(shard, int(shard.stat().st_size * kept) | 1)
        for request in REQUESTS:
            with pytest.raises(RelumeError, match=r"truncated: .* ends early|changed while it was") as caught:
                run(engine, request)
            assert "\n" not in str(caught.value) and ".safetensors: " in str(caught.value)
            if kept == 0.0:
                check_error(caught.value, own)
            engine._model.experts.check_integrity()


@pytest.mark.parametrize("reads", READS)
def test_a_slow_disk_changes_only_the_time(
    folder: Path, expected: list[tuple[int, ...]], disk: Disk, reads: str
) -> None:
    with Engine.load(folder, **options(reads)) as engine:
        quick = engine.generate_batch(REQUESTS)
        disk.delay_s = 0.004
        slow = engine.generate_batch(REQUESTS)
        assert [result.canvas for result in slow] == [result.canvas for result in quick] == expected[:-1]
        waits = max(result.statistics.num_iterations for result in slow)  # each with a miss in one layer at least
        assert sum(result.statistics.bytes_from_disk for result in slow) > 0
        assert max(result.statistics.stall_s for result in slow) > waits * disk.delay_s / 2


@pytest.mark.parametrize("reads", READS)
def test_files_that_others_replace_stay_in_use(own: Path, expected: list[tuple[int, ...]], reads: str) -> None:
    """Even those of which nothing had been read: `lru` starts with no expert at all."""
    with Engine.load(own, **options(reads)) as engine:
        for shard in own.glob("*.safetensors"):
            other = {name: torch.zeros_like(tensor) for name, tensor in load_file(shard).items()}
            save_file(other, own / "fresh")
            (own / "fresh").replace(shard)
        assert [run(engine, request) for request in (*REQUESTS, SHORT)] == expected
        check_memory(engine)


def test_files_that_change_between_their_headers_and_their_data_are_refused(own: Path) -> None:
    for change in (replace_shards, overwrite_shards):
        engine = Engine.open(own, EngineConfig(dtype="float32", strategy="lru", expert_memory="25%"))
        change(own)
        with pytest.raises(RelumeError, match=r"safetensors: changed while it was in use; load the model again"):
            engine.read_weights()


def replace_shards(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        (folder / "fresh").write_bytes(shard.read_bytes())
        (folder / "fresh").replace(shard)


def overwrite_shards(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        content[-4096:] = bytes(4096)
        with shard.open("r+b") as file:
            file.write(content)


@pytest.mark.parametrize("reads", READS)
def test_a_file_that_is_overwritten_is_an_error(own: Path, expected: list[tuple[int, ...]], reads: str) -> None:
    with Engine.load(own, **options(reads)) as engine:
        assert run(engine, SHORT) == expected[-1]
        overwrite_shards(own)
        for request in (*REQUESTS, SHORT):
            with pytest.raises(RelumeError, match=r"safetensors: changed while it was in use") as caught:
                run(engine, request)
            assert "\n" not in str(caught.value)
            engine._model.experts.check_integrity()


@pytest.mark.parametrize("refused", ["open", "read"])
def test_a_file_system_without_direct_reads_is_said_aloud(
    folder: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    real_open, real_read = os.open, os.preadv
    direct: set[int] = set()

    def refuse_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(22, "Invalid argument")
        descriptor = real_open(path, flags, *rest, **named)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def refuse_read(descriptor: int, *rest: Any) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return real_read(descriptor, *rest)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "preadv", refuse_read)
    with Engine.load(folder, **options("auto")) as engine:
        (line,) = engine.fallbacks
        assert "read through the page cache, because direct reads failed" in line and "Invalid argument" in line
        assert "\n" not in line
        results = engine.generate_batch([*REQUESTS, SHORT])
        assert [result.canvas for result in results] == expected
        assert all(result.statistics.fallbacks == (line,) for result in results)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_exception_in_an_expert_kernel(
    folder: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(executor, "SMALLEST_SHARED_BYTES", 0)  # so that workers compute, if there are any
    real = DenseFormat.compute
    calls = itertools.count()
    fail_at = -1

    def compute(self: DenseFormat, x: torch.Tensor, views: Views) -> torch.Tensor:
        if next(calls) == fail_at:
            raise RuntimeError("the kernel broke")
        return real(self, x, views)

    monkeypatch.setattr(DenseFormat, "compute", compute)
    with Engine.load(folder, **options(num_threads=num_threads)) as engine:
        run(engine, SHORT)
        for number in range(0, next(calls), 5):
            fail_at = next(calls) + 1 + number
            with pytest.raises(RuntimeError, match="the kernel broke"):
                run(engine, SHORT)
            check_alive(engine, expected)


def test_memory_that_runs_out_in_a_forward_is_one_line(
    folder: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(folder, **options()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DenseFormat, "compute", lambda *_: torch.empty(2**60, dtype=torch.uint8))
            with pytest.raises(RelumeError, match=r"memory ran out in a forward of .* --expert-memory") as caught:
                run(engine, SHORT)
        assert "\n" not in str(caught.value)
        check_alive(engine, expected)


Place = tuple[str, int]


@contextmanager
def traced(take: Callable[[Place], None]) -> Iterator[None]:
    """Within, `take` is called before each line that this thread runs in the rooms that keep experts."""

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            take((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, _event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        return line if "/relume/experts/" in path or path.endswith("/strategy/pool.py") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


class Interrupt:
    """Raises `KeyboardInterrupt` the n-th time that a line is about to run."""

    def __init__(self, place: Place, number: int) -> None:
        self._place, self._left = place, number

    def __call__(self, place: Place) -> None:
        if place == self._place:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("fails", [False, True], ids=["in a forward", "while cleaning up"])
def test_an_interrupt_may_come_at_any_line(folder: Path, disk: Disk, fails: bool) -> None:
    draw = random.Random(3)
    ids = range(4)
    with Engine.load(folder, dtype="float32", strategy="full") as engine:
        expected = engine.logits(ids)
    with Engine.load(folder, **options("buffered")) as engine:
        seen: Counter[Place] = Counter()
        disk.fail_at = disk.count + 9 if fails else None
        with traced(lambda place: seen.update((place,))), suppress(RelumeError):
            engine.logits(ids)
        assert len(seen) > 60
        interrupted = 0
        for place, times in seen.items():
            if "with self._lock" in linecache.getline(*place):
                continue  # the line counts when the lock is released, too, and that cannot be interrupted
            disk.fail_at = disk.count + 9 if fails else None
            try:
                with traced(Interrupt(place, times if fails else draw.randint(1, times))):
                    assert torch.equal(engine.logits(ids), expected)
            except KeyboardInterrupt:
                interrupted += 1
            except RelumeError as error:
                check_error(error, folder)
            disk.fail_at = None
            assert torch.equal(engine.logits(ids), expected), place  # makes up for cleaning that was interrupted
            check_memory(engine)
        assert interrupted > len(seen) / 2


def test_a_read_that_never_ends_is_named(folder: Path, expected: list[tuple[int, ...]], disk: Disk) -> None:
    """One reader hangs: the request fails, the others serve the next one, and what was withheld comes back."""
    with Engine.load(folder, **options()) as engine:
        memory = engine._model.experts
        memory.loader.patience_s = 0.3
        free = memory.arena.num_free
        disk.stuck = {disk.count + 5}
        with pytest.raises(RelumeError, match=r"no read has ended for 0.3 s, and this is the oldest") as caught:
            run(engine, SHORT)
        check_error(caught.value, folder)
        assert "network file system" in str(caught.value)
        check_alive(engine, expected)
        assert memory.arena.num_free + len(memory.leases) == free - 1
        disk.released.set()
        memory.loader.halt()
        check_alive(engine, expected)
        assert memory.arena.num_free + len(memory.leases) == free


def test_all_reads_that_never_end(folder: Path, expected: list[tuple[int, ...]], disk: Disk) -> None:
    with Engine.load(folder, **options()) as engine:
        memory = engine._model.experts
        memory.loader.patience_s = 0.1
        disk.stuck = set(range(disk.count, disk.count + memory.loader.num_threads))
        for _ in range(3):
            with pytest.raises(RelumeError, match=r"no read has ended for 0.1 s") as caught:
                run(engine, SHORT)
            check_error(caught.value, folder)
            memory.check_integrity()
        disk.released.set()
        memory.loader.halt()
        check_alive(engine, expected)


def test_a_fault_of_loading_is_told_before_the_rest_is_read(folder: Path, disk: Disk) -> None:
    reads = count_reads(folder, disk)
    disk.count, disk.fail_at, disk.delay_s = 0, reads // 2, 0.02
    with pytest.raises(RelumeError, match="Input/output error"):
        Engine.load(folder, **options("buffered", strategy="full", expert_memory="auto"))
    assert disk.count < reads


@pytest.mark.parametrize("when", ["loading", "closing"])
def test_nothing_waits_for_ever_for_a_read_that_never_ends(
    folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(loader, "PATIENCE_S", 0.2)
    others = set(threading.enumerate())
    if when == "loading":
        reads = count_reads(folder, disk)
        disk.stuck = {disk.count + reads - 10}
        with pytest.raises(RelumeError, match=r"safetensors: .* no read has ended for 0.2 s"):
            Engine.load(folder, **options("buffered", strategy="full", expert_memory="auto"))
    else:
        engine = Engine.load(folder, **options())
        disk.stuck = {disk.count + 3}
        with pytest.raises(RelumeError, match="no read has ended"):
            run(engine, SHORT)
        engine.close()
    left = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("relume-read")]
    assert left  # the one that hangs; its file stays open under it
    disk.released.set()
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()


def count_reads(folder: Path, disk: Disk) -> int:
    before = disk.count
    Engine.load(folder, **options("buffered", strategy="full", expert_memory="auto")).close()
    return disk.count - before


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = Engine.load(folder, **options())
    engine.close()
    with pytest.raises(RelumeError, match="the engine was closed: load the model again"):
        run(engine, SHORT)
