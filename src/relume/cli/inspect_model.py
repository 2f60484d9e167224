"""`relume inspect`: what a checkpoint is and needs, from its JSON files and headers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from relume.cli.options import Model, Offline, Revision


def inspect_model(
    model: Model,
    revision: Revision = None,
    offline: Offline = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show a model's family, sizes by part, bytes per expert and what it needs. Fetches no weights."""
    document = describe(model, revision, offline)
    if json_output:
        typer.echo(json.dumps(document))
    else:
        _print_table(document)


def describe(model: str, revision: str | None, offline: bool) -> dict[str, Any]:
    """Everything that the command prints. Tensors are checked against the configuration if they are here."""
    from relume.checkpoint.folder import stored_dtype
    from relume.checkpoint.hub import resolve_model
    from relume.model.families import survey
    from relume.model.sizes import model_sizes

    checkpoint, family, shape = survey(resolve_model(model, revision, offline, weights=False))
    complete = bool(checkpoint.tensors)
    sizes = model_sizes(family, shape)
    router = shape.router
    itemsize = stored_dtype(checkpoint.config, checkpoint.tensors).itemsize
    pack = checkpoint.pack
    bytes_per_expert = sizes.per_expert * itemsize if pack is None else pack.expert_bytes
    bytes_of_experts = bytes_per_expert * sizes.experts
    return {
        "family": family.name,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "experts_per_layer": router.num_experts,
        "experts_per_token": router.top_k,
        "expert_capacity": router.capacity or None,
        "routing": shape.routing,
        "block_length": shape.block_length,
        "max_context": shape.max_context,
        "mask_token_id": shape.mask_token_id,
        "eos_token_ids": list(shape.eos_token_ids),
        "num_tensors": sizes.num_tensors,
        "parameters": sizes.total,
        "bytes": {name: count * itemsize for name, count in sizes.parts.items()}
        | {"routed_experts": bytes_of_experts},
        "bytes_outside_experts": sizes.outside_experts * itemsize,
        "packed_as": None if pack is None else pack.name,
        "bytes_per_expert": bytes_per_expert,
        "bytes_per_layer_of_experts": bytes_per_expert * router.num_experts,
        "kv_bytes_per_token": shape.kv_values_per_token * itemsize,
        "bytes_to_load": checkpoint.num_bytes if complete else sizes.outside_experts * itemsize + bytes_of_experts,
        "weights_complete": complete,
    }


def _print_table(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from relume.cli.terminal import human_bytes

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key, value in document.items():
        if key == "bytes":
            for part, count in value.items():
                table.add_row(f"  {part.replace('_', ' ')}", human_bytes(count))
        elif key.startswith("bytes") or key.startswith("kv_bytes"):
            table.add_row(key.replace("_", " "), human_bytes(value))
        elif value is not None:
            table.add_row(key.replace("_", " "), str(value))
    Console().print(table)
