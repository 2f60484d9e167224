"""What a synthesis made, and what it measured next to what trained models show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relume.config import ModelConfig
from relume.synth.canvases import TOKENS_PER_ITERATION, expected_commits
from relume.synth.head import THRESHOLD
from relume.synth.measure import RoutingStatistics, mean_statistics
from relume.synth.routers import TRAINED_ACTIVE, random_active, target_active, trained_share

_FORESIGHT = "a block-diffusion model of 6.4 M parameters, 64 experts, top-4, block 16"


@dataclass(frozen=True)
class Target:
    """What a figure should be near: a range and where it was seen."""

    low: float
    high: float
    source: str


@dataclass(frozen=True)
class SynthReport:
    """A finished synthesis.

    All routing figures are measured on sample canvases with the weights as written; `tokens_per_iteration` is an
    expectation from the confidences on them.

    Attributes:
        path: the folder.
        like, seed: what was asked for.
        num_bytes, num_tensors, num_experts: of the whole checkpoint.
        wall_s: seconds it took.
        num_canvases, num_iterations: the sample that was measured.
        routing: mean over MoE layers.
        layers: each MoE layer.
        tokens_per_iteration: expected with the `threshold` decoder at `threshold`.
        targets: by name of the figure, in `routing` or here.
    """

    path: Path
    like: str
    seed: int
    num_bytes: int
    num_tensors: int
    num_experts: int
    wall_s: float
    num_canvases: int
    num_iterations: int
    routing: RoutingStatistics
    layers: Sequence[RoutingStatistics]
    tokens_per_iteration: float
    threshold: float
    targets: dict[str, Target]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; `kind` says that the figures were measured."""
        return asdict(self) | {"path": str(self.path), "kind": "measured"}


def make_report(
    path: Path,
    like: str,
    seed: int,
    config: ModelConfig,
    size: tuple[int, int],
    wall_s: float,
    sample: tuple[int, int],
    layers: Sequence[RoutingStatistics],
    tokens_per_iteration: float,
) -> SynthReport:
    """Put a report together; `size` is (bytes, tensors), `sample` (canvases, block-iterations)."""
    return SynthReport(
        path=path,
        like=like,
        seed=seed,
        num_bytes=size[0],
        num_tensors=size[1],
        num_experts=len(config.moe_layers) * config.router.num_experts,
        wall_s=wall_s,
        num_canvases=sample[0],
        num_iterations=sample[1],
        routing=mean_statistics(layers),
        layers=tuple(layers),
        tokens_per_iteration=tokens_per_iteration,
        threshold=THRESHOLD,
        targets=make_targets(config),
    )


def make_targets(config: ModelConfig) -> dict[str, Target]:
    """Targets for a model's shape, each with its source."""
    router, block = config.router, config.block_length
    active = target_active(router, block)
    spread = 12.0 / TRAINED_ACTIVE * active
    at_random = random_active(router.num_experts, router.top_k, block)
    source = (
        f"LLaDA2.0-mini uses {TRAINED_ACTIVE:.0f} +- 12 of 256 experts in a 32-token block, 163 if tokens chose "
        f"at random (dMoE, tables 1, 2 and 4); this shape at random: {at_random:.0f}, of which "
        f"{trained_share(block):.2f} at this block length"
    )
    if router.capacity and active > router.capacity:
        active, spread = float(router.capacity), 0.0
        source = f"the expert capacity of {router.capacity}"
    commits = expected_commits(block)
    return {
        "active_experts": Target(active - spread, active + spread, source),
        "kept_masked": Target(0.83, 0.91, _FORESIGHT),
        "kept_committed": Target(0.92, 0.92, _FORESIGHT),
        "kept_committing": Target(0.17, 0.22, _FORESIGHT),
        "similarity": Target(0.98, 0.99, "LLaDA2 with 32-token blocks as measured for TIDE (0.985)"),
        "tokens_per_iteration": Target(
            commits, commits, f"LLaDA2.0-mini: {TOKENS_PER_ITERATION} in a 32-token block; linear down to 1 of 1"
        ),
    }
