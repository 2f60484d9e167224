"""Strategies, budgets and machines over one trace: which rows there are, and all of them in two processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.core import Progress
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.simulate.replay import foresee
from relume.simulate.rows import Job, Run, Setting, SimulationRow
from relume.simulate.second_process import second_process
from relume.strategy.strategies import Strategy
from relume.trace.file import TraceReader
from relume.trace.profile import read_model_profile

BOUND = "belady"
#: Layer events from which a second process saves more than it costs.
WORTH_A_PROCESS = 50_000
#: Budgets by their text: slots in all, which a strategy shares among layers, or of each layer.
Budgets = Mapping[str, int | tuple[int, ...]]


@dataclass(frozen=True)
class Matrix:
    """Jobs over one trace, all of which make sense.

    Attributes:
        setting: what they have in common.
        jobs: by machine, by budget and then by strategy; `full` once a machine and first, the bound last.
        notes: what a user should know, a line each.
    """

    setting: Setting
    jobs: tuple[Job, ...]
    notes: tuple[str, ...]

    def run(self, progress: Progress, worth_a_process: int = WORTH_A_PROCESS) -> tuple[SimulationRow, ...]:
        """A row of each job, in order.

        Args:
            progress: told of forwards times jobs.
            worth_a_process: layer events from which a second process takes half of the jobs.

        Raises:
            RelumeError: the trace is damaged, or memory runs out.
        """
        reader, jobs = TraceReader(self.setting.path), self.jobs
        shape = reader.metadata.shape
        ordinary = [index for index, job in enumerate(jobs) if job.strategy != BOUND]
        first = len(ordinary) - len(jobs) // 2
        long = reader.num_forwards * shape.num_layers >= worth_a_process
        theirs = ordinary[max(0, first) :] if long else []  # the bound stays here, with its future
        mine = [index for index in range(len(jobs)) if index not in theirs]
        total = reader.num_forwards * len(jobs)
        share = [jobs[index] for index in theirs]
        with second_process(self.setting, share, lambda added: progress(added, total)) as (poll, finish):
            future = foresee(reader, shape) if len(ordinary) < len(jobs) else None

            def tick(count: int) -> None:
                progress(count + poll(), total)

            rows = self.setting.rows([jobs[index] for index in mine], future, tick)
            rows += finish()
        by_index = dict(zip([*mine, *theirs], rows, strict=True))
        return tuple(by_index[index] for index in range(len(jobs)))


def setting_of(
    reader: TraceReader,
    profile: Path | None = None,
    shared: bool = False,
    work: WorkShape | None = None,
    as_recorded: bool = False,
) -> Setting:
    """What a trace's jobs have in common; `work` gets as many layers as the trace has, or is the trace's own."""
    metadata = reader.metadata
    expert_bytes = metadata.expert_bytes
    if work is not None:
        work, expert_bytes = work.with_moe_layers(metadata.shape.num_layers), work.expert_bytes
    work, recorded = work or metadata.work, (metadata.costs, metadata.intervals)
    return Setting(reader.path, shared, profile, expert_bytes, work, as_recorded, *recorded)


def make_matrix(
    setting: Setting,
    strategies: Sequence[str],
    budgets: Budgets,
    machines: Sequence[Hardware | None] = (None,),
    bound: bool = True,
) -> Matrix:
    """Every strategy at every budget on every machine; `full` once a machine, whatever the budgets.

    Args:
        setting: of the trace.
        strategies: as `Strategy.parse` reads them.
        budgets: by their text.
        machines: that charge their time; on `None` no time passes.
        bound: whether Belady's bound is replayed too.

    Raises:
        RelumeError: the trace or the profile cannot be used, or a strategy or budget makes no sense for it.
    """
    metadata = TraceReader(setting.path).metadata
    shape = metadata.shape
    names = [name for name in dict.fromkeys(strategies) if name != BOUND]
    everything = [name for name in names if Strategy.parse(name).retention == "full"]
    names = [name for name in names if name not in everything] + ([BOUND] if bound else [])
    all_slots = shape.num_layers * shape.num_experts
    jobs: list[Job] = []
    notes: list[str | None] = []
    for machine in machines:
        jobs += [Job(name, "100%", all_slots, machine) for name in everything]
        jobs += [Job(name, text, slots, machine) for text, slots in budgets.items() for name in names]
        asked: Budgets = ({"100%": all_slots} if everything else {}) | dict(budgets)
        notes += [_too_much(machine, slots, setting.expert_bytes, text) for text, slots in asked.items()]
    found = None if setting.profile is None else read_model_profile(setting.profile, shape)
    for job in jobs:
        if job.strategy != BOUND:  # refuse what makes no sense before the long work
            notes += Run(setting, job, shape, found, None).notes
    if found is not None and found.model not in {"", metadata.model}:
        notes.append(
            f"{setting.profile}: the profile is of {found.model}, {setting.path} a trace of {metadata.model}"
        )
    return Matrix(setting, tuple(jobs), tuple(dict.fromkeys(note for note in notes if note)))


def _too_much(hardware: Hardware | None, slots: int | tuple[int, ...], expert_bytes: int, text: str) -> str | None:
    """What is wrong with a budget that the simulated device's memory does not hold, in one line."""
    needed = expert_bytes * (slots if isinstance(slots, int) else sum(slots))
    if hardware is None or hardware.link_is_disk or needed <= hardware.si("device.memory"):
        return None
    name = hardware.name.partition(":")[0]  # of all that differ in a constant
    return (
        f"experts of {text} take {needed / 2**30:.1f} GiB, more than {name} has: its times are what they would be "
        "with more memory"
    )
