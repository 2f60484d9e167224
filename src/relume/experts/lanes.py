"""This machine's link, device and host, as strategies see them: with what they have been seen to take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import SpanInput
from relume.experts.ahead import Ahead
from relume.experts.source import ExpertSource
from relume.machine.hardware import Hardware
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.lanes import Key
from relume.strategy.use import LayerUse

#: Weight of the latest layer in what a lane is taken to cost.
_LATEST = 0.1


class LaneCosts:
    """Predicted seconds of each lane, scaled by what came of earlier predictions.

    Args:
        hardware: the first prediction; `None` where nothing was measured, then all lanes are alike.
        parameters, itemsize: of an expert's weights.
        slot_bytes: of an expert in a slot.
    """

    def __init__(self, hardware: Hardware | None, parameters: int, itemsize: int, slot_bytes: int) -> None:
        self._hardware = hardware
        self._parameters, self._itemsize = parameters, itemsize
        self._transfer_s = 1.0 if hardware is None else hardware.disk_s(slot_bytes)
        self.scales = {"transfer": 1.0, "device": 1.0, "host": 1.0}

    def kernel_s(self, counts: np.ndarray, lane: str) -> np.ndarray:
        """`[n]` for experts of so many tokens on the `device` or the `host` lane."""
        if self._hardware is None:
            return np.full(len(counts), self.scales[lane])
        return self.scales[lane] * self._hardware.device_kernel_s(counts, self._parameters, self._itemsize)

    def transfer_s(self) -> float:
        """For one expert."""
        return self.scales["transfer"] * self._transfer_s

    def learn(self, lane: str, predicted_s: float, measured_s: float) -> None:
        """A lane took `measured_s` for what was predicted to take `predicted_s`."""
        if predicted_s > 0.0 and measured_s > 0.0:
            self.scales[lane] *= (1.0 - _LATEST) + _LATEST * measured_s / predicted_s


class MachineLanes:
    """See `Lanes`. Time passes by itself, so most calls only look.

    Args:
        ahead: brings what is prefetched.
        source: says what lies in host memory, where it can be computed.
        costs: of the lanes.
    """

    def __init__(self, ahead: Ahead, source: ExpertSource, costs: LaneCosts) -> None:
        self.costs = costs
        self._ahead = ahead
        self._source = source

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """See `Lanes`."""

    def begin_layer(self, layer: int) -> None:
        """See `Lanes`."""

    def arrived(self, layer: int) -> list[int]:
        """See `Lanes`."""
        return self._ahead.arrived(layer)

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        """See `Lanes`."""
        counts = use.token_counts
        held = [self._source.held(use.layer, expert) is not None for expert in misses.tolist()]
        return DispatchCase(
            counts=counts[misses],
            reuse=reuse,
            transfer_s=np.full(len(misses), self.costs.transfer_s()),
            device_s=self.costs.kernel_s(counts[misses], "device"),
            host_s=np.where(held, self.costs.kernel_s(counts[misses], "host"), np.inf),
            resident_s=float(self.costs.kernel_s(counts[hits], "device").sum()),
        )

    def run_layer(self, layer: int, misses: np.ndarray, case: DispatchCase, transferred: np.ndarray) -> None:
        """See `Lanes`."""

    def end_forward(self, num_rows: int) -> None:
        """See `Lanes`."""

    def order(self, keys: Sequence[Key]) -> None:
        """See `Lanes`."""
        self._ahead.order(keys)
