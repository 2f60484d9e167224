"""`relume trace`: what a trace shows, one without a model, and what a trace teaches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.loading import LoadOptions, loading_options, open_engine, read_weights
from relume.cli.options import Model, decoding_options
from relume.cli.terminal import item_progress
from relume.config import DecodingConfig
from relume.tasks.task import Split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from relume.core import Progress
    from relume.trace.record import ForwardRecord

trace = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Record what every forward does, look at it, and learn from it.",
)

TraceFile = Annotated[Path, typer.Argument(help="A trace file.")]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON document.")]


@trace.command("record")
@loading_options
@decoding_options
def record(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    decoding: DecodingConfig,
    loading: LoadOptions,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt and answer instead of tasks.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to answer.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    prompt_seed: Annotated[int, typer.Option(min=0, help="Of the choice of prompts.")] = 0,
    split: Annotated[
        Split, typer.Option(help="Tasks' prompts that models train on, for a profile, or held-out ones.")
    ] = "held_out",
    json_output: AsJson = False,
) -> None:
    """Answer prompts and write down what every forward did."""
    from relume.cli.trace_tables import describe, print_table
    from relume.evaluate.job import answer
    from relume.evaluate.prompts import problems_for
    from relume.trace.file import TraceReader
    from relume.trace.info import summarise

    problems = problems_for(prompts, None, num_prompts, prompt_seed, split)
    engine = open_engine(model, loading, batch_size)
    read_weights(engine)
    texts = [problem.prompt for group in problems.values() for problem in group]
    with item_progress("answering") as progress, engine.record(out):
        answer(engine, texts, decoding, batch_size, progress)
    reader = TraceReader(out)
    document = describe(out, reader.metadata, summarise(reader, reader.metadata.shape))
    print_table(document)
    if json_output:
        typer.echo(json.dumps(document))


@trace.command("info")
def info(path: TraceFile, json_output: AsJson = False) -> None:
    """Show how many experts a trace's forwards use, how alike iterations are, and what was hit."""
    from relume.cli.trace_tables import describe, print_table
    from relume.trace.file import TraceReader
    from relume.trace.info import summarise

    reader = TraceReader(path)
    with item_progress("reading") as progress:
        summary = summarise(_counted(reader, reader.num_forwards, progress), reader.metadata.shape)
    document = describe(path, reader.metadata, summary)
    print_table(document)
    if json_output:
        typer.echo(json.dumps(document))


@trace.command("synth")
def synth(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    requests: Annotated[int, typer.Option(min=1, help="Requests, one after the other.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks that each of them decodes.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="The longest prompt.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws; another seed is another model.")] = 0,
    skip: Annotated[
        int, typer.Option(min=0, help="Requests to draw and leave out first: of the same model, for a profile.")
    ] = 0,
    json_output: AsJson = False,
) -> None:
    """Write a trace that behaves like LLaDA2.0-mini's as published, without a model."""
    import numpy as np

    from relume.cli.simulate import work_of
    from relume.cli.trace_tables import describe, print_targets
    from relume.trace.calibrated import TARGETS, CalibratedConfig, synthesise_trace
    from relume.trace.file import TraceReader, TraceWriter
    from relume.trace.info import summarise

    config = CalibratedConfig(num_requests=skip + requests, blocks=blocks, prompt_tokens=prompt_tokens)
    # Another seed is another model, whose experts have other habits: no profile of one is of use for the other.
    metadata = replace(config.metadata(), model=f"calibrated:{seed}", work=work_of("llada2-mini"))
    with item_progress("requests") as progress, TraceWriter(out, metadata) as writer:
        done = 0
        for record in synthesise_trace(config, np.random.default_rng(seed)):
            begun = record.spans[0].request
            if begun >= skip:
                writer.write(record)
            progress(begun - done, config.num_requests)
            done = begun
    summary = summarise(TraceReader(out), config.shape)
    print_targets(summary.to_dict())
    if json_output:
        targets = {
            name: {"low": low, "high": high, "source": source} for name, (low, high, source) in TARGETS.items()
        }
        typer.echo(json.dumps(describe(out, metadata, summary) | {"seed": seed, "targets": targets}))


@trace.command("profile")
def profile(
    path: TraceFile,
    out: Annotated[
        Path | None,
        typer.Argument(help="The file to write, .npz; by default one in the cache folder that the model finds."),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Write down the habits of a trace's model, for strategies that start from them."""
    from relume.trace.file import TraceReader
    from relume.trace.profile import cached_profile, gather_profile, write_model_profile

    reader = TraceReader(path)
    with item_progress("reading") as progress:
        records = _counted(reader, reader.num_forwards, progress)
        made = gather_profile(records, reader.metadata.shape, reader.metadata.model)
    if out is None:
        out = cached_profile(made.model)
        out.parent.mkdir(parents=True, exist_ok=True)
    write_model_profile(made, out)
    drifts = []
    if made.refresh is not None:
        fitted = zip(made.refresh.slots.tolist(), *made.refresh.drift, strict=True)
        drifts = [{"slots": slots, "drift": float(drift), "error": float(error)} for slots, drift, error in fitted]
    mean = float(made.mean_active.mean())
    typer.echo(f"{out}: {reader.num_forwards} forwards, {mean:.1f} experts of a layer active in an iteration")
    if json_output:
        document = {"path": str(out), "model": made.model, "forwards": reader.num_forwards}
        document |= {"mean_active": made.mean_active.tolist(), "drift": drifts}
        typer.echo(json.dumps(document))


def _counted(records: Iterable[ForwardRecord], total: int, progress: Progress) -> Iterator[ForwardRecord]:
    for record in records:
        yield record
        progress(1, total)
