"""One row of a simulation: a strategy at a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relume.simulate.replay import Replay, ReplayResult, replay_together
from relume.strategy.retention import RETENTIONS
from relume.strategy.retention.belady import Future
from relume.strategy.retention.context import RetentionContext
from relume.trace.file import TraceReader


@dataclass(frozen=True)
class SimulationRow:
    """One strategy at one budget. `None` where the trace holds nothing to measure.

    Attributes:
        strategy: its name; `belady` is the bound.
        expert_memory: as it was asked for, by memory or by slots of each layer; `recorded` is the trace's own.
        slots_per_layer: mean over layers.
        hit_rate: over denoising forwards; `hit_rate_all` over all.
        utilisation: resident and active / resident, over denoising forwards.
        bytes_per_token: of experts that moved; those loaded before the first forward are `preload_bytes`.
        evictions: experts that left.
        tpot_ms: milliseconds per token; `None`, as no time is simulated yet.
        kind: `simulated`.
    """

    strategy: str
    expert_memory: str
    slots_per_layer: float
    shared: bool
    hit_rate: float | None
    hit_rate_all: float | None
    utilisation: float | None
    bytes_per_token: float | None
    preload_bytes: int
    evictions: int
    tpot_ms: float | None = None
    kind: str = "simulated"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """One row to be: a strategy's name, the budget as it was asked for, and as slots of each layer."""

    strategy: str
    expert_memory: str
    budget: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What all jobs of a simulation have in common.

    Attributes:
        path: of the trace.
        shared: one pool for all layers.
        popularity: `[layers, E]` from a profile, if there is one.
    """

    path: Path
    shared: bool
    popularity: np.ndarray | None

    def run(self, job: Job, future: Future | None) -> Replay:
        """A fresh replay of a job."""
        context = RetentionContext(TraceReader(self.path).metadata.shape, sum(job.budget), self.popularity, future)
        return Replay(RETENTIONS[job.strategy](context), sum(job.budget) if self.shared else job.budget)

    def rows(self, jobs: Sequence[Job], future: Future | None, tick: Callable[[int], None]) -> list[SimulationRow]:
        """Replay jobs together; `tick` is told how many of them took another forward."""
        reader = TraceReader(self.path)
        runs = [self.run(job, future) for job in jobs]
        if runs:
            replay_together(reader, runs, reader.metadata.shape, lambda: tick(len(runs)))
        return [
            self._row(job, run.result(), reader.metadata.expert_bytes) for job, run in zip(jobs, runs, strict=True)
        ]

    def _row(self, job: Job, result: ReplayResult, expert_bytes: int) -> SimulationRow:
        return SimulationRow(
            strategy=job.strategy,
            expert_memory=job.expert_memory,
            slots_per_layer=sum(job.budget) / len(job.budget),
            shared=self.shared,
            hit_rate=result.hit_rate,
            hit_rate_all=result.hit_rate_all,
            utilisation=result.utilisation,
            bytes_per_token=result.bytes_per_token(expert_bytes),
            preload_bytes=result.preloads * expert_bytes,
            evictions=result.evictions,
        )
