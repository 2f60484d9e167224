"""Traces through strategies, budgets and machines: what `relume bench` simulates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relume.config import require
from relume.core import Progress, RelumeError
from relume.machine.hardware import Hardware, ProfiledHardware
from relume.machine.work import WorkShape
from relume.simulate.groups import FULL, LINK, Group, TraceLabel, label_of
from relume.simulate.job import read_budgets
from relume.simulate.matrix import Matrix, make_matrix, setting_of
from relume.strategy.budget import ExpertMemory
from relume.strategy.strategies import Strategy
from relume.trace.file import TraceReader

#: What is compared unless something else is asked for.
COMPARED = (
    *("lru", "moe-infinity", "finemoe", "hybrimoe", "fiddler", "fiddler-max"),
    *("freetoken", "tide", "oled", "foresight"),
)
#: Retentions that cannot do without a profile; and parts of a strategy that do worse without one.
_NEED_PROFILE = {"static"}
_LIKE_PROFILE = {"oled", "foresight", "tide", "activation", "marginal", "refresh"}


@dataclass(frozen=True)
class TraceBench:
    """What is to be simulated of one trace.

    Attributes:
        trace: of it.
        machines: that charge their time, each for a `Group`.
        matrix: all rows.
    """

    trace: TraceLabel
    machines: tuple[Hardware, ...]
    matrix: Matrix

    def run(self, progress: Progress) -> list[Group]:
        """Rows by machine; `progress` is told of forwards times rows."""
        rows = self.matrix.run(progress)
        each = len(rows) // len(self.machines)
        return [
            Group(self.trace, machine, rows[number * each : (number + 1) * each])
            for number, machine in enumerate(self.machines)
        ]


def prepare(
    path: Path,
    strategies: Sequence[str],
    memories: Sequence[str],
    machines: Sequence[Hardware],
    profile: Path | None = None,
    work: WorkShape | None = None,
    bound: bool = True,
) -> TraceBench:
    """Every strategy at every budget on every machine, and full residency on every machine.

    Args:
        path: of the trace.
        strategies: as `Strategy.parse` reads them.
        memories: budgets as `ExpertMemory.parse` reads them.
        machines: that charge their time, at least one.
        profile: file of the model's profile.
        work: sizes that take time, instead of the traced model's own.
        bound: whether Belady's bound is replayed too.

    Raises:
        RelumeError: something cannot be used or makes no sense for this trace, which is named.
    """
    reader = TraceReader(path)
    setting = setting_of(reader, profile, work=work)
    shape = reader.metadata.shape
    lacking = [name for name in strategies if Strategy.parse(name).retention in _NEED_PROFILE]
    require(
        not lacking or profile is not None,
        f"{path}: {', '.join(lacking)}: these need to know which experts are popular: give --profile a file made "
        "with `relume trace profile TRACE PROFILE`, or name other strategies with --strategy",
    )
    too_many = [text for text in memories if (ExpertMemory.parse(text).slots or 0) > shape.num_experts]
    require(
        not too_many,
        f"{path}: expert memory {', '.join(too_many)}: a layer has only {shape.num_experts} experts: give "
        "--expert-memory in shares, as 15.6%,39.1%",
    )
    try:
        budgets = read_budgets(memories, shape, setting.expert_bytes)
        matrix = make_matrix(setting, [FULL, *strategies], budgets, machines, bound)
    except RelumeError as error:
        raise RelumeError(f"{path}: {error}") from None
    return TraceBench(label_of(reader), tuple(machines), matrix)


def without_profile(strategies: Sequence[str]) -> str | None:
    """What is lost by having no profile, in one line; `None` if nothing is."""
    parsed = [(name, Strategy.parse(name)) for name in strategies]
    names = [name for name, strategy in parsed if {strategy.retention, strategy.budget} & _LIKE_PROFILE]
    if not names:
        return None
    return (
        f"{', '.join(names)} begin without a profile: they learn from the trace as it passes, and all layers get "
        "as many slots; --profile takes a file made from other prompts"
    )


def with_links(machine: Hardware, bandwidths: Sequence[float]) -> list[Hardware]:
    """The machine with each of these bandwidths of its link, in GB/s.

    Raises:
        RelumeError: it has no link, or a bandwidth is not positive.
    """
    if not isinstance(machine, ProfiledHardware):
        raise RelumeError(
            f"hardware {machine.name!r} has no link whose bandwidth could vary, as its processor is the device: "
            "choose a profile such as rtx4090"
        )
    return [machine.with_constant(LINK, bandwidth, "GB/s", "assumed: varied") for bandwidth in bandwidths]
