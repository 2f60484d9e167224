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
#: Bytes per second that are assumed until a GPU has been seen at work: a link of 16 lanes of PCIe 3, the memory of
#: a small card, and what a few cores read.
_LINK_BANDWIDTH, _GPU_BANDWIDTH, _HOST_BANDWIDTH = 12e9, 300e9, 20e9


class LaneCosts:
    """Predicted seconds of each lane, scaled by what came of earlier predictions.

    Without a GPU the processor is device and host, and the disk is the link. With one the processor is the host;
    what the GPU and its link take is assumed, or known of the link, until they have been seen at work.

    Args:
        processor: this computer as it was measured; `None` if it was not, then all lanes are alike without a GPU.
        parameters, itemsize: of an expert's weights.
        slot_bytes: of an expert in a slot.
        on_gpu: whether slots are on a GPU.
        link_bandwidth: bytes per second from pinned memory to the GPU, if that was measured.
    """

    def __init__(
        self,
        processor: Hardware | None,
        parameters: int,
        itemsize: int,
        slot_bytes: int,
        on_gpu: bool = False,
        link_bandwidth: float | None = None,
    ) -> None:
        self._processor = processor
        self._parameters, self._itemsize = parameters, itemsize
        disk_s = 1.0 if processor is None else processor.disk_s(slot_bytes)
        self._flat: dict[str, float] = {}  # seconds of an expert where they do not depend on its tokens
        if on_gpu:
            self._transfer_s = slot_bytes / (link_bandwidth or _LINK_BANDWIDTH)
            self._disk_s = 0.0 if processor is None else disk_s
            self._flat["device"] = slot_bytes / _GPU_BANDWIDTH
            if processor is None:
                self._flat["host"] = slot_bytes / _HOST_BANDWIDTH
        else:
            self._transfer_s, self._disk_s = disk_s, 0.0
            if processor is None:
                self._flat = {"device": 1.0, "host": 1.0}
        self.scales = {"transfer": 1.0, "device": 1.0, "host": 1.0}

    def kernel_s(self, counts: np.ndarray, lane: str) -> np.ndarray:
        """`[n]` for experts of so many tokens on the `device` or the `host` lane."""
        if self._processor is None or lane in self._flat:
            return np.full(len(counts), self.scales[lane] * self._flat[lane])
        return self.scales[lane] * self._processor.device_kernel_s(counts, self._parameters, self._itemsize)

    def transfer_s(self, held: bool = True) -> float:
        """For one expert; beside a GPU it takes longer if it is not `held` in host memory."""
        return self.scales["transfer"] * self._transfer_s + (0.0 if held else self._disk_s)

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
            transfer_s=np.where(held, self.costs.transfer_s(), self.costs.transfer_s(held=False)),
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
