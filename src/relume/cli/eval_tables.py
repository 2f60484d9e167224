"""How `relume eval` shows its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relume.evaluate.job import EvaluationRow
from relume.evaluate.scoring import Comparison
from relume.figures.tradeoff import TradeoffPoint, curve_of

#: Of a table that goes to a file or a pipe.
_WIDTH = 160


def to_document(rows: Sequence[EvaluationRow], comparisons: Sequence[Comparison] = ()) -> dict[str, Any]:
    """The first row's figures at the top level; all of them under `rows` if there are several.

    With `comparisons`, one for each row, a row has `against_base`.
    """
    documents = [row.to_dict() for row in rows]
    for document, comparison in zip(documents, comparisons, strict=False):
        document |= {"against_base": comparison.to_dict()}
    return documents[0] | ({"rows": documents} if len(rows) > 1 else {})


def print_variants(rows: Sequence[EvaluationRow]) -> None:
    """A column for each row, which differ in nothing but the variant; a line for each task and figure."""
    table = Table(box=None, pad_edge=False)
    table.add_column("measured")
    for row in rows:
        table.add_column(row.variant, justify="right")
    for task in (*rows[0].tasks, "all"):
        scores = [row.overall if task == "all" else row.tasks[task] for row in rows]
        cells = [f"{s.exact_match:.3f} ({s.interval[0]:.3f}-{s.interval[1]:.3f})" for s in scores]
        table.add_row(task.replace("_", " "), *cells)
    for title, cells in (
        ("prompts", [str(row.overall.num_prompts) for row in rows]),
        ("tokens per iteration", [f"{row.tokens_per_iteration:.2f}" for row in rows]),
        ("active experts", [f"{row.active_experts:.1f}" for row in rows]),
        ("active in prefills", [f"{row.active_experts_prefill:.1f}" for row in rows]),
        ("MiB of active experts", [f"{row.active_expert_bytes / 2**20:.2f}" for row in rows]),
        ("ms a request", [f"{1000 * row.wall_s / row.overall.num_prompts:.1f}" for row in rows]),
        ("reached max tokens", [str(row.unterminated) for row in rows]),
        ("seconds", [f"{row.wall_s:.0f}" for row in rows]),
    ):
        table.add_row(title, *cells)
    Console(highlight=False).print(table)


def print_rows(rows: Sequence[EvaluationRow], comparisons: Sequence[Comparison], base: int) -> None:
    """A line for each row, and what each is against the row number `base`."""
    columns: list[tuple[str, list[str]]] = [
        ("routing", [row.routing for row in rows]),
        ("block", [str(row.block_length) for row in rows]),
        ("exact match", [_score(row) for row in rows]),
        ("/ base", ["base" if n == base else _relative(found) for n, found in enumerate(comparisons)]),
        ("active", [f"{row.active_experts:.1f}" for row in rows]),
        ("prefill", [f"{row.active_experts_prefill:.1f}" for row in rows]),
        ("MiB", [f"{row.active_expert_bytes / 2**20:.2f}" for row in rows]),
        ("tok/iter", [f"{row.tokens_per_iteration:.2f}" for row in rows]),
        ("ms/request", [f"{1000 * row.wall_s / row.overall.num_prompts:.1f}" for row in rows]),
    ]
    for title, cells in (("variant", [row.variant for row in rows]), ("model", [_short(row) for row in rows])):
        if len(set(cells)) > 1:
            columns.insert(0, (title, cells))
    num_prompts = rows[0].overall.num_prompts
    table = Table(title=f"measured: {num_prompts} prompts", title_justify="left", box=None, pad_edge=False)
    for title, _ in columns:
        table.add_column(
            title, justify="left" if title in {"routing", "model", "variant"} else "right", no_wrap=True
        )
    for line in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*line)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    console.print(table)
    console.print("active, prefill: distinct experts of a layer; MiB: of all layers' in an iteration, as stored")


def to_points(rows: Sequence[EvaluationRow], base: int) -> list[TradeoffPoint]:
    """For a figure: rows of one kind of routing, model, variant and block length are joined."""
    names = []
    for row in rows:
        parts = {"model": _short(row), "block": f"blocks of {row.block_length}", "variant": row.variant}
        names.append({"routing": curve_of(row.routing)} | parts)
    shared = {key for key in ("model", "block", "variant") if len({name[key] for name in names}) == 1}
    points = []
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        line = ", ".join(value for key, value in name.items() if key not in shared)
        overall = row.overall
        points.append(
            TradeoffPoint(line, row.active_experts, overall.exact_match, overall.interval, number == base)
        )
    return points


def _score(row: EvaluationRow) -> str:
    low, high = row.overall.interval
    return f"{row.overall.exact_match:.3f} ({low:.3f}-{high:.3f})"


def _relative(found: Comparison) -> str:
    if found.relative is None or found.relative_interval is None:
        return "-"
    return f"{found.relative:.3f} ({found.relative_interval[0]:.3f}-{found.relative_interval[1]:.3f})"


def _short(row: EvaluationRow) -> str:
    return "/".join(Path(row.model).parts[-2:])
