"""What packing made, and how far its experts are from the original ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from relume.checkpoint.pack import Pack
from relume.experts.formats import DenseFormat, ExpertFormat
from relume.experts.source import ExpertSource

#: Experts and random tokens that the error is measured with.
NUM_SAMPLES, NUM_TOKENS = 16, 64


@dataclass(frozen=True)
class PackReport:
    """What packing made.

    Attributes:
        path: of the folder.
        experts: `bf16`, `int8` or `int4`; `group_size` of `int4`.
        num_experts: over all layers.
        bytes_per_expert: as computed with; `source_bytes_per_expert` as the source stores it.
        expert_bytes: of all files of experts.
        num_bytes: of the whole folder.
        num_kept: experts that an earlier run had packed.
        lossless: the experts are those of the source.
        relative_error_mean, relative_error_max: of the sampled experts' outputs, see `relative_errors`.
        sampled_experts: how many were sampled.
        wall_s: seconds that it took.
    """

    path: str
    experts: str
    group_size: int | None
    num_experts: int
    bytes_per_expert: int
    source_bytes_per_expert: int
    expert_bytes: int
    num_bytes: int
    num_kept: int
    lossless: bool
    relative_error_mean: float
    relative_error_max: float
    sampled_experts: int
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self) | {"kind": "measured"}


def make_report(
    out: Path, pack: Pack, source_bytes_per_expert: int, num_kept: int, errors: Sequence[float], wall_s: float
) -> PackReport:
    """Put together what is known at the end."""
    return PackReport(
        path=str(out),
        experts=pack.name,
        group_size=pack.group_size,
        num_experts=pack.num_layers * pack.num_experts,
        bytes_per_expert=pack.expert_bytes,
        source_bytes_per_expert=source_bytes_per_expert,
        expert_bytes=pack.num_bytes,
        num_bytes=sum(path.stat().st_size for path in out.iterdir()),
        num_kept=num_kept,
        lossless=pack.lossless,
        relative_error_mean=sum(errors) / len(errors),
        relative_error_max=max(errors),
        sampled_experts=len(errors),
        wall_s=wall_s,
    )


def relative_errors(
    pack: Pack, original: ExpertSource, packed: ExpertSource, expert_format: ExpertFormat
) -> list[float]:
    """RMS of the difference to the original expert's outputs over their RMS, for experts spread over the model.

    Tokens are drawn from a normal distribution. Both compute in float32, the original with its weights rounded to
    bfloat16: what differs is what the format lost.

    Args:
        pack: says which experts there are.
        original: fills slots of `DenseFormat` in bfloat16.
        packed: fills slots of `expert_format`.
        expert_format: of the packed experts.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TOKENS, pack.hidden_size, generator=generator)
    dense = DenseFormat(pack.hidden_size, pack.expert_size, torch.bfloat16)
    slots = [torch.zeros(f.slot_bytes, dtype=torch.uint8) for f in (dense, expert_format)]
    weights, views = dense.views(slots[0]), expert_format.views(slots[1])
    everything = pack.num_layers * pack.num_experts
    number = min(NUM_SAMPLES, everything)
    errors = []
    for sample in range(number):
        layer, expert = divmod(sample * everything // number, pack.num_experts)
        original.read(layer, expert, weights)
        packed.read(layer, expert, views)
        wanted = dense.compute(x, tuple(weight.float() for weight in weights))
        stored = tuple(view.float() for view in views) if isinstance(expert_format, DenseFormat) else views
        difference = expert_format.compute(x, stored) - wanted
        errors.append(float(difference.norm() / wanted.norm().clamp_min(1e-30)))
    return errors
