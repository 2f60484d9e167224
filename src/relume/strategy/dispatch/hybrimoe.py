"""HybriMoE's greedy schedule with two pointers."""

from __future__ import annotations

import numpy as np

from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase


class HybriMoE(Dispatch):
    """Experts by falling tokens; the device takes from the front, the host from the back, whichever ends earlier.

    This is the schedule of one decoded token in HybriMoE's code (arXiv 2504.05897, `HSS` in `experts.py`). Its
    list begins with the residents, which only the device has reason to take: here they are `resident_s`, when the
    device becomes free. An expert from the front starts when the device is free and the link has brought it, one
    after the other in this same order. A tie goes to the device. The host pays its start with its first expert.

    Our choices: the case's times in place of the constants there; the host takes no residents, which theirs could;
    what the host cannot compute goes to the device before the pointers start, as theirs can compute everything.
    """

    def plan(self, case: DispatchCase) -> np.ndarray:
        """What the device takes."""
        transfer, device, host = case.transfer_s.tolist(), case.device_s.tolist(), case.host_s.tolist()
        transferred = case.must_transfer
        by_tokens = np.argsort(-case.counts, kind="stable")
        moved, device_end, host_end = 0.0, case.resident_s, case.host_start_s
        for expert in by_tokens[transferred[by_tokens]].tolist():
            moved += transfer[expert]
            device_end = max(device_end, moved) + device[expert]
        queue: list[int] = by_tokens[~transferred[by_tokens]].tolist()
        first, last = 0, len(queue) - 1
        while first <= last:
            front, back = queue[first], queue[last]
            device_would_end = max(device_end, moved + transfer[front]) + device[front]
            if device_would_end <= host_end + host[back]:
                moved += transfer[front]
                device_end = device_would_end
                transferred[front] = True
                first += 1
            else:
                host_end += host[back]
                last -= 1
        return transferred
