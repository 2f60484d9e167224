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
        str, typer.Option(help="Separated by commas: full, lru, lfu, lfru, least-stale, static, counts.")
    ] = "lru,lfu,lfru,counts",
    expert_memory: Annotated[
        str, typer.Option(help="Separated by commas: shares as 40%, sizes as 8GiB, or experts per layer as 100.")
    ] = "10%,20%,40%,60%",
    profile: Annotated[Path | None, typer.Option(help="From relume trace profile, for static.")] = None,
    shared: Annotated[bool, typer.Option("--shared", help="One pool for all layers.")] = False,
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
        simulation = run(trace, strategies, memories, progress, profile, shared)
    for line in simulation.notes:
        note(line)
    _print_table(simulation.rows)
    if json_output:
        typer.echo(json.dumps({"trace": str(trace), "rows": [row.to_dict() for row in simulation.rows]}))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


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
