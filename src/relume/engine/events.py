"""What callers see while a request is decoded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationEvent:
    """One denoising iteration of a block.

    Attributes:
        block: index of the block in the canvas; its first position is `start`.
        iteration: number within the block, from 0.
        positions: absolute positions that changed, ascending, before any shift that a deletion or split caused.
        tokens: what the positions hold now; with `indel` the block afterwards is in `token_ids` only.
        confidences: of the candidates at `positions`.
        edits: those of `positions` that held a token before.
        token_ids, masked: the whole block afterwards; masked positions hold the mask token.
    """

    block: int
    start: int
    iteration: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    edits: tuple[int, ...]
    token_ids: tuple[int, ...]
    masked: tuple[bool, ...]


@dataclass(frozen=True)
class BlockEvent:
    """A finished block.

    Attributes:
        token_ids: the answer's tokens that this block adds.
        text: the answer's text that is certain now and was not part of an earlier event. `None` without a
            tokenizer. Text that may turn out to begin a stop string is held back.
        last: the answer ends here.
    """

    block: int
    start: int
    token_ids: tuple[int, ...]
    text: str | None
    last: bool


Event = IterationEvent | BlockEvent
