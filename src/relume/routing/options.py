"""The options that routings have: their types, their ranges, and which routing has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from relume.core import Registry


@dataclass(frozen=True)
class Option:
    """A value's type, what it must be, and in words."""

    read: Callable[[str], Any]
    holds: Callable[[Any], bool]
    words: str


def _count(least: int) -> Option:
    return Option(int, lambda value: value >= least, f"a whole number of at least {least}")


def _one_of(*names: str) -> Option:
    return Option(str, lambda value: value in names, f"one of {', '.join(names)}")


def _number(words: str, holds: Callable[[float], bool]) -> Option:
    return Option(float, lambda value: isfinite(value) and holds(value), words)


#: By name.
OPTIONS: Mapping[str, Option] = {
    "n": _count(1),
    "share": _number("a number above 0 and at most 1", lambda value: 0.0 < value <= 1.0),
    "least": _number("a positive number", lambda value: value > 0.0),
    "most": _number("a positive number", lambda value: value > 0.0),
    "distance": _count(0),
    "confidence": _number("a number in 0..1", lambda value: 0.0 <= value <= 1.0),
    "p": _number("a number above 0 and at most 1", lambda value: 0.0 < value <= 1.0),
    "guard": _count(1),
    "aggregate": _one_of("sum", "max"),
    "block": _count(1),
    "prefill": _one_of("same", "native"),
    "residents": _number("a number of at least 0", lambda value: value >= 0.0),
}


@dataclass(frozen=True)
class Kind:
    """Options of one routing: those that must be given, those that may, and what some are otherwise."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its options."""
        return self.required + self.optional

    @property
    def known(self) -> str:
        """They, for an error."""
        return f"it has {', '.join(self.names)}" if self.names else "it has none"


_VOTED = ("guard", "aggregate", "block", "prefill", "residents")
#: Every routing by name. Those with a guard restrict a window's tokens to a coreset of experts.
ROUTINGS: Registry[Kind] = Registry(
    "routing",
    {
        "native": Kind(),
        "top-k": Kind(required=("n",)),
        "des-seq": Kind(required=("n",), optional=("guard", "block", "prefill")),
        "des-vote": Kind(optional=("share", *_VOTED), defaults=(("share", 0.15),)),
        "expert-choice": Kind(optional=("least", "most", "block", "prefill")),
        "team": Kind(required=("distance", "confidence"), optional=("guard",)),
        "dmoe": Kind(optional=("p", *_VOTED), defaults=(("p", 0.6),)),
    },
)
