"""How `relume trace` shows a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relume.cli.terminal import human_bytes
from relume.trace.calibrated import GAVE_WAY, TARGETS
from relume.trace.info import TraceSummary
from relume.trace.metadata import TraceMetadata


def describe(path: Path, metadata: TraceMetadata, summary: TraceSummary) -> dict[str, Any]:
    """The document of a trace: the file's own words and what it shows."""
    shape = metadata.shape
    about = {
        "path": str(path),
        "model": metadata.model,
        "layers": shape.num_layers,
        "experts_per_layer": shape.num_experts,
        "experts_per_token": shape.top_k,
        "block_length": metadata.block_length,
        "routing": metadata.routing,
        "strategy": metadata.strategy,
        "slots": list(metadata.slots),
        "shared": metadata.shared,
        "expert_bytes": metadata.expert_bytes,
        "relume_version": metadata.relume_version,
    }
    return about | summary.to_dict() | {"kind": metadata.kind, "hardware": metadata.hardware}


def print_table(document: dict[str, Any]) -> None:
    """One line for each of a document's keys."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for key, value in document.items():
        if value not in (None, (), []):
            table.add_row(key.replace("_", " "), _cell(key, value))
    Console(highlight=False).print(table)


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if isinstance(value, (list, tuple)):
        low, high = min(value), max(value)
        return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    if "bytes" in key:
        return human_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_targets(figures: dict[str, Any]) -> None:
    """Figures of a calibrated trace next to what they are calibrated to."""
    console = Console(highlight=False)
    table = Table("simulated", "here", "published", box=None, pad_edge=False)
    for name, (low, high, _) in TARGETS.items():
        here = "-" if figures[name] is None else f"{figures[name]:.3f}"
        table.add_row(name.replace("_", " "), here, f"{low:g} to {high:g}")
    console.print(table)
    for source in dict.fromkeys(source for *_, source in TARGETS.values()):
        names = ", ".join(name.replace("_", " ") for name, target in TARGETS.items() if target[2] == source)
        console.print(f"  {names}: {source}", style="dim", soft_wrap=True)
    console.print(f"  {GAVE_WAY}", style="dim", soft_wrap=True)
