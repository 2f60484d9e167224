"""Slots on a device with streams: every order between copies and kernels is kept, and each wait is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from faults import Disk, check_error, check_memory
from relume import DecodingConfig, Engine, RelumeError, Request
from relume.experts import copies
from relume.experts.copies import DirectCopies, StreamCopies, copy_lane
from relume.experts.formats import DenseFormat, Views
from relume.experts.host import HostExperts, spread
from relume.experts.lanes import LaneCosts
from relume.experts.streams import CudaStream
from relume.machine import memory
from relume.machine.limits import find_limits
from relume.strategy.dispatch.host import AllHost
from relume.strategy.strategies import STRATEGIES
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, write_model_profile
from streams import Order, PlayedCopies, PlayedDevice, play
from test_host import Counting

ORDERS: list[Order] = ["copies first", "copies last", "random"]
REQUESTS = [
    Request(input_ids=[3 * i + j for j in range(5 + 9 * i)], decoding=DecodingConfig(max_tokens=8, block_length=8))
    for i in range(3)
]
#: Where experts come from: pinned host memory, other host memory, disk.
PLACES: dict[str, dict[str, Any]] = {
    "pinned": {"host_memory": "100%"},
    "pageable": {"host_memory": "100%"},
    "half": {"host_memory": "50%"},
    "disk": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("copies"), LLADA2, make_tensors(LLADA2), num_shards=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    with Engine.load(folder, dtype="float32", strategy="full") as engine:
        return logits(engine)


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[tuple[int, ...]]:
    with Engine.load(folder, dtype="float32", strategy="full") as engine:
        return [result.canvas for result in engine.generate_batch(REQUESTS)]


def logits(engine: Engine) -> torch.Tensor:
    """Of a prompt that needs nearly all experts, and of the same again, when others are resident."""
    return torch.cat([engine.logits(range(24), prefill_blocks=1), engine.logits(range(9))])


def options(**more: Any) -> dict[str, Any]:
    return {"dtype": "float32", "strategy": "lru", "expert_memory": "25%", "num_threads": 1} | more


def settle_and_check(engine: Engine) -> None:
    engine._model.experts.loader.copies.settle()
    check_memory(engine)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_copies_and_kernels_gives_the_same_bits(
    folder: Path,
    expected: torch.Tensor,
    tokens: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    order: Order,
    place: str,
) -> None:
    play(monkeypatch, PlayedDevice(order), pinned=place != "pageable")
    with Engine.load(folder, **options(**PLACES[place])) as engine:
        assert isinstance(engine._model.experts.loader.copies, PlayedCopies)
        for _ in range(2):
            assert torch.equal(logits(engine), expected)
        results = engine.generate_batch(REQUESTS)
        assert [result.canvas for result in results] == tokens
        assert sum(result.statistics.bytes_to_device for result in results) > 0
        read = sum(result.statistics.bytes_from_disk for result in results)
        assert (read > 0) == (place in {"disk", "half"})
        settle_and_check(engine)


@pytest.mark.parametrize("strategy", [*sorted(set(STRATEGIES) - {"belady"}), "lru:dispatch=host"])
def test_every_strategy_gives_the_same_bits(
    folder: Path, tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strategy: str
) -> None:
    """With a host lane of two threads."""
    profile = make_profile(folder, tmp_path)
    play(monkeypatch, PlayedDevice("random", seed=len(strategy)))
    budget = "auto" if strategy == "full" else "25%"
    wanted = options(strategy=strategy, expert_memory=budget, host_memory="100%", profile=str(profile))
    with Engine.load(folder, **wanted) as engine:
        engine._model.host.num_threads = 2
        for _ in range(2):
            results = engine.generate_batch(REQUESTS)
            assert [result.canvas for result in results] == tokens
        if strategy == "lru:dispatch=host":
            assert sum(result.statistics.hosted for result in results) > 0
        settle_and_check(engine)


def make_profile(folder: Path, tmp_path: Path) -> Path:
    with Engine.load(folder, dtype="float32", strategy="full") as engine, engine.record(tmp_path / "trace"):
        engine.generate_batch(REQUESTS)
    reader = TraceReader(tmp_path / "trace")
    write_model_profile(gather_profile(reader, reader.metadata.shape), tmp_path / "profile.npz")
    return tmp_path / "profile.npz"


def test_grouped_products_give_the_same_logits(
    folder: Path, expected: torch.Tensor, tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over windows of the arena, one and several."""
    for most, order in itertools.product((4, 1023), ORDERS):
        play(monkeypatch, PlayedDevice(order), grouped=most)
        with Engine.load(folder, **options(host_memory="100%")) as engine:
            assert engine._model.transformer.executor._grouped is not None
            for _ in range(2):
                torch.testing.assert_close(logits(engine), expected, rtol=1e-5, atol=1e-5)
            results = engine.generate_batch(REQUESTS)  # several spans
            assert [result.canvas for result in results] == tokens
            settle_and_check(engine)


Break = Callable[[pytest.MonkeyPatch, PlayedDevice], None]


def copies_do_not_wait_for_kernels(_: pytest.MonkeyPatch, device: PlayedDevice) -> None:
    device.broken.add(("copies", "waits"))


def kernels_do_not_wait_for_copies(_: pytest.MonkeyPatch, device: PlayedDevice) -> None:
    device.broken.add(("kernels", "waits"))


def nothing_is_waited_for_before_use(patch: pytest.MonkeyPatch, _: PlayedDevice) -> None:
    patch.setattr(StreamCopies, "use", lambda *_: None)


def freed_slots_are_not_recorded(patch: pytest.MonkeyPatch, _: PlayedDevice) -> None:
    patch.setattr(StreamCopies, "freed", lambda *_: None)


def staging_buffers_are_filled_while_they_are_copied(patch: pytest.MonkeyPatch, _: PlayedDevice) -> None:
    def take(self: Any) -> int:
        self._turn = (self._turn + 1) % copies.STAGING_BUFFERS
        return int(self._turn)

    patch.setattr(copies._Staging, "take", take)


@pytest.mark.parametrize(
    ("broken", "order", "place"),
    [
        (copies_do_not_wait_for_kernels, "copies first", "pinned"),
        (copies_do_not_wait_for_kernels, "copies first", "disk"),
        (kernels_do_not_wait_for_copies, "copies last", "pinned"),
        (kernels_do_not_wait_for_copies, "copies last", "disk"),
        (nothing_is_waited_for_before_use, "copies last", "pinned"),
        (freed_slots_are_not_recorded, "copies first", "pinned"),
        (staging_buffers_are_filled_while_they_are_copied, "copies last", "pageable"),
    ],
)
def test_each_wait_is_needed(
    folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch, broken: Break, order: Order, place: str
) -> None:
    """The played device shows what is missing: without one of the waits, the logits are others."""
    device = PlayedDevice(order)
    play(monkeypatch, device, pinned=place != "pageable")
    broken(monkeypatch, device)
    with Engine.load(folder, **options(**PLACES[place])) as engine:
        engine._model.experts.loader.copies.poisoned = False  # which would wait for kernels itself
        assert any(not torch.equal(logits(engine), expected) for _ in range(3))


def test_the_thread_that_computes_waits_for_no_copy(
    folder: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in pinned memory are brought without a thread and without a wait: nothing stalls, no reader runs."""
    device = PlayedDevice("copies last")
    play(monkeypatch, device)
    with Engine.load(folder, **options(host_memory="100%")) as engine:
        waits: list[int] = []
        patch_wait = type(device.copies.record())
        monkeypatch.setattr(patch_wait, "synchronize", lambda *_: waits.append(1))
        monkeypatch.setattr(StreamCopies, "fill", lambda *_: pytest.fail("a reader thread was needed"))
        assert torch.equal(logits(engine), expected)
        assert not waits


def test_whatever_fails_the_next_request_is_served(
    folder: Path, tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that fail, with copies and kernels under way."""
    disk = Disk(monkeypatch)
    play(monkeypatch, PlayedDevice("random"))
    with Engine.load(folder, **options(host_memory="25%")) as engine:
        for number in range(0, 60, 7):
            disk.fail_at = disk.count + number
            try:
                engine.generate_batch(REQUESTS)
            except RelumeError as error:
                check_error(error, folder)
            disk.fail_at = None
            assert [result.canvas for result in engine.generate_batch(REQUESTS)] == tokens
            settle_and_check(engine)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
        ),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "driver", "cublas"],
)
def test_a_gpu_that_runs_out_of_memory_is_one_line(
    folder: Path, tokens: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real = DenseFormat.compute
    fail_at, calls = 40, itertools.count()

    def compute(self: DenseFormat, x: torch.Tensor, views: Views) -> torch.Tensor:
        if next(calls) == fail_at:
            raise error
        return real(self, x, views)

    play(monkeypatch, PlayedDevice("random"))
    monkeypatch.setattr(DenseFormat, "compute", compute)
    with Engine.load(folder, **options(host_memory="100%")) as engine:
        with pytest.raises(RelumeError, match=r"memory ran out in a forward of .* --expert-memory") as caught:
            engine.generate_batch(REQUESTS)
        assert "\n" not in str(caught.value)
        assert [result.canvas for result in engine.generate_batch(REQUESTS)] == tokens
        settle_and_check(engine)


def test_lanes_learn_what_they_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, PlayedDevice("random"))
    with Engine.load(folder, **options(strategy="lru:dispatch=fiddler", host_memory="100%")) as engine:
        costs = engine._model.experts.costs
        engine.generate_batch(REQUESTS)
        before = dict(costs.scales)
        # A step of the played device is a millisecond.
        assert before["transfer"] != 1.0 and before["device"] != 1.0
        engine._model.experts.placement.dispatch = AllHost()
        engine.generate_batch(REQUESTS)
        assert costs.scales["host"] != before["host"]


def test_costs_beside_a_gpu_are_those_of_its_link_and_of_the_processor() -> None:
    known = LaneCosts(None, 3 * 2048 * 512, 2, 6 << 20, on_gpu=True, link_bandwidth=50e9)
    assert known.transfer_s() == pytest.approx((6 << 20) / 50e9)
    unknown = LaneCosts(None, 3 * 2048 * 512, 2, 6 << 20, on_gpu=True)
    assert unknown.transfer_s() > known.transfer_s()
    counts = np.array([1, 8])
    assert (unknown.kernel_s(counts, "device") < unknown.kernel_s(counts, "host")).all()
    known.learn("transfer", known.transfer_s(), 2 * known.transfer_s())
    assert known.transfer_s() == pytest.approx(1.1 * (6 << 20) / 50e9)
    assert LaneCosts(None, 1, 2, 64).transfer_s(held=False) == 1.0


def test_what_is_above_the_cap_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was pinned is given back, when the engine is closed."""
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    expert_format = DenseFormat(8, 4, torch.float32)
    limits = find_limits(with_gpus=False)
    cap = 2 * expert_format.slot_bytes + 100
    monkeypatch.setattr(memory, "find_limits", lambda **_: type(limits)(**(vars(limits) | {"pin_cap_bytes": cap})))
    source = HostExperts(Counting(), expert_format, spread(4, 2, 4), memory.pin)
    source.prepare(lambda _: None)
    assert [source.pinned(*key) for key in spread(4, 2, 4)] == [True, True, False, False]
    assert all(source.held(*key) is not None for key in spread(4, 2, 4))
    (line,) = source.fallbacks
    assert line.startswith("2 of 4 experts in host memory are not pinned") and "half of RAM" in line
    assert sum(driver.pinned.values()) == 2 * expert_format.slot_bytes
    with pytest.raises(memory.PinError, match="besides"):
        memory.pin(torch.zeros(101, dtype=torch.uint8))
    source.close()
    assert not driver.pinned and not memory._pinned


class Driver:
    """The part of the CUDA runtime that pins."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:  # noqa: N802
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_staging_buffers_are_pinned_and_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    play(monkeypatch, PlayedDevice("random"))
    with Engine.load(folder, **options()) as engine:
        lane = engine._model.experts.loader.copies
        assert isinstance(lane, PlayedCopies)
        lane._pinned = True
        logits(engine)
        slot_bytes = engine._model.experts.arena.format.slot_bytes
        assert driver.pinned and set(driver.pinned.values()) == {slot_bytes}
        assert len(driver.pinned) <= copies.STAGING_BUFFERS * engine._model.experts.loader.num_threads
    assert not driver.pinned


def test_a_cpu_has_no_streams() -> None:
    source = Counting()
    assert isinstance(copy_lane(source, DenseFormat(8, 4, torch.float32), torch.device("cpu")), DirectCopies)


def test_cuda_streams_are_asked_for_what_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of torch alone: what a driver makes of them, no test here can tell."""
    done: list[str] = []
    current, own = MagicMock(name="current"), MagicMock(name="own")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)

    @contextmanager
    def within(stream: object) -> Iterator[None]:
        assert stream is own
        done.append("enter")
        yield
        done.append("leave")

    monkeypatch.setattr(torch.cuda, "stream", within)
    event = MagicMock(name="event")

    def make_event(**options: Any) -> MagicMock:
        done.append(f"{options}")
        return event

    monkeypatch.setattr(torch.cuda, "Event", make_event)
    kernels, copying = CudaStream(torch.device("cuda")), CudaStream(torch.device("cuda"), own)
    kernels.run(lambda: done.append("kernel"))
    copying.run(lambda: done.append("copy"))
    assert done == ["kernel", "enter", "copy", "leave"]
    assert kernels.record() is event
    event.record.assert_called_with(current)
    copying.wait(event)
    own.wait_event.assert_called_once_with(event)
    copying.record(timed=True)
    event.record.assert_called_with(own)
    assert done[-1] == "{'enable_timing': True, 'blocking': True}"
