"""Strategies times budgets over one trace, in two processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.config import require
from relume.core import Progress
from relume.simulate.replay import foresee
from relume.simulate.rows import Job, Setting, SimulationRow
from relume.simulate.second_process import second_process
from relume.strategy.budget import ExpertMemory, explicit, shared_pool_warning, uniform
from relume.trace.file import TraceReader
from relume.trace.metadata import TraceMetadata
from relume.trace.profile import Profile

BOUND = "belady"
#: What is replayed if one of strategies and budgets is named and the other is not.
DEFAULT_STRATEGIES = ("lru", "lfu", "lfru", "counts")
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
    worth_a_process: int = _WORTH_A_PROCESS,
) -> Simulation:
    """Replay a trace file through every strategy at every budget, and through Belady's bound.

    Without strategies and without a budget it is the strategy at the budget that the trace was recorded with.

    Args:
        path: of the trace.
        strategies: names in `RETENTIONS`.
        memories: budgets as `ExpertMemory.parse` reads them, uniform over the layers.
        progress: told of forwards times jobs.
        profile: file with the popularity that some strategies need.
        shared: one pool for all layers.
        layer_slots: a budget instead of `memories`, as `explicit` reads it.
        worth_a_process: layer events from which a second process takes half of the jobs.

    Raises:
        RelumeError: the trace or the profile cannot be used, or a strategy or budget makes no sense for it.
    """
    reader = TraceReader(path)
    shape, expert_bytes = reader.metadata.shape, reader.metadata.expert_bytes
    require(not memories or layer_slots is None, "give the expert memory or the slots of each layer, not both")
    require(not shared or layer_slots is None, "a pool that all layers share has no slots of one layer")
    if not strategies and not memories and layer_slots is None:
        strategies, budgets = [reader.metadata.strategy], {RECORDED: _recorded(reader.metadata)}
        shared = shared or reader.metadata.shared
    elif layer_slots is not None:
        budgets = {layer_slots: explicit(layer_slots, shape)}
    else:
        totals = {
            text: ExpertMemory.parse(text).total_slots(shape, expert_bytes)
            for text in memories or DEFAULT_MEMORIES
        }
        budgets = {text: uniform(total, shape) for text, total in totals.items()}
    setting = Setting(path, shared, None if profile is None else Profile.load(profile, shape).popularity)
    names = [*dict.fromkeys(name for name in strategies or DEFAULT_STRATEGIES if name != BOUND), BOUND]
    jobs = [Job(name, text, tuple(slots)) for text, slots in budgets.items() for name in names]
    ordinary = [job for job in jobs if job.strategy != BOUND]
    for job in ordinary:
        setting.run(job, None)  # refuse what makes no sense before the long work
    notes: list[str | None] = []
    if shared:
        mean_active = Profile.from_records(reader, shape).mean_active
        notes = [shared_pool_warning(sum(slots), mean_active) for slots in budgets.values()]
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


def _recorded(metadata: TraceMetadata) -> list[int]:
    """Slots of each layer with which a trace was recorded; of a shared pool, an even share."""
    return uniform(metadata.slots[0], metadata.shape) if metadata.shared else list(metadata.slots)
