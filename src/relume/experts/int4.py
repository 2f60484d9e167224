"""Experts of 4 bits a weight: a scale and a zero for each group of an output's inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import require
from relume.experts.formats import Part
from relume.experts.quantised import SMALLEST_SCALE, QuantisedFormat

#: Rows that are packed together: the layout of torch's kernel for AVX-512.
BLOCK_ROWS = 64
#: The kernel takes rows in multiples of this.
_KERNEL_ROWS = 16
#: Most tokens for which torch's kernel is used. Measured for an expert of 2048 x 512 in bfloat16 on one core:
#: 3.9 ms against 9.0 unpacked at 32 tokens, 9.0 against 8.8 at 64.
MOST_KERNEL_TOKENS = 64


class Int4Format(QuantisedFormat):
    """`w = (code - 8) * scale + zero`, codes 0..15, for each `group_size` inputs of one row.

    Inputs are filled up to whole groups. A weight takes `groups * (group_size / 2 + 4)` bytes a row.
    """

    name = "int4"

    def __init__(self, hidden: int, size: int, group_size: int) -> None:
        require(hidden % 2 == 0, f"int4 needs an even hidden size, this model has {hidden}: choose int8 or bf16")
        self.group_size = group_size
        super().__init__(hidden, size)

    def weight_parts(self, rows: int, columns: int) -> tuple[Part, Part]:
        """See `QuantisedFormat.weight_parts`."""
        groups = -(-columns // self.group_size)
        return ((rows // 2, groups * self.group_size), torch.uint8), ((groups, rows, 2), torch.bfloat16)

    def quantise(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `QuantisedFormat.quantise`."""
        unpacked = torch.zeros(len(weight), codes.shape[1], dtype=torch.uint8)
        groups = zip(
            weight.split(self.group_size, 1), unpacked.split(self.group_size, 1), scales.unbind(), strict=True
        )
        for values, out, pairs in groups:
            low, high = values.aminmax(dim=1)
            pairs[:, 0] = ((high - low) / 15).clamp_min_(SMALLEST_SCALE)
            pairs[:, 1] = low + 8 * pairs[:, 0].float()
            scale, zero = pairs.float().unsqueeze(2).unbind(1)
            out[:, : values.shape[1]] = ((values - zero) / scale).round_().add_(8).clamp_(0, 15)
        for block, rows in zip(_blocks(codes), unpacked.split(BLOCK_ROWS), strict=True):
            block.copy_(_pack(rows))

    def kernel_problem(self, rows: int, columns: int) -> str | None:
        """See `QuantisedFormat.kernel_problem`."""
        del columns
        if rows % _KERNEL_ROWS:
            return f"torch's int4 kernel needs outputs in multiples of {_KERNEL_ROWS}, an expert has {rows}"
        return _processor_problem()

    def linear(self, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `QuantisedFormat.linear`."""
        num_columns, num_rows = codes.shape[1], scales.shape[1]
        if num_columns > x.shape[1]:
            x = F.pad(x, (0, num_columns - x.shape[1]))
        if self.use_kernel(x, num_rows, MOST_KERNEL_TOKENS):
            weight = codes.view(num_rows, num_columns // 2)
            return torch._weight_int4pack_mm_for_cpu(x, weight, self.group_size, scales)
        out = x.new_empty(len(x), num_rows)
        size = self.panel_rows(num_columns, BLOCK_ROWS)
        panels = zip(out.split(size, 1), codes.split(size // 2), scales.float().split(size, 1), strict=True)
        for columns, panel, pairs in panels:
            columns.copy_(x @ self._unpack(panel, pairs).to(x.dtype))
        return out

    def _unpack(self, codes: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        """The transposed weight `[columns, rows]` in float32."""
        weight = torch.empty(codes.shape[1], pairs.shape[1], device=codes.device)
        for block, part in zip(_blocks(codes), weight.t().split(BLOCK_ROWS), strict=True):
            low, high = _halves(part)
            low.copy_((block & 15).t())
            high.copy_((block >> 4).t())
        scale, zero = pairs.unbind(2)
        groups = weight.split(self.group_size)
        for values, factor, offset in zip(groups, scale, zero - 8 * scale, strict=True):
            values.mul_(factor).add_(offset)
        return weight


def _blocks(codes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Blocks `[columns, rows / 2]` of codes `[rows / 2, columns]`: `BLOCK_ROWS` rows each, the rest last."""
    for block in codes.split(BLOCK_ROWS // 2):
        yield block.view(codes.shape[1], -1)


def _halves(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's rows whose codes are in the low and in the high bits: halves of a whole block, else every other.

    That is what torch's packing does.
    """
    if len(rows) == BLOCK_ROWS:
        return rows[: BLOCK_ROWS // 2], rows[BLOCK_ROWS // 2 :]
    return rows[0::2], rows[1::2]


def _pack(rows: torch.Tensor) -> torch.Tensor:
    """A block's codes `[rows, columns]` as bytes `[columns, rows / 2]`."""
    low, high = _halves(rows)
    return (low | (high << 4)).t()


@cache
def _processor_problem() -> str | None:
    """Whether torch's kernel for this processor reads the layout that is stored, found by packing a sample."""
    codes = (torch.arange((BLOCK_ROWS + _KERNEL_ROWS) * 32) * 7 % 16).view(-1, 32)
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch has no int4 kernel for this processor ({str(error).splitlines()[0]})"
    expected = torch.empty(len(codes) // 2, 32, dtype=torch.uint8)
    for block, rows in zip(_blocks(expected), codes.to(torch.uint8).split(BLOCK_ROWS), strict=True):
        block.copy_(_pack(rows))
    if torch.equal(packed.flatten(), expected.flatten()):
        return None
    return "torch's int4 kernel for this processor, which lacks AVX-512, reads another layout"
