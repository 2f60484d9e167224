"""What callers see: events while a request is decoded, and its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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


@dataclass(frozen=True)
class Statistics:
    """Figures of one request. Names and meaning are stable; docs/statistics.md explains each."""

    num_tokens: int
    num_iterations: int
    wall_s: float
    tpot_ms: float
    hit_rate: float
    utilisation: float
    active_experts: float
    bytes_from_disk: int
    bytes_to_device: int
    stall_s: float
    compute_s: float
    prefetch_useful: int
    prefetch_wasted: int
    peak_rss_bytes: int
    strategy: str
    expert_memory_bytes: int
    lossless: bool
    fallbacks: tuple[str, ...]
    kind: str
    hardware: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        text: the answer, without what ended it; `None` without a tokenizer.
        token_ids: the answer's tokens, including the end of text that closed it.
        finish_reason: `eos`, `stop` (a stop string), `length` or `cancelled`.
        canvas: prompt and all decoded blocks, uncut; positions still masked hold the mask token.
        commits: masks that took a token in each iteration, over all blocks.
        statistics: see `Statistics`.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    canvas: tuple[int, ...]
    commits: tuple[int, ...]
    statistics: Statistics
