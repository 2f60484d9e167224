"""How the sample canvases' routing behaves from one iteration to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from relume.synth.canvases import Canvas


@dataclass(frozen=True)
class RoutingStatistics:
    """Routing of one layer, or the mean over layers, on the sample canvases.

    Attributes:
        active_experts, active_sd: distinct experts of a block in an iteration, mean and standard deviation.
        kept_masked, kept_committed, kept_committing: share of a token's experts that it chooses again in the
            next iteration, if it stays masked, was committed before, commits in between. `None`: no such token.
        similarity: cosine similarity of the experts' token counts of adjacent iterations.
        canvas_experts, all_experts: distinct experts over all iterations of a canvas, and over all canvases.
    """

    active_experts: float
    active_sd: float
    kept_masked: float | None
    kept_committed: float | None
    kept_committing: float | None
    similarity: float
    canvas_experts: float
    all_experts: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def expert_counts(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Tokens `[snapshots, experts]` that chose each expert, from `[snapshots, block_length, k]`."""
    return torch.zeros(len(expert_ids), num_experts).scatter_add_(
        1, expert_ids.flatten(1), torch.ones(expert_ids.flatten(1).shape)
    )


def mean_active(snapshots: Sequence[torch.Tensor], num_experts: int) -> float:
    """Distinct experts of a block in an iteration, mean over all canvases' snapshots."""
    return float(torch.cat([(expert_counts(ids, num_experts) > 0).sum(dim=1) for ids in snapshots]).float().mean())


def measure_routing(
    snapshots: Sequence[torch.Tensor], canvases: Sequence[Canvas], num_experts: int
) -> RoutingStatistics:
    """Statistics of one layer from each canvas's expert ids `[snapshots, block_length, k]`."""
    active, used, similar = [], [], []
    kept: dict[str, list[float]] = {"masked": [], "committed": [], "committing": []}
    for ids, canvas in zip(snapshots, canvases, strict=True):
        counts = expert_counts(ids, num_experts)
        active += (counts > 0).sum(dim=1).tolist()
        used.append(counts.sum(dim=0) > 0)
        before, after = counts[0::2], counts[1::2]
        similar += torch.nn.functional.cosine_similarity(before, after, dim=1).tolist()
        again = (ids[0::2].unsqueeze(-1) == ids[1::2].unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)
        was, is_still = canvas.masked[0::2], canvas.masked[1::2]
        kept["masked"] += again[was & is_still].tolist()
        kept["committed"] += again[~was].tolist()
        kept["committing"] += again[was & ~is_still].tolist()
    spread = torch.tensor(active, dtype=torch.float32)
    all_used = torch.stack(used)
    return RoutingStatistics(
        active_experts=float(spread.mean()),
        active_sd=float(spread.std()),
        kept_masked=_mean(kept["masked"]),
        kept_committed=_mean(kept["committed"]),
        kept_committing=_mean(kept["committing"]),
        similarity=sum(similar) / len(similar),
        canvas_experts=float(all_used.sum(dim=1).float().mean()),
        all_experts=float(all_used.any(dim=0).sum()),
    )


def mean_statistics(layers: Sequence[RoutingStatistics]) -> RoutingStatistics:
    """Mean over layers of every figure."""
    values = [layer.to_dict() for layer in layers]
    means = {name: _mean([each[name] for each in values if each[name] is not None]) for name in values[0]}
    return RoutingStatistics(**means)  # type: ignore[arg-type]  # only the kept shares can be None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
