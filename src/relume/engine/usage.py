"""What one request used of the experts."""

from __future__ import annotations

from dataclasses import dataclass

from relume.experts.usage import ExpertUsage, Traffic


@dataclass
class Usage(Traffic):
    """What a sequence's forwards used. Those it shared with other requests count in full for each.

    Attributes:
        layers: MoE layers in its denoising forwards, over which the next four are summed.
        own_active: distinct experts that the sequence's own tokens used (all tokens' if batches are joined).
        active: those that the whole batch used; `hits` of them were resident, out of `resident` that were.
        other_layers, other_active: as `layers` and `own_active`, of prefills and of forwards that commit K/V.
        forward_s: seconds of its forwards.
    """

    layers: int = 0
    own_active: int = 0
    active: int = 0
    hits: int = 0
    resident: int = 0
    other_layers: int = 0
    other_active: int = 0
    forward_s: float = 0.0

    def add(self, used: ExpertUsage, span: int, forward_s: float, denoising: bool) -> None:
        """One forward of `forward_s` seconds, in which the sequence's tokens were those of `span`."""
        if denoising:
            self.layers += used.layers
            self.own_active += used.active_by_span[span]
            self.active += used.active
            self.hits += used.hits
            self.resident += used.resident
        else:
            self.other_layers += used.layers
            self.other_active += used.active_by_span[span]
        self.add_traffic(used)
        self.forward_s += forward_s
