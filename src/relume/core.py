"""Nouns that every room shares."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
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
        used: `[tokens, k]` bool where tokens differ in how many experts they have: the others only fill up the
            rows, have weight 0 and are not computed. `None`: all are used.
    """

    expert_ids: torch.Tensor
    weights: torch.Tensor
    used: torch.Tensor | None = None


class Phase(enum.Enum):
    """What a forward of a request is for."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    COMMIT = "commit"
    DONE = "done"


@dataclass(frozen=True)
class SpanInput:
    """One request's tokens in a forward, as known before it runs. Arrays have one entry a token.

    Attributes:
        request: number of the request, unique within an engine.
        phase: what the forward is for.
        start: position of the first token in the canvas.
        block_length: of the request.
        token_ids: int64, the forward's input.
        masked: bool, whether the position awaits a token.
        next_start: position of the request's next forward; `start` again while the same tokens are worked on.
        next_token_ids: int64, that forward's input, of any length. Empty if there is none, or, before a
            denoising forward, not known yet.
    """

    request: int
    phase: Phase
    start: int
    block_length: int
    token_ids: np.ndarray
    masked: np.ndarray
    next_start: int
    next_token_ids: np.ndarray


@dataclass(frozen=True)
class SpanSignals(SpanInput):
    """What the decoder made of them, as known after the forward.

    Attributes:
        candidates: int64, each position's most likely token; where nothing was asked, the token itself.
        confidences: float32, of the candidates; 1 where nothing was asked.
        committed, edited: bool, masks that took a token, and tokens that changed.
    """

    candidates: np.ndarray
    confidences: np.ndarray
    committed: np.ndarray
    edited: np.ndarray


class Registry(Mapping[str, T], Generic[T]):
    """Names of one kind of thing; an unknown name lists the known ones."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise RelumeError(f"unknown {self.kind} {name!r}: choose one of {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
