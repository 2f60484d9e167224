"""Experts of 8 bits a weight: one scale for each output."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from relume.experts.formats import Part
from relume.experts.quantised import SMALLEST_SCALE, QuantisedFormat

#: Most tokens for which torch's kernel is used. Measured for the down projection of an expert of 2048 x 512 in
#: bfloat16 on one core: 0.42 ms against 0.47 unpacked at 12 tokens, 0.56 against 0.49 at 16.
MOST_KERNEL_TOKENS = 12
#: Inputs that the kernel takes at a time. It reads beyond the weight if they do not divide.
_KERNEL_COLUMNS = 16


class Int8Format(QuantisedFormat):
    """`w = code * scale`, codes -127..127, one scale a row; `rows * columns + 2 * rows` bytes."""

    name = "int8"

    def weight_parts(self, rows: int, columns: int) -> tuple[Part, Part]:
        """See `QuantisedFormat.weight_parts`."""
        return ((rows, columns), torch.int8), ((rows,), torch.bfloat16)

    def quantise(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """See `QuantisedFormat.quantise`."""
        # Rounded up, so that the largest weight of a row stays within 127.
        scales.copy_((weight.abs().amax(dim=1) * (1 + 2**-8) / 127).clamp_min_(SMALLEST_SCALE))
        codes.copy_((weight / scales.float().unsqueeze(1)).round_().clamp_(-127, 127))

    def kernel_problem(self, rows: int, columns: int) -> str | None:
        """See `QuantisedFormat.kernel_problem`."""
        del rows
        if columns % _KERNEL_COLUMNS == 0:
            return None
        return (
            f"torch's int8 kernel needs inputs in multiples of {_KERNEL_COLUMNS}, an expert's matrix has {columns}"
        )

    def linear(self, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `QuantisedFormat.linear`."""
        if self.use_kernel(x, len(codes), MOST_KERNEL_TOKENS):
            return torch._weight_int8pack_mm(x, codes, scales)
        out = x.new_empty(len(x), len(codes))
        size = self.panel_rows(codes.shape[1])
        for columns, panel in zip(out.split(size, 1), codes.split(size), strict=True):
            columns.copy_(F.linear(x, panel.to(x.dtype)))
        return out.mul_(scales.to(x.dtype))
