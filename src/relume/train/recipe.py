"""A configuration as a recipe: the TOML file that `TrainConfig.from_file` reads back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from relume.train.config import TrainConfig


def to_toml(config: TrainConfig, comment: str) -> str:
    """All values, so that later defaults change nothing, behind a line of comment."""
    lines = [f"# {comment}"]
    for section, values in config.to_dict().items():
        lines += _table(section, values)
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n[{name}]"
    inner = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in values.items():
        if key not in inner:
            yield f"{key} = {_text(value)}"
    for key, table in inner.items():
        if table:
            yield from _table(f"{name}.{key}", table)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # its escapes are TOML's
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
