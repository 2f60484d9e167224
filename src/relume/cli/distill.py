"""`relume distill`: train a model on its own answers to run with fewer experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from relume.cli.options import Model
from relume.cli.terminal import item_progress, note, status_line
from relume.core import RelumeError


def distill(
    model: Model,
    out: Annotated[
        Path, typer.Option(help="Folder of answers, training and the exported model; resumed if begun.")
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt (or question) instead of the tasks' prompts.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Only these tasks, separated by commas, a share with =: date=2,compare.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts to answer: all of the file, or 20000 over the tasks.")
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="To train with and to run with afterwards; by default dmoe:p=0.6.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Of the decoder that answers.")] = 0.95,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 takes the most likely token.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="The longest answer; longer ones are dropped.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts answered together.")] = 64,
    parameters: Annotated[
        Literal["all", "experts", "experts+router", "router"] | None,
        typer.Option(help="What is trained; by default all."),
    ] = None,
    kl: Annotated[
        float | None, typer.Option(help="Weight of KL(model as it was || trained) on masked tokens; by default 0.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of the optimiser; by default 1500.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate; by default 0.001, published 2e-6, for 16 billion parameters."),
    ] = None,
    train_batch_size: Annotated[
        int | None, typer.Option(help="Answers in a step; by default 64, published 4.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="TOML with further values of the training, as relume train reads them.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the tasks' prompts, all draws and the training.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="In which answers and training compute.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Answer prompts, then train on the answers with the new routing; interrupt and repeat the command at will."""
    from relume.evaluate.prompts import prompts_to_learn
    from relume.train.answers import AnswerConfig
    from relume.train.distill import distill as run
    from relume.train.distill_config import DistillConfig, read_changes

    try:
        answering = AnswerConfig(threshold, temperature, max_tokens, batch_size, seed, dtype, device)
        changes = {} if recipe is None else read_changes(recipe)
        options = {
            "routing": routing,
            "parameters": parameters,
            "kl": kl,
            "steps": steps,
            "lr": lr,
            "train_batch_size": train_batch_size,
        }
        tuning = DistillConfig.from_options({k: v for k, v in options.items() if v is not None}, changes)
        chosen = prompts_to_learn(prompts, tasks, num_prompts, seed)
    except RelumeError as error:
        raise typer.BadParameter(str(error)) from None
    with status_line() as trained, item_progress("answering") as answered:
        report = run(model, chosen, out, answering, tuning, answered=answered, trained=trained, note=note)
    counts = report.answers
    typer.echo(
        f"{counts.kept} answers kept, {counts.unterminated} unterminated and {counts.empty} empty ones dropped; "
        f"{report.steps} steps; {report.checkpoint} runs with {report.routing}"
    )
    if json_output:
        typer.echo(json.dumps(report.to_dict()))
