"""What one request used of the experts."""

from __future__ import annotations

from dataclasses import dataclass

from relume.experts.usage import ExpertUsage


@dataclass
class Usage:
    """What a sequence's forwards used. Those it shared with other requests count in full for each.

    Attributes:
        layers: MoE layers in its denoising forwards, over which the next four are summed.
        own_active: distinct experts that the sequence's own tokens used (all tokens' if batches are joined).
        active: those that the whole batch used; `hits` of them were resident, out of `resident` that were.
        bytes_from_disk, bytes_to_device, evictions: over all forwards.
        compute_s, stall_s, load_s, moe_s, forward_s: likewise; see `ExpertUsage`.
    """

    layers: int = 0
    own_active: int = 0
    active: int = 0
    hits: int = 0
    resident: int = 0
    bytes_from_disk: int = 0
    bytes_to_device: int = 0
    evictions: int = 0
    compute_s: float = 0.0
    stall_s: float = 0.0
    load_s: float = 0.0
    moe_s: float = 0.0
    forward_s: float = 0.0

    def add(self, used: ExpertUsage, span: int, forward_s: float, denoising: bool) -> None:
        """One forward of `forward_s` seconds, in which the sequence's tokens were those of `span`."""
        if denoising:
            self.layers += used.layers
            self.own_active += used.active_by_span[span]
            self.active += used.active
            self.hits += used.hits
            self.resident += used.resident
        self.bytes_from_disk += used.bytes_from_disk
        self.bytes_to_device += used.bytes_to_device
        self.evictions += used.evictions
        self.compute_s += used.compute_s
        self.stall_s += used.stall_s
        self.load_s += used.load_s
        self.moe_s += used.moe_s
        self.forward_s += forward_s
