"""`relume synth`: a random checkpoint of real shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from relume.cli.options import options_of
from relume.config import ShapeName, ShapeOverrides

if TYPE_CHECKING:
    from relume.synth.report import SynthReport

_SIZES = {
    "layers": "Layers in all; of LLaDA2 the first is dense.",
    "hidden": "Hidden size; heads and widths that are not given follow in proportion.",
    "experts": "Routed experts of a layer.",
    "top_k": "Experts that a token uses.",
    "expert_size": "Width of a routed expert.",
    "vocab": "Tokens in the vocabulary.",
    "heads": "Attention heads.",
    "kv_heads": "Key and value heads.",
    "head_dim": "Width of an attention head.",
    "dense_size": "Width of a dense feed-forward layer (LLaDA2).",
    "groups": "Groups of experts (LLaDA2).",
    "kept_groups": "Groups that a token may choose from (LLaDA2).",
    "block_length": "Positions decoded together.",
    "expert_capacity": "Experts that a block admits, as in LLaDA2.2.",
}


@options_of(ShapeOverrides, "sizes", _SIZES)
def synth(
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    like: Annotated[ShapeName, typer.Option(help="The shape to follow.")],
    sizes: ShapeOverrides,
    seed: Annotated[int, typer.Option(help="Of all random draws; the same seed gives the same bytes.")] = 0,
    stacked: Annotated[
        bool, typer.Option("--stacked", help="Store each layer's experts as three tensors.")
    ] = False,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Make a random checkpoint in the official layout whose routing behaves like a trained model's."""
    import torch

    from relume.cli.terminal import byte_progress
    from relume.synth.job import synthesise

    with byte_progress("writing") as progress:
        report = synthesise(
            out, like, seed, sizes, stacked=stacked, dtype=getattr(torch, dtype), progress=progress
        )
    _print_report(report)
    if json_output:
        typer.echo(json.dumps(report.to_dict()))


def _print_report(report: SynthReport) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from relume.cli.terminal import human_bytes

    console = Console(highlight=False)
    console.print(
        f"{report.path}: {human_bytes(report.num_bytes)}, {report.num_tensors} tensors, "
        f"{report.num_experts} experts, in {report.wall_s:.0f} s",
        soft_wrap=True,
    )
    table = Table("routing, mean over layers", "measured", "trained models", box=None, pad_edge=False)
    figures = asdict(report.routing) | {"tokens_per_iteration": report.tokens_per_iteration}
    for name, target in report.targets.items():
        wanted = f"{target.low:.2f}" if target.low == target.high else f"{target.low:.2f} .. {target.high:.2f}"
        table.add_row(name.replace("_", " "), "-" if figures[name] is None else f"{figures[name]:.2f}", wanted)
    console.print(table)
    for source in dict.fromkeys(target.source for target in report.targets.values()):
        console.print(f"  {source}", style="dim", soft_wrap=True)
