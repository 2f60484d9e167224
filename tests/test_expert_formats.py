"""Expert formats: what they stand for, what they compute, how many bytes they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relume import RelumeError
from relume.config import PackConfig
from relume.experts import int4, int8
from relume.experts.formats import SLOT_ALIGNMENT, DenseFormat, ExpertFormat
from relume.experts.packed import packed_format
from relume.experts.quantised import QuantisedFormat

FORMATS = [PackConfig("bf16"), PackConfig("int8"), *(PackConfig("int4", size) for size in (32, 64, 128))]
#: Largest relative RMS error of an expert's output that quantising normal weights may cause.
TOLERANCE = {"bf16": 0.0, "int8": 0.02, "int4": 0.2}


def names(packing: PackConfig) -> str:
    return f"{packing.experts}-{packing.group_size or 0}"


def expert(hidden: int, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(2 * size, hidden, generator=generator) / hidden**0.5
    return gate_up, torch.randn(hidden, size, generator=generator) / size**0.5


def filled(packing: PackConfig, hidden: int, size: int) -> tuple[ExpertFormat, tuple[torch.Tensor, ...]]:
    kind = packed_format(packing, hidden, size)
    views = kind.views(torch.zeros(kind.slot_bytes, dtype=torch.uint8))
    kind.fill(*expert(hidden, size), views)
    return kind, views


def exact(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=1)
    return (gate * torch.sigmoid(gate) * up) @ down.double().T


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def stored_weights(kind: ExpertFormat, views: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What a slot's tensors stand for, in float64, read bit by bit and by no code that computes with them."""
    if isinstance(kind, DenseFormat):
        return [view.double() for view in views]
    weights = []
    for codes, scales, (rows, columns) in zip(views[::2], views[1::2], kind._shapes, strict=True):  # type: ignore[attr-defined]
        if isinstance(kind, int8.Int8Format):
            weights.append(codes.double() * scales.double().unsqueeze(1))
            continue
        assert isinstance(kind, int4.Int4Format)
        data, weight = codes.flatten().tolist(), torch.empty(rows, columns, dtype=torch.float64)
        padded = codes.shape[1]
        for row in range(rows):
            block, inner = divmod(row, 64)
            height = min(64, rows - 64 * block)
            if height == 64:
                place, high = inner % 32, inner >= 32
            else:
                place, high = inner // 2, inner % 2 == 1
            for column in range(columns):
                byte = data[32 * block * padded + column * (height // 2) + place]
                scale, zero = scales[column // kind.group_size, row].double()
                weight[row, column] = ((byte >> 4 if high else byte & 15) - 8) * scale + zero
        weights.append(weight)
    return weights


@pytest.mark.parametrize("packing", FORMATS, ids=names)
@pytest.mark.parametrize(("hidden", "size"), [(64, 32), (32, 24), (48, 20), (128, 48), (160, 64)])
def test_each_format_stands_for_nearly_the_weights_and_computes_exactly_with_what_it_stands_for(
    packing: PackConfig, hidden: int, size: int
) -> None:
    kind, views = filled(packing, hidden, size)
    weights = stored_weights(kind, views)
    if packing.experts == "bf16":
        rounded = [weight.bfloat16().double() for weight in expert(hidden, size)]
        assert all(map(torch.equal, weights, rounded))
    for num_tokens in (1, 5, int8.MOST_KERNEL_TOKENS + 1, int4.MOST_KERNEL_TOKENS + 6):
        x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(num_tokens))
        wanted = exact(x, weights[0], weights[1])
        original = exact(x, *(weight.bfloat16() for weight in expert(hidden, size)))
        # One token's error scatters around that of many.
        assert error(wanted, original) <= TOLERANCE[packing.experts] * (2 if num_tokens == 1 else 1)
        if packing.experts != "bf16":
            assert error(kind.compute(x, views), wanted) < 1e-5
        x = x.bfloat16()
        assert error(kind.compute(x, views), exact(x, weights[0], weights[1])) < 0.01


@given(st.integers(1, 70), st.integers(1, 50), st.sampled_from([32, 64, 128]))
@settings(deadline=None, max_examples=40)
def test_bytes_per_expert_follow_a_formula(half_hidden: int, size: int, group: int) -> None:
    hidden = 2 * half_hidden
    shapes = ((2 * size, hidden), (hidden, size))

    def aligned(*parts: int) -> int:
        return sum(-(-part // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for part in parts)

    def slot(packing: PackConfig) -> int:
        return packed_format(packing, hidden, size).slot_bytes

    assert slot(PackConfig("bf16")) == aligned(6 * hidden * size)
    assert slot(PackConfig("int8")) == sum(aligned(rows * columns, 2 * rows) for rows, columns in shapes)
    groups = [-(-columns // group) for _, columns in shapes]
    assert slot(PackConfig("int4", group)) == sum(
        aligned(rows * count * group // 2, 4 * rows * count)
        for (rows, _), count in zip(shapes, groups, strict=True)
    )


@pytest.mark.parametrize("packing", FORMATS[1:], ids=names)
def test_a_token_s_output_does_not_depend_on_others_while_the_same_kernel_is_used(packing: PackConfig) -> None:
    kind, views = filled(packing, 128, 64)
    assert kind.slower_because(torch.bfloat16, torch.device("cpu")) is None
    x = torch.randn(int8.MOST_KERNEL_TOKENS, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    together = kind.compute(x, views)
    alone = torch.cat([kind.compute(row, views) for row in x.split(1)])
    assert torch.equal(together, alone)


def test_what_a_kernel_cannot_do_is_unpacked_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    kind, views = filled(PackConfig("int8"), 32, 24)
    assert "multiples of 16" in str(kind.slower_because(torch.bfloat16, cpu))
    real, seen = torch._weight_int8pack_mm, []

    def watch(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        seen.append(codes.shape[1])
        return real(x, codes, scales)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", watch)
    kind.compute(torch.ones(2, 32).bfloat16(), views)
    assert seen == [32]  # with 24 inputs it would read beyond the weight
    odd = packed_format(PackConfig("int4"), 40, 20)
    assert "multiples of 16" in str(odd.slower_because(torch.bfloat16, cpu))
    assert "bfloat16" in str(odd.slower_because(torch.float32, cpu))
    assert "this device" in str(odd.slower_because(torch.bfloat16, torch.device("cuda")))
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", lambda codes, _: codes.new_zeros(40, 32))
    int4._processor_problem.cache_clear()
    even = packed_format(PackConfig("int4"), 64, 32)
    assert "another layout" in str(even.slower_because(torch.bfloat16, cpu))
    int4._processor_problem.cache_clear()


def test_weights_that_quantising_would_hide_are_refused() -> None:
    gate_up, down = expert(64, 32)
    down[3, 4] = float("inf")
    for packing in FORMATS[1:]:
        kind = packed_format(packing, 64, 32)
        assert isinstance(kind, QuantisedFormat)
        with pytest.raises(RelumeError, match="no finite numbers"):
            kind.fill(gate_up, down, kind.views(torch.zeros(kind.slot_bytes, dtype=torch.uint8)))
    with pytest.raises(RelumeError, match="even hidden size"):
        packed_format(PackConfig("int4"), 33, 8)


def test_zeros_stay_zeros() -> None:
    for packing in FORMATS:
        kind = packed_format(packing, 64, 32)
        views = kind.views(torch.ones(kind.slot_bytes, dtype=torch.uint8))
        kind.fill(torch.zeros(64, 64), torch.zeros(64, 32), views)
        assert not kind.compute(torch.ones(3, 64).bfloat16(), views).any()
