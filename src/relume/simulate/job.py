"""Strategies times budgets over one trace, in two processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.config import require
from relume.core import Progress
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.replay import foresee
from relume.simulate.rows import Job, Run, Setting, SimulationRow
from relume.simulate.second_process import second_process
from relume.strategy.budget import ExpertMemory, explicit, shared_pool_warning
from relume.trace.file import TraceReader
from relume.trace.metadata import TraceMetadata
from relume.trace.profile import gather_profile, read_model_profile

BOUND = "belady"
#: What is replayed if one of strategies and budgets is named and the other is not.
DEFAULT_STRATEGIES = ("lru", "counts", "oled", "foresight")
DEFAULT_MEMORIES = ("10%", "20%", "40%", "60%")
#: The name of the budget that a trace was recorded with.
RECORDED = "recorded"
#: Layer events below which a second process costs more than it saves.
_WORTH_A_PROCESS = 50_000


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
    worth_a_process: int = _WORTH_A_PROCESS,
) -> Simulation:
    """Replay a trace file through every strategy at every budget, and through Belady's bound.

    Without strategies and without a budget it is the strategy at the budget that the trace was recorded with.

    Args:
        path: of the trace.
        strategies: as `Strategy.parse` reads them.
        memories: budgets as `ExpertMemory.parse` reads them.
        progress: told of forwards times jobs.
        profile: file of the model's profile, which some strategies need.
        shared: one pool for all layers.
        layer_slots: a budget instead of `memories`, as `explicit` reads it.
        hardware: charges its time; without it, no time passes and what is prefetched comes in time.
        work: sizes that take that time, instead of the traced model's own.
        worth_a_process: layer events from which a second process takes half of the jobs.

    Raises:
        RelumeError: the trace or the profile cannot be used, or a strategy or budget makes no sense for it.
    """
    reader = TraceReader(path)
    metadata = reader.metadata
    shape, expert_bytes = metadata.shape, metadata.expert_bytes
    require(not memories or layer_slots is None, "give the expert memory or the slots of each layer, not both")
    require(not shared or layer_slots is None, "a pool that all layers share has no slots of one layer")
    as_recorded = not strategies and not memories and layer_slots is None
    budgets: dict[str, int | tuple[int, ...]]
    if as_recorded:
        strategies, budgets = [metadata.strategy], {RECORDED: _recorded(metadata)}
        shared = shared or metadata.shared
    elif layer_slots is not None:
        budgets = {layer_slots: tuple(explicit(layer_slots, shape))}
    else:
        budgets = {
            text: ExpertMemory.parse(text).total_slots(shape, expert_bytes)
            for text in memories or DEFAULT_MEMORIES
        }
    # Another clock than the recorded one decides anew.
    repeats = as_recorded and hardware is None
    setting = Setting(path, shared, profile, hardware, work or metadata.work, repeats)
    names = [*dict.fromkeys(name for name in strategies or DEFAULT_STRATEGIES if name != BOUND), BOUND]
    jobs = [Job(name, text, slots) for text, slots in budgets.items() for name in names]
    ordinary = [job for job in jobs if job.strategy != BOUND]
    found = None if profile is None else read_model_profile(profile, shape)
    for job in ordinary:
        Run(setting, job, shape, found, None)  # refuse what makes no sense before the long work
    notes: list[str | None] = []
    if shared:
        mean_active = (found or gather_profile(reader, shape)).mean_active
        totals = [slots if isinstance(slots, int) else sum(slots) for slots in budgets.values()]
        notes = [shared_pool_warning(total, mean_active) for total in totals]
    theirs = ordinary[-(len(jobs) // 2) :] if reader.num_forwards * shape.num_layers >= worth_a_process else []
    mine = [job for job in jobs if job not in theirs]
    total = reader.num_forwards * len(jobs)
    with second_process(setting, theirs, lambda added: progress(added, total)) as (poll, finish):
        future = foresee(reader, shape)

        def tick(count: int) -> None:
            progress(count + poll(), total)

        rows = setting.rows(mine, future, tick)
        rows += finish()
    by_job = dict(zip([*mine, *theirs], rows, strict=True))
    return Simulation(tuple(by_job[job] for job in jobs), tuple(note for note in notes if note))


def _recorded(metadata: TraceMetadata) -> int | tuple[int, ...]:
    """Slots with which a trace was recorded, of each layer, or in all of a shared pool."""
    return metadata.slots[0] if metadata.shared else metadata.slots
