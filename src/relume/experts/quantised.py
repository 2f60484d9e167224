"""What expert formats of fewer bits have in common.

Each weight is codes and scales. Scales are bfloat16 and codes are chosen for the rounded scale, so that float32
and bfloat16 compute with the same weights. torch's kernels unpack within the product and are faster for a few
tokens; for more, unpacking first is. The number of tokens in a call decides: as for unquantised experts, whose
products depend on it too, a call has one request's tokens only.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch

from relume.config import require
from relume.experts.formats import ExpertFormat, Part, Views
from relume.experts.kernels import swiglu_of

#: Weights that are unpacked at a time; a panel depends on the shape alone, so that bits depend on nothing else.
PANEL_WEIGHTS = 1 << 20
#: Scales are at least this, so that a row or group of zeros has one.
SMALLEST_SCALE = 1e-30


class QuantisedFormat(ExpertFormat):
    """Gate-up `[2I, H]`, then down `[H, I]`, each as codes and scales."""

    def __init__(self, hidden: int, size: int) -> None:
        self._shapes = (2 * size, hidden), (hidden, size)
        super().__init__([part for shape in self._shapes for part in self.weight_parts(*shape)])

    @abstractmethod
    def weight_parts(self, rows: int, columns: int) -> tuple[Part, Part]:
        """Codes and scales of a weight `[rows, columns]`."""

    @abstractmethod
    def quantise(self, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill codes and scales from a float32 weight `[rows, columns]`."""

    @abstractmethod
    def linear(self, codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`x W^T` of `[n, columns]`, `[n, rows]` in the dtype of `x`."""

    @abstractmethod
    def kernel_problem(self, rows: int, columns: int) -> str | None:
        """Why torch's kernel cannot multiply by a weight of this shape on this processor; `None` if it can."""

    def fill(self, gate_up: torch.Tensor, down: torch.Tensor, views: Views) -> None:
        """See `ExpertFormat.fill`."""
        for weight, codes, scales in ((gate_up, *views[:2]), (down, *views[2:])):
            require(
                bool(weight.isfinite().all()),
                f"an expert holds weights that are no finite numbers, which {self.name} cannot hold: choose bf16",
            )
            self.quantise(weight.float(), codes, scales)

    def compute(self, x: torch.Tensor, views: Views) -> torch.Tensor:
        """See `ExpertFormat.compute`."""
        return swiglu_of(x, partial(self.linear, *views[:2]), partial(self.linear, *views[2:]))

    def slower_because(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `ExpertFormat.slower_because`."""
        if device.type != "cpu":
            return f"there is no kernel for {self.name} on this device"
        if dtype != torch.bfloat16:
            return f"torch's kernel for {self.name} is fast in bfloat16 only"
        problems = [self.kernel_problem(*shape) for shape in self._shapes]
        return next((problem for problem in problems if problem is not None), None)

    def panel_rows(self, columns: int, multiple: int = 1) -> int:
        """Rows of a weight that are unpacked at a time."""
        return max(1, PANEL_WEIGHTS // (columns * multiple)) * multiple

    def use_kernel(self, x: torch.Tensor, rows: int, most_tokens: int) -> bool:
        """Whether torch's kernel multiplies `x` `[n, columns]` by a weight of so many rows."""
        suits = x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= most_tokens
        return suits and self.kernel_problem(rows, x.shape[1]) is None
