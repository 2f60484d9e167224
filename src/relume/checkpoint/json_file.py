"""JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relume.core import RelumeError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `RelumeError` that names the file and what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RelumeError(f"{path}: missing; a checkpoint folder needs it") from None
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise RelumeError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise RelumeError(f"{path}: holds a {type(value).__name__}, an object was expected")
    return value


def exists(path: Path) -> bool:
    """Whether there is something at `path`. Raises `RelumeError` if that may not be known (no permission)."""
    try:
        return path.exists()
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
