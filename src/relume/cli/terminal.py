"""What the commands print besides their results: errors and progress, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from relume.core import Progress

GIB = 2**30


def fail(message: str) -> NoReturn:
    """Print one line and exit with 1."""
    print(f"relume: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    sys.exit(1)


def note(message: str) -> None:
    """Print one line on stderr."""
    print(f"relume: {message}", file=sys.stderr)  # noqa: T201


def byte_progress(title: str) -> AbstractContextManager[Progress]:
    """A progress bar fed by (bytes since the last call, bytes in all); silent unless stderr is a terminal."""
    return _progress(title, DownloadColumn(binary_units=True), TransferSpeedColumn())


def item_progress(title: str) -> AbstractContextManager[Progress]:
    """The same for things that are counted."""
    return _progress(title, MofNCompleteColumn())


@contextmanager
def status_line() -> Iterator[Callable[[object], None]]:
    """A line that is written over by the next; silent unless stderr is a terminal."""
    console = Console(stderr=True, highlight=False)
    shown = False

    def show(status: object) -> None:
        nonlocal shown
        if console.is_terminal:
            console.print(f"\r{status}", end="", soft_wrap=True)
            shown = True

    try:
        yield show
    finally:
        if shown:
            console.print()


@contextmanager
def _progress(title: str, *counts: ProgressColumn) -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda added, total: bar.update(task, advance=added, total=total)


def human_bytes(count: float) -> str:
    """`1.5 GiB`, `6.0 MiB`, `40.0 KiB` or `12 B`."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}" if unit == GIB else f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
