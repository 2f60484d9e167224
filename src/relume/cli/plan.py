"""`relume plan`: how a model's memory would be split and how fast it would run, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from relume.cli.loading import LoadOptions, loading_options
from relume.cli.options import Model
from relume.core import RelumeError


@loading_options
def plan(
    model: Model,
    loading: LoadOptions,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the predicted time over tide's refresh interval; a .png.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show where every byte of a model would go and how fast it would run. Fetches no weights."""
    if plot is not None:
        from relume.figures.drawing import require_drawing

        require_drawing(plot)
    document = describe(model, loading, batch)
    if plot is not None:
        _draw(document, plot)
    if json_output:
        typer.echo(json.dumps(document))
    else:
        _print_table(document)


def describe(model: str, loading: LoadOptions, batch: int) -> dict[str, Any]:
    """Everything that the command prints."""
    from relume.checkpoint.folder import declared_dtype, stored_dtype
    from relume.checkpoint.hub import resolve_model
    from relume.engine.predict import predict
    from relume.engine.provision import provision
    from relume.engine.routing import RoutingInForce
    from relume.machine.profile import load_profile
    from relume.model.families import survey
    from relume.model.loading import compute_dtype
    from relume.model.sizes import model_sizes
    from relume.simulate.intervals import describe_refresh

    checkpoint, family, config = survey(resolve_model(model, loading.revision, loading.offline, weights=False))
    routing = RoutingInForce.of(config, loading.routing)
    config, sizes = routing.config, model_sizes(family, config)
    stored = stored_dtype(checkpoint.config, checkpoint.tensors)
    dtype = compute_dtype(checkpoint, loading.dtype)
    found = provision(config, sizes, loading.engine(batch), dtype, stored, checkpoint.pack, checkpoint.folder)
    routing.check_strategy(found.strategy)
    work, planned = found.planner.work, found.plan
    prediction = predict(config, sizes, work, planned, load_profile(), found.settings.direct)
    reasons = list(prediction.reasons)
    if routing.choice.name not in {"native", "top-k"}:
        reasons.append(f"The prediction is of native routing; {routing.choice} may use fewer experts.")
    if not checkpoint.tensors and not declared_dtype(checkpoint.config):
        reasons.insert(
            0, "config.json declares no dtype and not all shards are here: weights stored in bfloat16 are assumed."
        )
    return {
        "bytes": dict(planned.bytes),
        "host_bytes": dict(planned.host_bytes),
        "total_bytes": planned.total_bytes,
        "memory_limit_bytes": found.memory.limit_bytes,
        "memory_limit_source": found.memory.source,
        "smallest_memory_bytes": found.planner.smallest_memory(),
        "routing": str(routing.choice),
        "strategy": found.strategy,
        "slots_per_layer": list(planned.slots_per_layer),
        "experts_per_layer": config.router.num_experts,
        "resident_share": planned.resident_share,
        "expert_memory_bytes": planned.expert_memory_bytes,
        "bytes_per_expert": work.stored_expert_bytes(config),
        "bytes_outside_experts": sizes.outside_experts * work.stored_itemsize,
        "context": work.context,
        "batch": work.batch,
        "tpot_ms": prediction.tpot_ms,
        "kind": "simulated",
        "refresh": describe_refresh(found),
        "reasons": reasons,
        "warnings": [*routing.warnings, *found.warnings],
    }


def _draw(document: dict[str, Any], path: Path) -> None:
    from relume.figures.intervals import IntervalCurve, draw_intervals

    refresh = document["refresh"]
    if refresh is None:
        raise RelumeError(
            "there is no curve to draw: name --strategy tide, and --profile or --hardware if it says so"
        )
    longest, found = len(refresh["curve_ms"]), set(refresh["intervals"])
    solved = min(*found, longest) if len(found) == 1 else None
    draw_intervals([IntervalCurve(refresh["hardware"], "predicted", refresh["curve_ms"], (), solved)], path)


def _print_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from relume.cli.terminal import human_bytes

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for part, count in document["bytes"].items():
        table.add_row(f"  {part.replace('_', ' ')}", human_bytes(count))
    table.add_row("in all", human_bytes(document["total_bytes"]))
    for part, count in document["host_bytes"].items():
        table.add_row(f"  in RAM: {part.replace('_', ' ')}", human_bytes(count))
    table.add_row("memory limit", human_bytes(document["memory_limit_bytes"]))
    table.add_row("outside routed experts", human_bytes(document["bytes_outside_experts"]))
    table.add_row("an expert", human_bytes(document["bytes_per_expert"]))
    fewest, most = min(document["slots_per_layer"]), max(document["slots_per_layer"])
    slots = str(most) if fewest == most else f"{fewest} to {most}"
    table.add_row("resident experts a layer", f"{slots} of {document['experts_per_layer']}")
    tpot = document["tpot_ms"]
    table.add_row("predicted time of a token", "unknown" if tpot is None else f"{tpot:.0f} ms")
    console = Console(highlight=False)
    console.print(table)
    if document["refresh"] is not None:
        from relume.cli.interval_tables import print_refresh

        print_refresh(document["refresh"], console)
    console.print(f"Memory limit: {document['memory_limit_source']}.")
    for reason in document["reasons"]:
        console.print(reason)
    for warning in document["warnings"]:
        console.print(f"Warning: {warning}.")
