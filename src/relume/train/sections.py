"""From a table of a TOML file to a frozen dataclass, with complaints that name table and key."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from relume.config import require
from relume.core import RelumeError

_Section = TypeVar("_Section")
_KINDS = {bool: "true or false", str: "a text", tuple: "a list", int: "an integer", float: "a number"}


def read_toml(path: Path) -> dict[str, Any]:
    """A file's values. Raises `RelumeError` that names it and what is wrong."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise RelumeError(f"{path}: not valid TOML ({error})") from None


def build_section(name: str, kind: type[_Section], values: object) -> _Section:
    """Make the dataclass `kind` from a table.

    Raises:
        RelumeError: an unknown key (the known ones are listed), or a value of another type than the default's.
    """
    require(isinstance(values, Mapping), f"[{name}] is no table")
    assert isinstance(values, Mapping) and dataclasses.is_dataclass(kind)
    defaults = {field.name: _default_of(field) for field in dataclasses.fields(kind)}
    for key, value in values.items():
        require(key in defaults, f"[{name}] unknown key {key!r}: known are {', '.join(defaults)}")
        default: Any = defaults[key]
        if isinstance(default, Mapping):
            require(isinstance(value, Mapping), f"[{name}] {key} is {value!r}: a table [{name}.{key}] is needed")
        elif type(default) in _KINDS:
            require(_is_like(value, default), f"[{name}] {key} is {value!r}: {_KINDS[type(default)]} is needed")
    return kind(**values)


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; a boolean is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_at_least(section: str, config: object, **least: float) -> None:
    """Raise `RelumeError` for a field below its bound."""
    for name, bound in least.items():
        value = getattr(config, name)
        require(value >= bound, f"[{section}] {name} is {value}: it must be at least {bound}")


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_like(value: object, default: object) -> bool:
    if isinstance(default, tuple):
        inner = default[0] if default else ""
        return isinstance(value, (list, tuple)) and all(_is_like(item, inner) for item in value)
    if isinstance(default, float):
        return is_number(value)
    return type(value) is type(default)
