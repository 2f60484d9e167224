"""`relume eval`: how many answers are right, and at what pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relume.cli.loading import LoadOptions, loading_options, open_engine, read_weights
from relume.cli.options import Model
from relume.cli.terminal import item_progress
from relume.config import DecodingConfig
from relume.core import RelumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relume.engine.engine import Engine
    from relume.evaluate.job import EvaluationRow
    from relume.evaluate.logits import LogitError
    from relume.tasks import Problem

DEFAULT_VARIANT = "threshold:0.9"


@loading_options
def eval_model(
    model: Model,
    loading: LoadOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt and answer (or GSM8K's keys) instead of the tasks.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, separated by commas.")] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts in all, spread over the tasks.")
    ] = 1000,
    variants: Annotated[
        str, typer.Option(help="decoder[:mode][:threshold], separated by commas: threshold:0.9,joint:speed")
    ] = DEFAULT_VARIANT,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together; changes no answer.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    against: Annotated[
        str | None,
        typer.Option(help="Another model to compare logits with, as the one this was packed from."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Answer prompts with one right answer each and score the final lines."""
    from relume.evaluate.job import evaluate, problems_for
    from relume.evaluate.variants import Variant

    try:
        chosen = [Variant.parse(text) for text in variants.split(",")]
        problems = problems_for(prompts, tasks, num_prompts, seed)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    engine = open_engine(model, loading, batch_size)
    read_weights(engine)
    rows = []
    for variant in chosen:
        with item_progress(f"answering, {variant.name}") as progress:
            decoding = DecodingConfig(max_tokens=max_tokens)
            rows.append(evaluate(engine, problems, variant, decoding, batch_size, progress))
    document = to_document(rows)
    _print_table(rows)
    if against is not None:
        difference = _logit_error(engine, against, loading, [p for group in problems.values() for p in group])
        typer.echo(
            f"logits against {against}: relative error {difference.relative_error:.4f}, the same token on top at "
            f"{difference.same_top:.4f} of {difference.num_positions} positions"
        )
        document["logit_error"] = difference.to_dict() | {"against": against}
    if json_output:
        typer.echo(json.dumps(document))


def _logit_error(engine: Engine, against: str, loading: LoadOptions, problems: list[Problem]) -> LogitError:
    from relume.evaluate.logits import NUM_COMPARED, compare_logits, conversation_logits

    stride = max(1, len(problems) // NUM_COMPARED)  # some of each task
    ours = conversation_logits(engine, problems[::stride])
    engine.close()
    with open_engine(against, loading) as reference:
        read_weights(reference)
        return compare_logits(ours, conversation_logits(reference, problems[::stride]))


def to_document(rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """The first variant's figures at the top level; all of them under `rows` if there are several."""
    documents = [row.to_dict() for row in rows]
    return documents[0] | ({"rows": documents} if len(rows) > 1 else {})


def _print_table(rows: Sequence[EvaluationRow]) -> None:
    from rich.console import Console
    from rich.table import Table

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
        ("reached max tokens", [str(row.unterminated) for row in rows]),
        ("seconds", [f"{row.wall_s:.0f}" for row in rows]),
    ):
        table.add_row(title, *cells)
    Console(highlight=False).print(table)
