"""What the commands print besides their results: errors and progress, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

GIB = 2**30


def fail(message: str) -> NoReturn:
    """Print one line and exit with 1."""
    print(f"relume: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(1)


def note(message: str) -> None:
    """Print one line on stderr."""
    print(f"relume: {message}", file=sys.stderr)  # noqa: T201


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar fed by (bytes since the last call, bytes in all); silent unless stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def advance(num_bytes: int, total: int) -> None:
            progress.update(task, advance=num_bytes, total=total)

        yield advance


def human_bytes(count: float) -> str:
    """`1.5 GiB`, `6.0 MiB`, `40.0 KiB` or `12 B`."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}" if unit == GIB else f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
