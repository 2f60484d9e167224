"""Whether a figure can be drawn, and writing it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from relume.config import require
from relume.core import RelumeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_drawing(path: Path) -> None:
    """See before the long work whether a figure could be drawn and written.

    Raises:
        RelumeError: matplotlib is missing, or the file cannot be a picture.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise RelumeError("drawing needs matplotlib: pip install 'relume[figures]'") from None
    require(path.suffix.lower() == ".png", f"{path}: figures are written as .png: name such a file")
    require(path.parent.is_dir(), f"{path}: the figure cannot be written, there is no folder {path.parent}")


def save(figure: Figure, path: Path) -> None:
    """Write a figure; raises `RelumeError` if it cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=120)  # a figure without a window is drawn by Agg
    except OSError as error:
        raise RelumeError(f"{path}: the figure cannot be written ({error.strerror})") from None
