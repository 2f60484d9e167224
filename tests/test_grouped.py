"""Grouped products over slots against one expert after the other."""

from __future__ import annotations

import pytest
import torch

from relume.experts.arena import Arena
from relume.experts.formats import DenseFormat
from relume.experts.grouped import GroupedExperts, grouped_for, grouped_problem, window_ends
from relume.experts.int8 import Int8Format

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [3, 5, 1023])
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype, most: int) -> None:
    """Slots without tokens hold NaN, and are never read."""
    draw = torch.Generator().manual_seed(most)
    arena = Arena(
        11, DenseFormat(32, 24, dtype), CPU
    )  # slots are padded: 24 rows of 32 are no multiple of anything
    arena.memory.fill_(0xFF)
    lengths = {0: 3, 2: 1, 3: 7, 9: 32, 10: 2}
    for slot in lengths:
        for view in arena._views[slot]:
            view.copy_(torch.randn(view.shape, generator=draw))
    rows = {slot: torch.randn(n, 32, generator=draw).to(dtype) for slot, n in lengths.items()}
    grouped = GroupedExperts(arena, most)
    windows = grouped.windows(sorted(lengths))
    assert all(len(window) <= most for window in windows)
    assert sum(slot in window for window in windows for slot in lengths) == len(lengths)
    for window in windows:
        inside = [slot for slot in sorted(lengths) if slot in window]
        ends = window_ends(window, inside, [lengths[slot] for slot in inside])
        found = grouped.compute(torch.cat([rows[slot] for slot in inside]), ends, window)
        expected = torch.cat([arena.format.compute(rows[slot], arena._views[slot]) for slot in inside])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_no_weight_is_gathered() -> None:
    arena = Arena(4, DenseFormat(32, 16, torch.float32), CPU)
    grouped = GroupedExperts(arena)
    begin = arena.memory.data_ptr()
    for stack in (grouped._gate_up, grouped._down):
        assert begin <= stack.data_ptr() < begin + arena.memory.numel()
    for index, views in enumerate(arena._views):
        assert grouped._gate_up[index].data_ptr() == views[0].data_ptr()
        assert grouped._down[index].data_ptr() == views[1].data_ptr()


def test_what_cannot_be_grouped_is_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, dense = torch.device("cuda"), DenseFormat(32, 16, torch.bfloat16)
    capability = (8, 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert "8.9" in (grouped_problem(dense, torch.bfloat16, cuda) or "")
    capability = (9, 0)
    assert grouped_problem(dense, torch.bfloat16, cuda) is None
    assert "bfloat16" in (grouped_problem(DenseFormat(32, 16, torch.float32), torch.float32, cuda) or "")
    assert "aligned" in (grouped_problem(DenseFormat(36, 17, torch.bfloat16), torch.bfloat16, cuda) or "")
    assert "int8" in (grouped_problem(Int8Format(32, 16), torch.bfloat16, cuda) or "")
    fallbacks: list[str] = []
    arena = Arena(2, dense, CPU)
    assert grouped_for(arena, torch.float32, cuda, fallbacks) is None
    (line,) = fallbacks
    assert "one by one" in line and "bfloat16" in line and "\n" not in line
    assert isinstance(grouped_for(arena, torch.bfloat16, cuda, fallbacks), GroupedExperts)
    assert grouped_for(arena, torch.bfloat16, CPU, fallbacks) is None and len(fallbacks) == 1
