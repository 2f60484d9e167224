"""What a forward asks of the experts, and what it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from relume.strategy.placement import LayerDecision
from relume.strategy.use import last_block_votes


@dataclass
class Traffic:
    """What forwards moved and how long they took.

    Attributes:
        bytes_from_disk, bytes_to_device: read, and written into slots.
        evictions: residents that made room.
        hosted: misses that were computed where they lie.
        prefetch_useful, prefetch_wasted: experts that were brought ahead and used, or not.
        compute_s: seconds in the experts; `stall_s`: with nothing to compute, waiting for a load.
        host_s: seconds of the host lane, beside the others.
        load_s: seconds of each layer between the begin of its first load and the end of its last.
        moe_s: seconds of each layer from its routing to its experts' sum.
    """

    bytes_from_disk: int = 0
    bytes_to_device: int = 0
    evictions: int = 0
    hosted: int = 0
    prefetch_useful: int = 0
    prefetch_wasted: int = 0
    compute_s: float = 0.0
    stall_s: float = 0.0
    host_s: float = 0.0
    load_s: float = 0.0
    moe_s: float = 0.0

    def add_traffic(self, other: Traffic) -> None:
        """Add another's figures."""
        for each in fields(Traffic):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class ExpertUsage(Traffic):
    """What one forward used, summed over its MoE layers.

    Attributes:
        layers: MoE layers.
        active: distinct experts of each layer, over all tokens; `hits` those that were resident.
        resident: experts that were resident in the layer before it ran.
        active_by_span: `active` over each span's tokens.
        decisions: of each layer; kept only if `record` is set, as `routings`.
        routings: for each layer expert ids and weights, `[tokens, k]`.
    """

    record: bool = False
    layers: int = 0
    active: int = 0
    hits: int = 0
    resident: int = 0
    active_by_span: Counter[int] = field(default_factory=Counter)
    decisions: list[LayerDecision] = field(default_factory=list)
    routings: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def take(self, decision: LayerDecision) -> None:
        """Add a layer's decision."""
        self.layers += 1
        self.resident += decision.resident
        self.hits += len(decision.hits)
        self.active += len(decision.hits) + decision.num_misses
        self.hosted += len(decision.hosted)
        self.evictions += len(decision.evicted)
        self.prefetch_useful += decision.useful
        self.prefetch_wasted += decision.wasted


class Batch:
    """The tokens of one forward: spans one after the other, no padding.

    Args:
        span_lengths: tokens of each span, which is computed apart from the others.
        segment_lengths: tokens of each request; several may share a span.
        block_lengths: of each request.
        usage: is added to.
    """

    def __init__(
        self,
        span_lengths: Sequence[int],
        segment_lengths: Sequence[int],
        block_lengths: Sequence[int],
        usage: ExpertUsage,
    ) -> None:
        self.span_lengths = list(span_lengths)
        self.votes = last_block_votes(list(segment_lengths), list(block_lengths))
        self.usage = usage
