"""`relume train`: train a model from a recipe, or go on where it was left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from relume.cli.terminal import note

if TYPE_CHECKING:
    from relume.train.job import Progress


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, for example recipes/demo.toml.")],
    out: Annotated[
        Path, typer.Argument(help="Folder of state, metrics and the exported model; resumed if begun.")
    ],
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="Leave after this time, with a saved state and an export.")
    ] = None,
) -> None:
    """Train block diffusion as a recipe says; interrupt and repeat the command at will."""
    from relume.train.config import TrainConfig
    from relume.train.job import train as run

    console = Console(stderr=True, highlight=False)

    def show(progress: Progress) -> None:
        if console.is_terminal:
            console.print(f"\r{progress}", end="", soft_wrap=True)

    config = TrainConfig.from_file(recipe)
    folder = run(config, out, max_seconds=max_seconds, progress=show, note=note)
    if console.is_terminal:
        console.print()
    typer.echo(str(folder))
