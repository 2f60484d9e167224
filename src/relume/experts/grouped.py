"""All experts of a call in two matrix products, over the slots where they lie: no weight is gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from relume.experts.arena import Arena
from relume.experts.formats import DenseFormat, ExpertFormat
from relume.experts.kernels import swiglu_of

#: Groups of one product on a GPU: torch prepares each with a thread of one block (`GroupMM.cu`).
MOST_GROUPS = 1023
#: What addresses and row lengths must be multiples of, in bytes.
_ALIGNMENT = 16
#: Major compute capabilities for which torch has such a product; for others it loops, and waits for the device.
_CAPABILITIES = (9, 10)


class GroupedExperts:
    """The arena's slots as two stacks of weights. Slots that a call does not use are groups without rows.

    Args:
        arena: of dense experts.
        most_groups: of one product.
    """

    def __init__(self, arena: Arena, most_groups: int = MOST_GROUPS) -> None:
        assert isinstance(arena.format, DenseFormat), "see `grouped_problem`"
        self._gate_up, self._down = arena.format.stacks(arena.memory, arena.num_slots)
        self._most_groups = most_groups

    def windows(self, slots: Sequence[int]) -> list[range]:
        """The fewest stretches of the arena that hold these slots, ascending; each short enough for a product."""
        found: list[range] = []
        for slot in slots:
            if found and slot < found[-1].start + self._most_groups:
                found[-1] = range(found[-1].start, slot + 1)
            else:
                found.append(range(slot, slot + 1))
        return found

    def compute(self, x: torch.Tensor, ends: torch.Tensor, window: range) -> torch.Tensor:
        """Outputs `[n, H]` for tokens `[n, H]` sorted by slot.

        Args:
            x: tokens.
            ends: `[len(window)]` int32, on the same device: where each slot's tokens end.
            window: slots.
        """
        inside = slice(window.start, window.stop)
        gate_up, down = self._gate_up[inside], self._down[inside]
        return swiglu_of(
            x,
            lambda rows: F.grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends),
            lambda rows: F.grouped_mm(rows, down.transpose(-2, -1), offs=ends),
        )


def window_ends(window: range, slots: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """`ends` as `GroupedExperts.compute` wants them, for the slots that have tokens."""
    counts = torch.zeros(len(window), dtype=torch.int64)
    counts[torch.tensor(slots) - window.start] = torch.tensor(lengths)
    return counts.cumsum(0).to(torch.int32)


def grouped_problem(expert_format: ExpertFormat, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why experts of this format cannot be computed so on `device`; `None` if they can."""
    if not isinstance(expert_format, DenseFormat):
        return f"there is no grouped product of {expert_format.name} experts"
    if any(size * dtype.itemsize % _ALIGNMENT for size in expert_format.sizes):
        return f"rows of {' and '.join(map(str, expert_format.sizes))} numbers are not aligned"
    if device.type == "cuda":
        if dtype != torch.bfloat16:
            return "torch's grouped product is for bfloat16"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in _CAPABILITIES:
            return f"torch's grouped product needs compute capability 9 or 10, and this GPU has {major}.{minor}"
    return None


def grouped_for(
    arena: Arena, dtype: torch.dtype, device: torch.device, fallbacks: list[str]
) -> GroupedExperts | None:
    """What computes the arena's experts on a GPU, or `None` and a line in `fallbacks`; never on a CPU.

    There each expert is computed by itself over each request's tokens, which gives the same bits in any company.
    """
    if device.type == "cpu":
        return None
    problem = grouped_problem(arena.format, dtype, device)
    if problem is not None:
        fallbacks.append(f"experts are computed one by one, which takes more launches: {problem}")
        return None
    return GroupedExperts(arena)
