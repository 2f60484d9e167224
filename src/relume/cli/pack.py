"""`relume pack`: a folder whose experts are read in one piece, and may be quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relume.cli.options import Model, Offline, Revision, options_of
from relume.config import PackConfig

if TYPE_CHECKING:
    from relume.pack.report import PackReport


_PACKING = {
    "experts": "How experts are stored; bf16 keeps bfloat16 weights exactly.",
    "group_size": "Of int4: inputs that share a scale, 32, 64 or 128; 64 by default.",
}


@options_of(PackConfig, "packing", _PACKING)
def pack(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The folder to make, or to complete if packing it was interrupted.")],
    packing: PackConfig,
    revision: Revision = None,
    offline: Offline = False,
    json_output: Annotated[bool, typer.Option("--json", help="End with one JSON document.")] = False,
) -> None:
    """Copy a model with its experts in another format. Run again after an interruption, it goes on."""
    from relume.cli.terminal import byte_progress
    from relume.pack.job import pack_model

    with byte_progress("packing") as progress:
        report = pack_model(model, out, packing, revision=revision, offline=offline, progress=progress)
    _print_report(report)
    if json_output:
        typer.echo(json.dumps(report.to_dict()))


def _print_report(report: PackReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from relume.cli.terminal import human_bytes

    groups = "" if report.group_size is None else f" in groups of {report.group_size}"
    share = report.bytes_per_expert / report.source_bytes_per_expert
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("experts", f"{report.num_experts} as {report.experts}{groups}")
    table.add_row("an expert", f"{human_bytes(report.bytes_per_expert)}, {share:.1%} of the original")
    table.add_row("all experts", human_bytes(report.expert_bytes))
    table.add_row("the folder", human_bytes(report.num_bytes))
    table.add_row(
        "relative error",
        f"{report.relative_error_mean:.4f} on average, {report.relative_error_max:.4f} at most (measured: RMS of "
        f"outputs against bfloat16, random tokens, {report.sampled_experts} experts)",
    )
    table.add_row("seconds", f"{report.wall_s:.1f}")
    if report.num_kept:
        table.add_row("packed before", f"{report.num_kept} experts")
    console = Console(highlight=False)
    console.print(f"{report.path}: {'lossless' if report.lossless else 'not lossless'}", soft_wrap=True)
    console.print(table)
