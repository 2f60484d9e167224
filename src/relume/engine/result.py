"""A finished request and its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Statistics:
    """Figures of one request. Names and meaning are stable; docs/json.md explains each."""

    num_tokens: int
    num_iterations: int
    wall_s: float
    tpot_ms: float
    hit_rate: float
    utilisation: float
    active_experts: float
    active_experts_prefill: float
    bytes_at_load: int
    bytes_from_disk: int
    bytes_to_device: int
    evictions: int
    stall_s: float
    compute_s: float
    load_s: float
    moe_s: float
    forward_s: float
    prefetch_useful: int
    prefetch_wasted: int
    hosted: int
    host_s: float
    peak_rss_bytes: int
    strategy: str
    expert_memory_bytes: int
    expert_format: str
    routing: str
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
