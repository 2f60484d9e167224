"""Nouns that every room shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import torch  # only named in annotations: commands that compute nothing start without it

T = TypeVar("T")


class RelumeError(ValueError):
    """A mistake or a condition that the user can act on; its text is one line that names the way out."""


#: Told about long work: (bytes or items since the last call, bytes or items in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Routing:
    """Which experts each token of one layer uses.

    Attributes:
        expert_ids: `[tokens, k]` int64, in routing order (the order in which outputs are summed).
        weights: `[tokens, k]` float32.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor


class Registry(Mapping[str, T], Generic[T]):
    """Names of one kind of thing; an unknown name lists the known ones."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise RelumeError(f"unknown {self.kind} {name!r}: choose one of {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
