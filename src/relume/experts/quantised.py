"""Expert formats of 8 and 4 bits a weight, computed from where they lie.

Both hold scales in bfloat16 and are quantised against the rounded scale, so that float32 and bfloat16 compute with
the same weights. torch's kernels unpack within the product and win for a few tokens; for more, unpacking first and
multiplying as usual does. The number of tokens in the call decides; as for unquantised experts, a call has one
request's tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import require
from relume.experts.formats import ExpertFormat, Views
from relume.experts.kernels import swiglu_of

GROUP_SIZES = (32, 64, 128)
#: Rows of an int4 weight that are packed together: the layout of torch's kernel for AVX-512.
BLOCK_ROWS = 64
#: Most tokens for which torch's kernel is the faster one: measured for experts of 2048 x 512 in bfloat16 on one core,
#: int8 0.42 ms against 0.47 at 12 tokens and 0.56 against 0.49 at 16; int4 equal at 64.
INT8_KERNEL_TOKENS = 12
INT4_KERNEL_TOKENS = 64
#: Weights that are unpacked at a time; a function of the shape alone, so that bits depend on nothing else.
PANEL_WEIGHTS = 1 << 20


class Int8Format(ExpertFormat):
    """Symmetric, one scale an output channel: `w = q * scale`, q in -127..127."""

    name = "int8"
    lossless = False

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__(
            [
                part
                for rows, columns in ((2 * size, hidden), (hidden, size))
                for part in (((rows, columns), torch.int8), ((rows,), torch.bfloat16))
            ]
        )

    def fill(self, gate_up: torch.Tensor, down: torch.Tensor, views: Views) -> None:
        """See `ExpertFormat.fill`."""
        for weight, codes, scale in ((gate_up, *views[:2]), (down, *views[2:])):
            wide = weight.float()
            largest = wide.abs().amax(dim=1)
            _require_finite(largest)
            # Rounded up, so that the largest weight stays within 127.
            scale.copy_((largest * (1 + 2**-8) / 127).clamp_min(1e-30))
            codes.copy_((wide / scale.float().unsqueeze(1)).round_().clamp_(-127, 127))

    def compute(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """See `ExpertFormat.compute`."""
        return swiglu_of(x, partial(_int8_linear, views[:2]), partial(_int8_linear, views[2:]))

    def slower_because(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertFormat.slower_because`."""
        del dtype  # in float32, unpacking is the faster way for any number of tokens
        return None if device.type == "cpu" else "there is no kernel for int8 experts on this device"


class Int4Format(ExpertFormat):
    """One scale and zero for each `group_size` inputs of an output: `w = (q - 8) * scale + zero`, q in 0..15.

    The last group is shorter if the size does not divide.
    """

    name = "int4"
    lossless = False

    def __init__(self, hidden: int, size: int, group_size: int) -> None:
        require(group_size in GROUP_SIZES, f"group size {group_size}: choose one of {_listed(GROUP_SIZES)}")
        require(hidden % 2 == 0, f"int4 needs an even hidden size, the model has {hidden}: choose int8 or bf16")
        self.group_size = group_size
        shapes = (2 * size, hidden), (hidden, size)
        super().__init__(
            [
                part
                for rows, columns in shapes
                for part in (
                    ((rows // 2, columns), torch.uint8),
                    ((-(-columns // group_size), rows, 2), torch.bfloat16),
                )
            ]
        )
        self._misfit = next((problem for shape in shapes if (problem := self._shape_problem(*shape))), None)

    def fill(self, gate_up: torch.Tensor, down: torch.Tensor, views: Views) -> None:
        """See `ExpertFormat.fill`."""
        for weight, packed, scales in ((gate_up, *views[:2]), (down, *views[2:])):
            codes = self._quantise(weight.float(), scales)
            for block, rows in zip(int4_blocks(packed), codes.split(BLOCK_ROWS), strict=True):
                low, high = rows.chunk(2)
                block.copy_((low | (high << 4)).t())

    def compute(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """See `ExpertFormat.compute`."""
        few = len(x) <= INT4_KERNEL_TOKENS
        kernel = few and x.dtype == torch.bfloat16 and self.slower_because(x.dtype, x.device) is None
        linear = _int4_kernel if kernel else _int4_linear
        return swiglu_of(
            x, partial(linear, self.group_size, views[:2]), partial(linear, self.group_size, views[2:])
        )

    def slower_because(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertFormat.slower_because`."""
        if device.type != "cpu":
            return "there is no kernel for int4 experts on this device"
        if dtype != torch.bfloat16:
            return None  # unpacking is the faster way for any number of tokens
        return self._misfit or _int4_kernel_problem()

    def _shape_problem(self, rows: int, columns: int) -> str | None:
        if rows % BLOCK_ROWS:
            return f"torch's int4 kernel needs rows in multiples of {BLOCK_ROWS}, an expert has {rows}"
        if columns % self.group_size:
            return f"torch's int4 kernel needs groups that divide the {columns} inputs of an expert's matrix"
        return None

    def _quantise(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Codes `[rows, columns]` uint8; fills `scales` `[groups, rows, 2]`."""
        codes = torch.empty(weight.shape, dtype=torch.uint8)
        groups = zip(weight.split(self.group_size, 1), codes.split(self.group_size, 1), scales, strict=True)
        for values, out, pair in groups:
            low, high = values.aminmax(dim=1)
            _require_finite(high - low)
            pair[:, 0] = ((high - low) / 15).clamp_min(1e-30)
            pair[:, 1] = low + 8 * pair[:, 0].float()
            scale, zero = pair.float().unsqueeze(2).unbind(1)
            out.copy_(((values - zero) / scale).round_().add_(8).clamp_(0, 15))
        return codes


def int4_blocks(packed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Blocks `[columns, rows / 2]` of a packed weight `[rows / 2, columns]`, all of `BLOCK_ROWS` rows but the last.

    A byte holds the same input of two rows: that of a block's first half in its low bits, of the second half above.
    """
    columns = packed.shape[1]
    for block in packed.split(BLOCK_ROWS // 2):
        yield block.view(columns, -1)


def _int8_linear(weight: Views, x: torch.Tensor) -> torch.Tensor:
    codes, scale = weight
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= INT8_KERNEL_TOKENS:
        return torch._weight_int8pack_mm(x, codes, scale)
    out = x.new_empty(len(x), len(codes))
    size = max(1, PANEL_WEIGHTS // codes.shape[1])
    for columns, panel in zip(out.split(size, 1), codes.split(size), strict=True):
        columns.copy_(F.linear(x, panel.to(x.dtype)))
    return out.mul_(scale.to(x.dtype))


def _int4_kernel(group_size: int, weight: Views, x: torch.Tensor) -> torch.Tensor:
    packed, scales = weight
    return torch._weight_int4pack_mm_for_cpu(x, packed.view(-1, packed.shape[1] // 2), group_size, scales)


def _int4_linear(group_size: int, weight: Views, x: torch.Tensor) -> torch.Tensor:
    packed, scales = weight
    num_columns = packed.shape[1]
    out = x.new_empty(len(x), scales.shape[1])
    size = max(1, PANEL_WEIGHTS // (num_columns * BLOCK_ROWS)) * BLOCK_ROWS
    panels = zip(out.split(size, 1), packed.split(size // 2), scales.float().split(size, 1), strict=True)
    for columns, panel, pairs in panels:
        unpacked = x.new_empty(num_columns, columns.shape[1], dtype=torch.float32)
        for block, part in zip(int4_blocks(panel), unpacked.split(BLOCK_ROWS, 1), strict=True):
            low, high = part.chunk(2, dim=1)
            low.copy_(block & 15)
            high.copy_(block >> 4)
        scale, zero = pairs.unbind(2)
        for values, factor, offset in zip(unpacked.split(group_size), scale, zero - 8 * scale, strict=True):
            values.mul_(factor).add_(offset)
        columns.copy_(x @ unpacked.to(x.dtype))
    return out


@cache
def _int4_kernel_problem() -> str | None:
    """Whether this processor's kernel reads the layout that packs are written in; decided by packing a sample."""
    codes = (torch.arange(BLOCK_ROWS * 32, dtype=torch.int32) * 7 % 16).view(BLOCK_ROWS, 32)
    low, high = codes.to(torch.uint8).chunk(2)
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"torch has no int4 kernel here ({str(error).splitlines()[0]})"
    if not torch.equal(packed.view(32, -1), (low | (high << 4)).t()):
        return "torch's int4 kernel for this processor, which lacks AVX-512, reads another layout"
    return None


def _require_finite(values: torch.Tensor) -> None:
    require(
        bool(values.isfinite().all()),
        "an expert holds weights that are no finite numbers, which a quantised format cannot hold: choose bf16",
    )


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices))
