"""`relume bench`: strategies next to each other, taken apart, and under other conditions; all of it simulated."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.simulate import check_names, parts_of, work_of
from relume.cli.terminal import item_progress, note
from relume.core import RelumeError
from relume.machine.threads import numpy_on_one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relume.machine.hardware import Hardware
    from relume.machine.work import WorkShape
    from relume.simulate.groups import Group

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compare strategies on traces and simulated machines, as the OLED-MoE paper does on measured ones.",
)

#: Bandwidths in GB/s beside the profile's own one.
_LINKS = (8.0, 16.0, 32.0, 64.0)


@bench.callback()
def prepare_process() -> None:
    """Before numpy is imported."""
    numpy_on_one_thread()


class Vary(enum.StrEnum):
    """What a sensitivity is to."""

    BUDGET = "budget"
    LINK = "link"
    TRACE = "trace"


Traces = Annotated[list[Path], typer.Argument(help="Trace files; relume trace makes one.")]
HardwareNames = Annotated[
    str, typer.Option(help="Separated by commas: rtx4090, a100-40, ..., this, or a profile's path.")
]
_MEMORY = "Separated by commas: experts per layer as 40, shares as 15.6%, or sizes as 8GiB."
Strategies = Annotated[str | None, typer.Option(help="Separated by commas, as relume simulate has them.")]
Profiles = Annotated[
    str | None,
    typer.Option(help="From relume trace profile: one for all traces, or one for each, separated by commas."),
]
Work = Annotated[
    str | None, typer.Option(help="Charge for the sizes of llada2-mini, ... instead of the traced model's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON document.")]


@bench.command("strategies")
def strategies(
    traces: Traces,
    hardware: HardwareNames = "rtx4090,a100-40",
    expert_memory: Annotated[str, typer.Option(help=_MEMORY)] = "40,100",
    strategy: Strategies = None,
    profile: Profiles = None,
    work: Work = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TPOT and hit rate over the budget; a .png.")] = None,
    json_output: AsJson = False,
) -> None:
    """Set strategies side by side, and OLED's gains next to those of its paper."""
    from relume.cli.bench_tables import print_comparisons, print_strategies
    from relume.simulate.bench import COMPARED
    from relume.simulate.comparisons import compare

    _check_plot(plot)
    names = parts_of(strategy) or list(COMPARED)
    groups = _simulate(traces, names, parts_of(expert_memory), _machines(hardware), profile, work)
    for group in groups:
        print_strategies(group)
    comparisons = [found for group in groups if (found := compare(group)) is not None]
    print_comparisons(comparisons)
    if plot is not None:
        from relume.figures.budgets import draw_budgets

        draw_budgets(groups, plot)
        typer.echo(f"{plot}: TPOT and hit rate over the budget, simulated")
    if json_output:
        rows = [group.to_dict(row) for group in groups for row in group.rows]
        document = {"rows": rows, "comparisons": [comparison.to_dict() for comparison in comparisons]}
        typer.echo(json.dumps(document))


@bench.command("ablation")
def ablation(
    traces: Traces,
    hardware: HardwareNames = "rtx4090",
    expert_memory: Annotated[str, typer.Option(help=_MEMORY)] = "40%",
    profile: Profiles = None,
    work: Work = None,
    json_output: AsJson = False,
) -> None:
    """Take oled and foresight apart: every choice of their components, the others being lru's."""
    from relume.cli.bench_tables import print_ablation
    from relume.simulate.ablation import SYSTEMS, ablate, variants

    names = list(dict.fromkeys(variant.strategy for system in SYSTEMS for variant in variants(system)))
    machines = _machines(hardware)
    groups = _simulate(traces, names, parts_of(expert_memory), machines, profile, work, bound=False)
    results = [(group, budget, ablate(group, budget)) for group in groups for budget in group.budgets]
    for group, budget, found in results:
        print_ablation(group, budget, found)
    if json_output:
        rows = [group.to_dict(result.row) | result.to_dict() for group, _, found in results for result in found]
        typer.echo(json.dumps({"rows": rows}))


@bench.command("sensitivity")
def sensitivity(
    traces: Traces,
    vary: Annotated[Vary, typer.Option(help="What the rows of a table differ in.")] = Vary.BUDGET,
    hardware: HardwareNames = "rtx4090",
    expert_memory: Annotated[
        str | None,
        typer.Option(help=f"{_MEMORY} By default 40%, or 10%,20%,30%,40%,60%,80% if it is varied."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="GB/s of the link, separated by commas; by default 8,16,32,64 and the profile's own."),
    ] = None,
    strategy: Strategies = None,
    profile: Profiles = None,
    work: Work = None,
    json_output: AsJson = False,
) -> None:
    """Vary the budget, the bandwidth of the link, or what was traced: batch sizes, block lengths."""
    from relume.cli.bench_tables import print_sensitivity
    from relume.simulate.bench import with_links

    machines = _machines(hardware)
    if link is not None and vary is not Vary.LINK:
        raise typer.BadParameter("--link is for --vary link")
    if vary is Vary.LINK:
        given = _bandwidths(link)
        machines = [varied for machine in machines for varied in with_links(machine, given or _links_of(machine))]
    memories = parts_of(expert_memory) or (
        ["10%", "20%", "30%", "40%", "60%", "80%"] if vary is Vary.BUDGET else ["40%"]
    )
    names = parts_of(strategy) or ["lru", "oled", "foresight"]
    groups = _simulate(traces, names, memories, machines, profile, work)
    print_sensitivity(groups, names, vary)
    if json_output:
        rows = [group.to_dict(row) for group in groups for row in group.rows]
        typer.echo(json.dumps({"varied": vary.value, "rows": rows}))


@bench.command("tide")
def tide(
    traces: Traces,
    hardware: HardwareNames = "rtx4060,rtx4090,a100-40,h100-80",
    expert_memory: Annotated[str, typer.Option(help=_MEMORY)] = "12.5%,25%,50%",
    profile: Profiles = None,
    work: Work = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time over the interval, too; a .png.")] = None,
    json_output: AsJson = False,
) -> None:
    """Solve TIDE's refresh interval from a profile, and simulate every interval to compare."""
    from relume.cli.interval_tables import print_intervals
    from relume.simulate.intervals import compare_intervals

    _check_plot(plot)
    sizes, memories, machines = _sizes(work), parts_of(expert_memory), _machines(hardware)
    rows = []
    for trace, path in zip(traces, _profiles(profile, traces), strict=True):
        if path is None:
            raise typer.BadParameter("give --profile, from which the interval is solved: `relume trace profile`")
        with item_progress(f"replaying {trace.name}") as progress:
            found, notes = compare_intervals(trace, path, memories, machines, sizes, progress)
        rows += found
        for line in notes:
            note(line)
    print_intervals(rows)
    if plot is not None:
        from relume.figures.intervals import curve_of, draw_intervals

        draw_intervals([curve_of(row) for row in rows], plot)
        typer.echo(f"{plot}: time over the interval, simulated and predicted")
    if json_output:
        typer.echo(json.dumps({"rows": [row.to_dict() for row in rows]}))


@bench.command("tide-paper")
def tide_paper(
    trace: Annotated[Path, typer.Argument(help="A trace of 256 experts a layer; relume trace synth makes one.")],
    profile: Annotated[Path, typer.Option(help="From relume trace profile, of the same model's other requests.")],
    json_output: AsJson = False,
) -> None:
    """Simulate the table of TIDE's paper, and show both baselines next to its figures."""
    from relume.cli.interval_tables import print_paper
    from relume.machine.hardware import load_hardware
    from relume.simulate.tide_paper import reproduce

    with item_progress("replaying") as progress:
        rows, notes = reproduce(trace, profile, load_hardware, work_of, progress)
    for line in notes:
        note(line)
    print_paper(rows)
    if json_output:
        typer.echo(json.dumps({"rows": [row.to_dict() for row in rows]}))


def _simulate(
    traces: Sequence[Path],
    strategies: Sequence[str],
    memories: Sequence[str],
    machines: Sequence[Hardware],
    profile: str | None,
    work: str | None,
    bound: bool = True,
) -> list[Group]:
    """Groups by trace and then by machine; everything is looked at before the first long work."""
    from relume.simulate.bench import prepare, without_profile

    try:
        check_names(strategies, memories)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    sizes, each = _sizes(work), _profiles(profile, traces)
    benches = [
        prepare(trace, strategies, memories, machines, found, sizes, bound)
        for trace, found in zip(traces, each, strict=True)
    ]
    notes = [line for planned in benches for line in planned.matrix.notes]
    if None in each and (line := without_profile(strategies)) is not None:
        notes.append(line)
    for line in dict.fromkeys(notes):
        note(line)
    groups = []
    for planned in benches:
        with item_progress(f"replaying {planned.trace.path.name}") as progress:
            groups += planned.run(progress)
    return groups


def _check_plot(path: Path | None) -> None:
    """Refuse a figure that could not be drawn before the long work."""
    if path is not None:
        from relume.figures.drawing import require_drawing

        require_drawing(path)


def _sizes(work: str | None) -> WorkShape | None:
    try:
        return None if work is None else work_of(work)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None


def _profiles(text: str | None, traces: Sequence[Path]) -> list[Path | None]:
    """One for each trace."""
    profiles = [Path(part) if part else None for part in parts_of(text)] or [None]
    if len(profiles) not in {1, len(traces)}:
        raise typer.BadParameter(f"{len(profiles)} profiles for {len(traces)} traces: give one, or one for each")
    return profiles * len(traces) if len(profiles) == 1 else profiles


def _machines(names: str) -> list[Hardware]:
    from relume.machine.hardware import load_hardware

    try:
        return [load_hardware(name) for name in dict.fromkeys(parts_of(names))]
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None


def _bandwidths(text: str | None) -> list[float]:
    try:
        return [float(part) for part in parts_of(text)]
    except ValueError:
        raise typer.BadParameter(f"--link {text}: write numbers of GB/s, separated by commas") from None


def _links_of(machine: Hardware) -> list[float]:
    from relume.simulate.groups import LINK

    return sorted({*_LINKS, machine.si(LINK) / 1e9})
