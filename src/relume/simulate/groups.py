"""Rows that belong together: those of one trace on one machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relume.core import Phase
from relume.machine.hardware import Hardware
from relume.simulate.rows import SimulationRow
from relume.trace.file import TraceReader
from relume.trace.views import phase_of

FULL = "full"
LINK = "link.bandwidth"


@dataclass(frozen=True)
class TraceLabel:
    """What tells traces apart; `None` where there is no denoising forward.

    Attributes:
        path: of the file.
        num_experts: of a layer.
        block_length: mean over denoised blocks' forwards; requests of one trace may differ.
        requests_per_forward: that were decoded together, mean over denoising forwards.
    """

    path: Path
    num_experts: int
    block_length: float | None
    requests_per_forward: float | None


def label_of(reader: TraceReader) -> TraceLabel:
    """The label of a trace. Reads all of it."""
    requests, lengths = [], []
    for record in reader:
        if phase_of(record) is Phase.DENOISE:
            requests.append(len(record.spans))
            lengths += [span.block_length for span in record.spans if span.phase is Phase.DENOISE]
    return TraceLabel(reader.path, reader.metadata.shape.num_experts, _mean(lengths), _mean(requests))


@dataclass(frozen=True)
class Group:
    """Rows of one trace on one machine, by budget and then by strategy; `full` first, where it is among them."""

    trace: TraceLabel
    hardware: Hardware
    rows: tuple[SimulationRow, ...]

    @property
    def title(self) -> str:
        """File and machine."""
        return f"{self.trace.path.name}, {self.hardware.name}"

    @property
    def budgets(self) -> list[str]:
        """As they were asked for, in order; that of `full` is none of them."""
        return list(dict.fromkeys(row.expert_memory for row in self.rows if row.strategy != FULL))

    @property
    def full(self) -> SimulationRow | None:
        """Full residency, where it was simulated."""
        return next((row for row in self.rows if row.strategy == FULL), None)

    @property
    def link_gb_s(self) -> float | None:
        """Bandwidth of the link in GB/s; `None` if the machine has none."""
        return self.hardware.si(LINK) / 1e9 or None

    def row(self, strategy: str, budget: str) -> SimulationRow | None:
        """One of them, where it is there."""
        found = (row for row in self.rows if (row.strategy, row.expert_memory) == (strategy, budget))
        return next(found, None)

    def over_full(self, row: SimulationRow) -> float | None:
        """A row's time per token / that of full residency; `None` where one of them is missing."""
        return None if self.full is None else ratio(row.tpot_ms, self.full.tpot_ms)

    def to_dict(self, row: SimulationRow) -> dict[str, Any]:
        """A row for JSON, with what it is of."""
        return row.to_dict() | {
            "tpot_over_full": self.over_full(row),
            "trace": str(self.trace.path),
            "block_length": self.trace.block_length,
            "requests_per_forward": self.trace.requests_per_forward,
            "link_gb_s": self.link_gb_s,
        }


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient; `None` if a side is missing or the lower one is 0."""
    return above / below if above is not None and below else None


def _mean(numbers: list[int]) -> float | None:
    return float(np.mean(numbers)) if numbers else None
