"""The misses of one layer, and what computing them would take on each lane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DispatchCase:
    """What a dispatch is decided on. Arrays have one entry a miss; times are seconds, float64.

    There are two lanes. On the *device* lane an expert crosses the link, one after the other, and is then computed
    by the device, one after the other; the device starts with the residents and takes no expert before it has
    arrived. On the *host* lane experts are computed where they lie, one after the other. A layer ends when both
    lanes have ended.

    Attributes:
        counts: int64, tokens that use the expert.
        reuse: by how much each outranks the resident that it would displace, 0 if it would not stay; the unit is
            the retention's.
        transfer_s: for the link to bring it.
        device_s: for the device to compute it.
        host_s: for the host to compute it; infinite where it cannot.
        resident_s: for the device to compute what is resident already.
        host_start_s: that the host lane takes besides, if it computes anything.
    """

    counts: np.ndarray
    reuse: np.ndarray
    transfer_s: np.ndarray
    device_s: np.ndarray
    host_s: np.ndarray
    resident_s: float = 0.0
    host_start_s: float = 0.0

    @property
    def num_misses(self) -> int:
        """Experts to decide on."""
        return len(self.counts)

    @property
    def must_transfer(self) -> np.ndarray:
        """`[m]` bool: what the host cannot compute."""
        return np.asarray(np.isinf(self.host_s))
