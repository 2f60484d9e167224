"""`relume simulate`: a trace through strategies and budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.terminal import human_bytes, item_progress, note
from relume.core import RelumeError
from relume.machine.threads import numpy_on_one_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relume.machine.work import WorkShape
    from relume.simulate.rows import SimulationRow


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace file; relume trace makes one.")],
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: lru, oled, foresight, ..., with changes as oled:dispatch=host:decay=0.5. "
            "By default the recorded one, or with a budget lru,counts,oled,foresight."
        ),
    ] = None,
    expert_memory: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: shares as 40%, sizes as 8GiB, or experts per layer as 100. By default what "
            "was recorded, or with a strategy 10%,20%,40%,60%."
        ),
    ] = None,
    layer_slots: Annotated[
        str | None, typer.Option(help="Resident experts of each MoE layer instead, separated by commas.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="From relume trace profile; some strategies need it.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Charge the time of rtx4090, a100-40, ..., this, or a profile's path.")
    ] = None,
    work: Annotated[
        str | None,
        typer.Option(
            help="Charge for the sizes of llada2-mini, ... instead of the traced model's; layers as traced."
        ),
    ] = None,
    shared_pool: Annotated[bool, typer.Option("--shared-pool", help="Let all layers share the slots.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Replay a trace: what each strategy would have hit at each budget, next to Belady's bound."""
    numpy_on_one_thread()
    from relume.machine.hardware import load_hardware
    from relume.simulate.job import simulate as run

    strategies, memories = parts_of(strategy), parts_of(expert_memory)
    try:
        check_names(strategies, memories)
        machine = None if hardware is None else load_hardware(hardware)
        sizes = None if work is None else work_of(work)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    with item_progress("replaying") as progress:
        simulation = run(trace, strategies, memories, progress, profile, shared_pool, layer_slots, machine, sizes)
    for line in simulation.notes:
        note(line)
    _print_table(simulation.rows)
    if json_output:
        typer.echo(json.dumps({"trace": str(trace), "rows": [row.to_dict() for row in simulation.rows]}))


def check_names(strategies: Sequence[str], memories: Sequence[str]) -> None:
    """Raise `RelumeError` for a strategy or a budget that cannot be read."""
    from relume.strategy.budget import ExpertMemory
    from relume.strategy.strategies import Strategy

    for name in strategies:
        Strategy.parse(name)
    for text in memories:
        ExpertMemory.parse(text)


def work_of(name: str) -> WorkShape:
    """Sizes of a published model in bfloat16. Raises `RelumeError` for an unknown one."""
    from relume.machine.work import WorkShape
    from relume.synth.shapes import make_shape

    config = make_shape(name).config
    return WorkShape.of(config, 2, 2 * config.parameters_per_expert)


def figures_of(row: SimulationRow) -> list[str]:
    """Hit rate, utilisation, bytes moved per token, hosted share and milliseconds per token, for a table."""
    shares = ["-" if value is None else f"{value:.3f}" for value in (row.hit_rate, row.utilisation)]
    moved = "-" if row.bytes_per_token is None else human_bytes(row.bytes_per_token)
    hosted = "-" if row.hosted is None else f"{row.hosted:.2f}"
    return [*shares, moved, hosted, "-" if row.tpot_ms is None else f"{row.tpot_ms:.2f}"]


def parts_of(text: str | None) -> list[str]:
    """What commas separate; nothing of `None`."""
    return [] if text is None else [part.strip() for part in text.split(",")]


def _print_table(rows: Sequence[SimulationRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("simulated")
    for title in ("expert memory", "slots/layer", "hit rate", "utilisation", "moved/token", "hosted", "TPOT ms"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row.strategy, row.expert_memory, f"{row.slots_per_layer:.1f}", *figures_of(row))
    Console(highlight=False).print(table)
