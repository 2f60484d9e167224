"""`relume eval`: how many answers are right, with how many experts, and at what pace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.loading import LoadOptions, RoutingsOptions, open_engine, read_weights, routings_options
from relume.cli.options import Model
from relume.core import RelumeError

if TYPE_CHECKING:
    from relume.engine.engine import Engine
    from relume.evaluate.logits import LogitError
    from relume.tasks import Problem

DEFAULT_VARIANT = "threshold:0.9"


@routings_options
def eval_model(
    model: Model,
    loading: RoutingsOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt and answer (or GSM8K's keys) instead of the tasks.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these tasks, separated by commas.")] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Held-out prompts in all, spread over the tasks; by default 1000, or as many as there are. Of "
            "--prompts by default all.",
        ),
    ] = None,
    variants: Annotated[
        str,
        typer.Option(help="decoder[:mode][:threshold][:post=n], separated by commas: threshold:0.9,joint:speed"),
    ] = DEFAULT_VARIANT,
    block_lengths: Annotated[
        str | None, typer.Option(help="Positions decoded together, as 8,16,32; by default the model's.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Compare with this one of the routings; by default with the first row.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Begin with this model in its native routing, and compare with that.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together; changes no answer.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts, and of the resamples of comparisons.")] = 0,
    against: Annotated[
        str | None,
        typer.Option(help="Another model to compare logits with, as the one this was packed from."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw exact match over active experts; a .png.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Answer prompts with one right answer each and score the final lines.

    A row for each routing, variant and block length; several rows are compared with a base by paired resampling.
    """
    from relume.cli.eval_parts import plan_parts, run_parts
    from relume.cli.eval_tables import print_rows, print_variants, to_document, to_points
    from relume.evaluate.prompts import problems_for
    from relume.evaluate.variants import Variant
    from relume.figures.drawing import require_drawing

    try:
        chosen = [Variant.parse(text) for text in variants.split(",")]
        problems = problems_for(prompts, tasks, num_prompts, seed)
        parts, first = plan_parts(model, loading, chosen, block_lengths, max_tokens, base, base_model)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    if against is not None and len(parts) > 1:
        raise typer.BadParameter("--against compares the logits of one routing: give one, and no --base-model")
    if plot is not None:
        require_drawing(plot)
    rows, engine = run_parts(parts, problems, batch_size)
    comparisons = [row.against(rows[first], seed) for row in rows] if len(rows) > 1 else []
    document = to_document(rows, comparisons)
    if len(rows) == len(chosen):
        print_variants(rows)
    if len(rows) > 1:
        print_rows(rows, comparisons, first)
    if plot is not None:
        from relume.figures.tradeoff import draw_tradeoff

        draw_tradeoff(to_points(rows, first), plot)
        typer.echo(f"{plot}: exact match over active experts, measured")
    if against is not None:
        difference = _logit_error(
            engine, against, parts[-1].loading, [p for group in problems.values() for p in group]
        )
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
