"""Reads the clock of a simulated machine, forward by forward."""

from __future__ import annotations

from relume.clock.virtual import VirtualClock
from relume.experts.usage import Traffic


class Meter:
    """What the clock said when it was last read."""

    def __init__(self) -> None:
        self._now = 0.0
        self._before: dict[str, float] = {}

    def charge(self, clock: VirtualClock, used: Traffic) -> float:
        """Put what the clock charged since the last call in the place of what was measured; returns its time."""
        now = {
            "bytes_from_disk": clock.bytes_from_disk,
            "bytes_to_device": clock.bytes_over_link,
            "compute_s": clock.experts_device_s,
            "stall_s": clock.stall_s,
            "host_s": clock.host_s,
            "load_s": clock.link_s,
            "moe_s": clock.experts_s,
        }
        for name, value in now.items():
            setattr(used, name, value - self._before.get(name, 0))
        self._before = now
        seconds, self._now = clock.now - self._now, clock.now
        return seconds
