"""`relume simulate`: a trace through strategies and budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.terminal import human_bytes, item_progress, note
from relume.core import RelumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relume.simulate.rows import SimulationRow


def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace file; relume trace makes one.")],
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: full, lru, lfu, lfru, least-stale, static, counts. By default the recorded "
            "one, or with a budget lru,lfu,lfru,counts."
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
    profile: Annotated[Path | None, typer.Option(help="From relume trace profile, for static.")] = None,
    shared_pool: Annotated[bool, typer.Option("--shared-pool", help="Let all layers share the slots.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Replay a trace: what each strategy would have hit at each budget, next to Belady's bound."""
    from relume.simulate.job import simulate as run
    from relume.strategy.budget import ExpertMemory
    from relume.strategy.retention import RETENTIONS

    strategies, memories = _parts(strategy), _parts(expert_memory)
    try:
        for name in strategies:
            RETENTIONS[name]
        for text in memories:
            ExpertMemory.parse(text)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    with item_progress("replaying") as progress:
        simulation = run(trace, strategies, memories, progress, profile, shared_pool, layer_slots)
    for line in simulation.notes:
        note(line)
    _print_table(simulation.rows)
    if json_output:
        typer.echo(json.dumps({"trace": str(trace), "rows": [row.to_dict() for row in simulation.rows]}))


def _parts(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",")]


def _print_table(rows: Sequence[SimulationRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("simulated")
    for title in ("expert memory", "slots/layer", "hit rate", "utilisation", "moved/token"):
        table.add_column(title, justify="right")
    for row in rows:
        shares = ["-" if value is None else f"{value:.3f}" for value in (row.hit_rate, row.utilisation)]
        moved = "-" if row.bytes_per_token is None else human_bytes(row.bytes_per_token)
        table.add_row(row.strategy, row.expert_memory, f"{row.slots_per_layer:.1f}", *shares, moved)
    Console(highlight=False).print(table)
