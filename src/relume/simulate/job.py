"""Strategies times budgets over one trace, in two processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.core import Progress
from relume.simulate.replay import foresee
from relume.simulate.rows import Job, Setting, SimulationRow
from relume.simulate.second_process import second_process
from relume.strategy.budget import ExpertMemory, shared_pool_warning, uniform
from relume.trace.file import TraceReader
from relume.trace.profile import Profile

BOUND = "belady"
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
    worth_a_process: int = _WORTH_A_PROCESS,
) -> Simulation:
    """Replay a trace file through every strategy at every budget, and through Belady's bound.

    Args:
        path: of the trace.
        strategies: names in `RETENTIONS`.
        memories: budgets as `ExpertMemory.parse` reads them, uniform over the layers.
        progress: told of forwards times jobs.
        profile: file with the popularity that some strategies need.
        shared: one pool for all layers.
        worth_a_process: layer events from which a second process takes half of the jobs.

    Raises:
        RelumeError: the trace or the profile cannot be used, or a strategy or budget makes no sense for it.
    """
    reader = TraceReader(path)
    shape, expert_bytes = reader.metadata.shape, reader.metadata.expert_bytes
    setting = Setting(path, shared, None if profile is None else Profile.load(profile, shape).popularity)
    names = [*dict.fromkeys(name for name in strategies if name != BOUND), BOUND]
    budgets = {text: ExpertMemory.parse(text).total_slots(shape, expert_bytes) for text in memories}
    jobs = [Job(name, text, tuple(uniform(slots, shape))) for text, slots in budgets.items() for name in names]
    ordinary = [job for job in jobs if job.strategy != BOUND]
    for job in ordinary:
        setting.run(job, None)  # refuse what makes no sense before the long work
    notes: list[str | None] = []
    if shared:
        mean_active = Profile.from_records(reader, shape).mean_active
        notes = [shared_pool_warning(slots, mean_active) for slots in budgets.values()]
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
