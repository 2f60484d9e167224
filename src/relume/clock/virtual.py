"""Time, charged forward by forward to a machine that is described, not used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.clock.link import Link
from relume.core import SpanInput
from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.dispatch.lanes import lane_seconds, link_order
from relume.strategy.lanes import PREFETCH_SLOTS, Key
from relume.strategy.use import ExpertShape, LayerUse


class VirtualClock:
    """The `Lanes` of a machine, simulated. Equal calls give equal bits: there is nothing in it but arithmetic.

    All requests of a forward are charged as one: weights are read once for the tokens of all of them, K/V of each
    apart. Every token is charged attention to the whole context of its request, also where the mask hides the end
    of it. Not charged: the embedding, of which a row a token is looked up, norms beyond their launches, and the
    host's decisions. Link, device and host do not slow each other, beyond what the machine's constants allow for.

    Host memory holds as many experts as `Hardware.host_experts` says, as many of each layer. The others come from
    disk first, and then occupy the link for both ways; the host cannot compute them.

    Args:
        hardware: to charge to.
        work: the model's sizes.
        shape: the model's experts.
        prefetch_slots: see `Link`.

    Attributes:
        now: seconds since the start; the sum of `device_s`, `stall_s` and `overhead_s`.
        device_s: that the device computed, launches of experts included.
        stall_s: that it waited for experts, those on their way and those that the host computes.
        overhead_s: for launches of a layer outside its experts, the host learning of expert ids, and sampling.
        host_s: that the host computed experts, its start included.
        experts_s: of layers' experts, from the first to the last; `experts_device_s` of that the device computed.
    """

    def __init__(
        self, hardware: Hardware, work: WorkShape, shape: ExpertShape, prefetch_slots: int = PREFETCH_SLOTS
    ) -> None:
        assert shape.num_layers == work.num_moe_layers
        self._hardware = hardware
        self._work = work
        self._on_disk = ~held_experts(hardware.host_experts(work.expert_bytes), shape)
        by_link, by_disk = hardware.transfer_s(work.expert_bytes), hardware.disk_s(work.expert_bytes)
        from_disk = by_link if hardware.link_is_disk else by_disk + by_link
        self._link = Link(
            np.where(self._on_disk, from_disk, by_link), self._on_disk, work.expert_bytes, prefetch_slots
        )
        self._dense_layer_s = self._moe_layer_s = 0.0
        self.now = 0.0
        self.device_s = 0.0
        self.stall_s = 0.0
        self.overhead_s = 0.0
        self.host_s = 0.0
        self.experts_s = 0.0
        self.experts_device_s = 0.0

    @property
    def link_s(self) -> float:
        """Seconds in which something crossed the link."""
        return self._link.busy_s

    @property
    def bytes_over_link(self) -> int:
        """Of experts that reached the device, and of prefetches that were given up on the way."""
        return self._link.num_bytes

    @property
    def bytes_from_disk(self) -> int:
        """Of those, the bytes that came from disk."""
        return self._link.disk_bytes

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Charge the layers before the first one with experts."""
        work, num_tokens = self._work, sum(len(span.token_ids) for span in spans)
        attention = self._dense_s(work.attention_parameters, num_tokens)
        for span in spans:
            length = len(span.token_ids)
            # Scores and their use are a product of keys and values with the queries of every head that share them.
            values = (span.start + length) * work.kv_values_per_position
            attention += self._dense_s(values, length * work.query_group)
        self._dense_layer_s = attention + self._dense_s(work.dense_parameters, num_tokens)
        self._moe_layer_s = attention + (
            self._dense_s(work.router_parameters, num_tokens) + self._dense_s(work.shared_parameters, num_tokens)
        )
        for _ in range(work.num_dense_layers):
            self._pass(device=self._dense_layer_s, overhead=self._hardware.layer_overhead_s)

    def begin_layer(self, layer: int) -> None:
        """Charge attention, router and shared expert, and the host's learning of the experts chosen."""
        del layer  # all are alike
        sync = self._hardware.si("link.router_sync")
        self._pass(device=self._moe_layer_s, overhead=self._hardware.layer_overhead_s + sync)

    def arrived(self, layer: int) -> list[int]:
        """Prefetched experts of a layer that are across by now and were not told of before, ascending."""
        return self._link.take(layer)

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        """What the layer's misses take.

        Args:
            use: of the layer.
            hits, misses: expert ids, together the active set.
            reuse: one for each miss.
        """
        work, machine, counts = self._work, self._hardware, use.token_counts
        expert = (work.expert_parameters, work.itemsize, work.expert_bytes)
        host_s = machine.host_kernel_s(counts[misses], *expert)
        return DispatchCase(
            counts=counts[misses],
            reuse=reuse,
            transfer_s=self._link.remaining_s(use.layer, misses),
            device_s=machine.device_kernel_s(counts[misses], *expert),
            host_s=np.where(self._on_disk[use.layer, misses], np.inf, host_s),
            resident_s=float(machine.device_kernel_s(counts[hits], *expert).sum()),
            host_start_s=machine.si("host.start"),
        )

    def run_layer(self, layer: int, misses: np.ndarray, case: DispatchCase, transferred: np.ndarray) -> None:
        """Charge both lanes of a layer until the later of them ends.

        Args:
            layer: whose case it is.
            misses: as given to `case`.
            case: as it was given.
            transferred: `[m]` bool, what crosses the link; the others are the host's.
        """
        crossing = link_order(case, transferred)
        self._link.bring(layer, misses[crossing], case.transfer_s[crossing].tolist())
        self._link.forget(layer, misses[~transferred])
        device_end, host_end = lane_seconds(case, transferred)
        end = max(device_end, host_end)
        assert end < np.inf, "an expert on disk was left to the host"
        computing = case.resident_s + float(case.device_s[transferred].sum())
        self.host_s += host_end
        self.experts_s += max(end, computing)
        self.experts_device_s += computing
        self._pass(device=computing, stall=max(0.0, end - computing))

    def end_forward(self, num_rows: int) -> None:
        """Charge the head over `num_rows` positions, and sampling, if there are any."""
        if num_rows:
            head = self._dense_s(self._work.head_parameters, num_rows)
            self._pass(device=head, overhead=self._hardware.si("device.sampling"))

    def order(self, keys: Sequence[Key]) -> None:
        """Prefetch these, the most urgent first, and no others."""
        self._link.order(keys)

    def _dense_s(self, parameters: int, num_tokens: int) -> float:
        return self._hardware.dense_s(parameters, num_tokens, self._work.itemsize) if parameters else 0.0

    def _pass(self, device: float = 0.0, stall: float = 0.0, overhead: float = 0.0) -> None:
        self.device_s += device
        self.stall_s += stall
        self.overhead_s += overhead
        self.now += device + stall + overhead
        self._link.prefetch_until(self.now)


def dense_s(hardware: Hardware, work: WorkShape, shape: ExpertShape, span: SpanInput, num_rows: int) -> float:
    """What a forward over a request's tokens takes outside routed experts, the head over `num_rows` included."""
    clock = VirtualClock(hardware, work, shape)
    clock.begin_forward([span])
    for layer in range(shape.num_layers):
        clock.begin_layer(layer)
    clock.end_forward(num_rows)
    return clock.now


def held_experts(num_held: int, shape: ExpertShape) -> np.ndarray:
    """`[layers, experts]` bool: as many as may be held, the same number of each layer, lower ids first."""
    order = np.arange(shape.num_experts) * shape.num_layers + np.arange(shape.num_layers)[:, None]
    return order < num_held
