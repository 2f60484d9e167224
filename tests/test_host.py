"""Experts in host memory, and pinning it: refused loudly, capped, and never asked for on a CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import Engine
from relume.checkpoint.files import Pause
from relume.experts.formats import DenseFormat, Views
from relume.experts.host import HostExperts, spread
from relume.experts.source import ExpertSource
from relume.machine import memory
from relume.machine.limits import find_limits
from relume.machine.memory import PinError, is_out_of_memory

SOURCE = Path(memory.__file__).parent.parent


class Counting(ExpertSource):
    """Fills an expert's tensors with its number."""

    def read(self, layer: int, expert: int, views: Views, pause: Pause | None = None) -> int:
        for view in views:
            view.fill_(10 * layer + expert)
        return 100

    def place(self, layer: int, expert: int) -> str:
        return f"disk: {layer}, {expert}"


def held(source: HostExperts, expert_format: DenseFormat, layer: int, expert: int) -> tuple[int, float]:
    """Bytes that reading takes, and what was read."""
    views = expert_format.views(torch.zeros(expert_format.slot_bytes, dtype=torch.uint8))
    num_bytes = source.read(layer, expert, views)
    (value,) = {float(value) for view in views for value in view.unique()}
    return num_bytes, value


def refuse(_: torch.Tensor) -> None:
    raise PinError("the driver refused to pin 0.0 GiB (code 2)")


def test_a_refused_pin_is_a_loud_fallback_and_no_lack_of_memory() -> None:
    expert_format = DenseFormat(8, 4, torch.float32)
    source = HostExperts(Counting(), expert_format, spread(3, 2, 4), refuse)
    read: list[int] = []
    source.prepare(read.append)
    assert read == [100, 100, 100]
    (line,) = source.fallbacks
    assert "not pinned" in line and "slower" in line and "refused to pin" in line and "\n" not in line
    assert [held(source, expert_format, *key) for key in ((0, 0), (1, 0), (0, 1), (1, 1))] == [
        (0, 0.0),
        (0, 10.0),
        (0, 1.0),
        (100, 11.0),
    ]
    assert source.place(1, 1) == "disk: 1, 1"
    assert not is_out_of_memory(PinError("the driver refused to pin 9.0 GiB (code 2)"))


def test_no_more_than_half_of_ram_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_driver() -> object:
        pytest.fail("the driver was asked")

    monkeypatch.setattr(torch.cuda, "cudart", ask_driver)
    more = torch.empty(find_limits(with_gpus=False).pin_cap_bytes + 1, dtype=torch.uint8, device="meta")
    with pytest.raises(PinError, match="at most half of RAM is pinned"):
        memory.pin(more)


def test_nothing_is_pinned_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def watch(*args: object, **options: object) -> torch.Tensor:
        assert not options.get("pin_memory")
        made: torch.Tensor = real(*args, **options)  # type: ignore[call-overload]
        return made

    def fail(*_: object, **__: object) -> None:
        pytest.fail("memory was pinned")

    monkeypatch.setattr(torch, "empty", watch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    monkeypatch.setattr(torch.cuda, "cudart", fail)
    folder = write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2))
    settings: list[dict[str, Any]] = [{}, {"strategy": "lru", "expert_memory": "25%", "host_memory": "50%"}]
    for options in settings:
        with Engine.load(folder, **options) as engine:
            assert len(engine.generate(input_ids=[1, 2, 3], max_tokens=4, ignore_eos=True).token_ids) == 4
            assert all("host-memory" in line for line in engine.fallbacks)


def test_memory_is_pinned_in_one_place() -> None:
    """So that a cap or a switch cannot be forgotten in another; `bandwidth` pins what it measures with."""
    pinning = re.compile(r"pin_memory|cudaHostRegister|cudaHostAlloc")
    places = {path.name for path in SOURCE.rglob("*.py") if pinning.search(path.read_text())}
    assert places == {"memory.py", "bandwidth.py"}
