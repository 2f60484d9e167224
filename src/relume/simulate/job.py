"""What `relume simulate` does: a trace as it was recorded, or through strategies and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.config import require
from relume.core import Progress
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.matrix import WORTH_A_PROCESS, Budgets, make_matrix, setting_of
from relume.simulate.rows import Setting, SimulationRow
from relume.strategy.budget import ExpertMemory, explicit, shared_pool_warning
from relume.strategy.use import ExpertShape
from relume.trace.file import TraceReader
from relume.trace.metadata import TraceMetadata
from relume.trace.profile import gather_profile, read_model_profile

#: What is replayed if one of strategies and budgets is named and the other is not.
DEFAULT_STRATEGIES = ("lru", "counts", "oled", "foresight")
DEFAULT_MEMORIES = ("10%", "20%", "40%", "60%")
#: The name of the budget that a trace was recorded with.
RECORDED = "recorded"


@dataclass(frozen=True)
class Simulation:
    """Rows by budget and then by strategy, the bound last; and what a user should know, a line each."""

    rows: tuple[SimulationRow, ...]
    notes: tuple[str, ...]


def simulate(
    path: Path,
    strategies: Sequence[str],
    memories: Sequence[str],
    progress: Progress,
    profile: Path | None = None,
    shared: bool = False,
    layer_slots: str | None = None,
    hardware: Hardware | None = None,
    work: WorkShape | None = None,
    worth_a_process: int = WORTH_A_PROCESS,
) -> Simulation:
    """Replay a trace file through every strategy at every budget, and through Belady's bound.

    Without strategies and without a budget it is the strategy at the budget that the trace was recorded with.

    Args:
        path: of the trace.
        strategies: as `Strategy.parse` reads them; `full` is replayed once, whatever the budgets.
        memories: budgets as `ExpertMemory.parse` reads them.
        progress: told of forwards times jobs.
        profile: file of the model's profile, which some strategies need.
        shared: one pool for all layers.
        layer_slots: a budget instead of `memories`, as `explicit` reads it.
        hardware: charges its time; without it, no time passes and what is prefetched comes in time.
        work: sizes that take that time, instead of the traced model's own; of as many layers as the trace has.
        worth_a_process: layer events from which a second process takes half of the jobs.

    Raises:
        RelumeError: the trace or the profile cannot be used, or a strategy or budget makes no sense for it.
    """
    reader = TraceReader(path)
    metadata = reader.metadata
    shape = metadata.shape
    require(not memories or layer_slots is None, "give the expert memory or the slots of each layer, not both")
    require(not shared or layer_slots is None, "a pool that all layers share has no slots of one layer")
    as_recorded = not strategies and not memories and layer_slots is None
    # Another clock than the recorded one decides anew.
    repeats = as_recorded and hardware is None
    if as_recorded and metadata.profile:
        profile = profile or Path(metadata.profile)
    setting = setting_of(reader, profile, shared or (as_recorded and metadata.shared), work, repeats)
    budgets: Budgets
    if as_recorded:
        strategies, budgets = [metadata.strategy], {RECORDED: _recorded(metadata)}
    elif layer_slots is not None:
        budgets = {layer_slots: tuple(explicit(layer_slots, shape))}
    else:
        budgets = read_budgets(memories or DEFAULT_MEMORIES, shape, setting.expert_bytes)
    matrix = make_matrix(setting, strategies or DEFAULT_STRATEGIES, budgets, (hardware,))
    notes = [*_shared_notes(setting, reader, budgets), *matrix.notes]
    return Simulation(matrix.run(progress, worth_a_process), tuple(notes))


def read_budgets(memories: Sequence[str], shape: ExpertShape, expert_bytes: int) -> Budgets:
    """Budgets as `ExpertMemory.parse` reads them, in slots of all layers together.

    Raises:
        RelumeError: one is no amount, or not of this shape.
    """
    return {text: ExpertMemory.parse(text).total_slots(shape, expert_bytes) for text in memories}


def _shared_notes(setting: Setting, reader: TraceReader, budgets: Budgets) -> list[str]:
    """Of budgets that are too small for a pool that all layers share."""
    if not setting.shared:
        return []
    shape, path = reader.metadata.shape, setting.profile
    profile = gather_profile(reader, shape) if path is None else read_model_profile(path, shape)
    totals = [slots if isinstance(slots, int) else sum(slots) for slots in budgets.values()]
    notes = [shared_pool_warning(total, profile.mean_active) for total in totals]
    return [note for note in notes if note]


def _recorded(metadata: TraceMetadata) -> int | tuple[int, ...]:
    """Slots with which a trace was recorded, of each layer, or in all of a shared pool."""
    return metadata.slots[0] if metadata.shared else metadata.slots
