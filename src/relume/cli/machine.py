"""`relume machine`: what this computer has, and how fast it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import relume
from relume.cli.terminal import item_progress, note
from relume.core import RelumeError
from relume.machine.threads import effective_cores

if TYPE_CHECKING:
    from relume.machine.figures import MachineProfile


def machine(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Whose disk to measure, where the models lie; else the cache folder's.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show this process's limits, and the bandwidths that were measured once (some ten seconds)."""
    document = describe(measured_profile(refresh, folder))
    if json_output:
        typer.echo(json.dumps(document))
    else:
        _print_tables(document)


def measured_profile(refresh: bool, folder: Path | None) -> MachineProfile:
    """The kept figures, or new ones if there are none, another folder's disk is asked for, or on demand."""
    from relume.machine.profile import cache_file, read_profile, save_profile

    if folder is not None and not folder.is_dir():
        raise RelumeError(f"{folder}: there is no such folder; name one on the disk to measure")
    kept, remark = read_profile()
    if remark is not None:
        note(remark)
    if kept is not None and not refresh and (folder is None or str(folder.resolve()) == kept.folder):
        return kept
    from relume.engine.measure import measure_machine

    if folder is None:
        try:
            folder = cache_file().parent
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            folder = Path.cwd()
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > effective_cores() / 2:
        note("other programs keep the cores busy: this computer will look slow; on an idle one, use --refresh")
    with item_progress("measuring") as progress:
        profile = measure_machine(folder, progress)
    remark = save_profile(profile)
    if remark is not None:
        note(remark)
    return profile


def describe(profile: MachineProfile) -> dict[str, Any]:
    """Everything that the command prints."""
    from dataclasses import asdict

    from relume.machine.limits import find_limits
    from relume.machine.profile import today

    limits = find_limits()
    values: dict[str, tuple[float | None, str]] = {
        "cores": (limits.cores, "cores"),
        "memory_total": (limits.memory.total_bytes, "bytes"),
        "memory_available": (limits.memory.available_bytes, "bytes"),
        "memory_usable": (limits.memory.usable_bytes, "bytes"),
        "lockable_memory": (limits.lockable_bytes, "bytes"),
        "pin_cap": (limits.pin_cap_bytes, "bytes"),
        "numa_nodes": (limits.numa_nodes, "nodes"),
    }
    for index, gpu in enumerate(limits.gpus):
        values[f"gpu_{index}_free"] = (gpu.free_bytes, "bytes")
        values[f"gpu_{index}_total"] = (gpu.total_bytes, "bytes")
    figures = asdict(profile)
    return {
        "machine": profile.identity,
        "limits": {
            name: {"value": value, "unit": unit, "measured_at": today()} for name, (value, unit) in values.items()
        },
        "memory_limit_source": limits.memory.source,
        "gpus": [gpu.name for gpu in limits.gpus],
        "bandwidths": {
            name: figures[name]
            for name in ("memory_read", "disk_direct", "disk_buffered", "host_to_device", "compute_threads")
        },
        "disk_folder": profile.folder,
        "disk_read_bytes": profile.read_bytes,
        "expert_kernel": figures["expert_kernel"],
        "openmp": {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")},
        "fallbacks": list(relume.startup_fallbacks),
        "kind": "measured",
    }


def _print_tables(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from relume.cli.terminal import human_bytes

    def text(figure: dict[str, Any]) -> tuple[str, str]:
        if figure["value"] is None:
            return figure.get("reason") or "none", ""
        if figure["unit"] == "bytes":
            return human_bytes(figure["value"]), figure["measured_at"]
        return f"{figure['value']:g} {figure['unit']}", figure["measured_at"]

    table = Table(box=None, pad_edge=False)
    for title in (document["machine"], "value", "measured"):
        table.add_column(title, justify="left" if title == document["machine"] else "right")
    for name, figure in (document["limits"] | document["bandwidths"]).items():
        table.add_row(name.replace("_", " "), *text(figure))
    kernel = document["expert_kernel"]
    for dtype, times in kernel["times"].items():
        for tokens, figure in times.items():
            table.add_row(f"expert, {tokens} token{'s' * (int(tokens) > 1)}, {dtype}", *text(figure))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"The memory limit is {document['memory_limit_source']}.")
    for index, name in enumerate(document["gpus"]):
        console.print(f"GPU {index} is {name}.")
    console.print(
        f"Disk reads are of {human_bytes(document['disk_read_bytes'])} in {document['disk_folder']}; "
        f"an expert is {kernel['hidden']} x {kernel['expert_size']}."
    )
    threads, policy = document["openmp"]["OMP_NUM_THREADS"], document["openmp"]["OMP_WAIT_POLICY"]
    console.print(f"OpenMP: {threads} threads, wait policy {policy}.")
    for fallback in document["fallbacks"]:
        console.print(f"Slower than it could be: {fallback}.")
