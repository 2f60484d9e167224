"""`relume train`: train a model from a recipe, or go on where it was left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relume.cli.terminal import note, status_line


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

    config = TrainConfig.from_file(recipe)
    with status_line() as show:
        folder = run(config, out, max_seconds=max_seconds, progress=show, note=note)
    typer.echo(str(folder))
