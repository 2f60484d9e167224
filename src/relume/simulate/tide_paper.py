"""TIDE's table, simulated: the same machines, models and budgets, next to what its paper measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relume.config import require
from relume.core import Progress
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.intervals import known
from relume.simulate.matrix import make_matrix, setting_of
from relume.simulate.rows import SimulationRow
from relume.trace.file import TraceReader

#: Where the published figures are from; we know them from summaries.
PAPER = "arXiv 2605.20179"
#: That its abstract names, for mini and flash, over a baseline that we could not identify.
PAPER_HEADLINE = {"llada2-mini": 1.4, "llada2-flash": 1.5}
NUM_EXPERTS = 256
TIDE = "tide"
#: The paper's two baselines, as we build them, and each with the other way of treating a miss.
BASELINES = ("refresh-always", "static:dispatch=host", "tide:interval=1", "static")


@dataclass(frozen=True)
class PaperCell:
    """One line of the paper's table, in tokens a second.

    Attributes:
        hardware, work: profile and model.
        slots: resident experts of each layer.
        tide, best_baseline: measured by the paper.
        baseline: which of its baselines was the better one.
    """

    hardware: str
    work: str
    slots: int
    tide: float
    best_baseline: float
    baseline: str


CELLS = (
    PaperCell("a100-40", "llada2-mini", 128, 2.44, 1.91, "Mixtral-Offload"),
    PaperCell("a100-40", "llada2-mini", 64, 2.11, 1.81, "Fiddler"),
    PaperCell("h100-80", "llada2-flash", 64, 1.73, 1.35, "Mixtral-Offload"),
    PaperCell("h100-80", "llada2-flash", 32, 1.24, 1.01, "Mixtral-Offload"),
)


@dataclass(frozen=True)
class PaperRow:
    """A cell as simulated.

    Attributes:
        cell: the paper's.
        tide_ms: time per token, prompts apart.
        gains: a baseline's time per token / TIDE's, by name.
        paper_gain: TIDE's tokens a second / those of the paper's better baseline.
        kind: `simulated`.
    """

    cell: PaperCell
    tide_ms: float
    gains: dict[str, float]
    paper_gain: float
    kind: str = "simulated"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def reproduce(
    path: Path,
    profile: Path,
    load_hardware: Callable[[str], Hardware],
    work_of: Callable[[str], WorkShape],
    progress: Progress,
) -> tuple[list[PaperRow], tuple[str, ...]]:
    """Every cell of the table, with the routing of one trace and as many layers as it has; and notes, a line each.

    Args:
        path: of a trace of 256 experts a layer.
        profile: of the same model, from other requests.
        load_hardware, work_of: by the names of a cell.
        progress: told of forwards times rows.

    Raises:
        RelumeError: the trace or the profile cannot be used.
    """
    reader = TraceReader(path)
    num_experts, num_layers = reader.metadata.shape.num_experts, reader.metadata.shape.num_layers
    require(
        num_experts == NUM_EXPERTS,
        f"{path}: {num_experts} experts a layer, and TIDE's table is of {NUM_EXPERTS}: `relume trace synth` makes "
        "such a trace",
    )
    rows: list[PaperRow] = []
    notes: list[str] = []
    for cell in CELLS:
        setting = setting_of(reader, profile, work=work_of(cell.work))
        budgets = {str(cell.slots): cell.slots * num_layers}
        matrix = make_matrix(setting, [TIDE, *BASELINES], budgets, [load_hardware(cell.hardware)], bound=False)
        notes += matrix.notes
        rows.append(_row(cell, matrix.run(progress)))
    return rows, tuple(dict.fromkeys(notes))


def _row(cell: PaperCell, found: Sequence[SimulationRow]) -> PaperRow:
    times = {row.strategy: known(row.decoding_ms) for row in found}
    gains = {name: times[name] / times[TIDE] for name in BASELINES}
    return PaperRow(cell, times[TIDE], gains, cell.tide / cell.best_baseline)
