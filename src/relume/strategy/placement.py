"""One strategy's decisions, forward by forward: the same calls whether an engine is live or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.lanes import link_order
from relume.strategy.lanes import Key, Lanes
from relume.strategy.pool import ResidentPool
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.prefetch.monitor import PrefetchMonitor
from relume.strategy.retention.base import Retention
from relume.strategy.use import LayerUse


@dataclass(frozen=True)
class LayerDecision:
    """What one layer of one forward finds, and what becomes of it. Expert ids are ascending unless it says so.

    Attributes:
        arrived: prefetched experts that had come for the layer; those of them that stay are `brought`.
        resident: experts that were resident then.
        hits: active experts that were.
        transferred: misses that are brought and computed on the device, in the order in which they cross the link.
        hosted: misses that are computed where they lie.
        kept: those of the transferred ones that stay; the others are used once.
        evicted: (layer, expert) pairs that leave.
        useful, wasted: prefetched experts that were used here for the first time, and that left or were dropped
            before they were.
    """

    arrived: np.ndarray
    brought: np.ndarray
    resident: int
    hits: np.ndarray
    transferred: np.ndarray
    hosted: np.ndarray
    kept: np.ndarray
    evicted: tuple[Key, ...]
    useful: int
    wasted: int

    @property
    def num_misses(self) -> int:
        """Active experts that were not resident."""
        return len(self.transferred) + len(self.hosted)

    @property
    def misses(self) -> np.ndarray:
        """Their ids, ascending."""
        return np.sort(np.concatenate((self.transferred, self.hosted)))


@dataclass(frozen=True)
class Parts:
    """A strategy's objects.

    Attributes:
        retention: what stays.
        prefetch: what is brought ahead, if anything; it may be the retention itself.
        dispatch: where a miss is computed; it may be the retention itself.
    """

    retention: Retention
    prefetch: Prefetch | None
    dispatch: Dispatch


class Placement:
    """Which experts are resident, and where the others are computed.

    Args:
        pool: who is resident.
        parts: that decide.
        lanes: that do it.

    Attributes:
        monitor: of the prefetches.
    """

    def __init__(self, pool: ResidentPool, parts: Parts, lanes: Lanes) -> None:
        self.pool = pool
        self.retention = parts.retention
        self.prefetch = parts.prefetch
        self.dispatch = parts.dispatch
        self.lanes = lanes
        self.monitor = PrefetchMonitor()

    def fill(self) -> list[Key]:
        """What is to be loaded before the first forward, in order of rank."""
        return self.pool.fill(self.retention) if self.retention.preload else []

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """A forward over these requests' tokens begins."""
        self.retention.begin_forward(spans)
        if self._apart is not None:
            self._apart.begin_forward(spans)
        self.lanes.begin_forward(spans)

    def decide(self, use: LayerUse) -> LayerDecision:
        """Decide on a layer whose routing is known."""
        layer, pool, retention = use.layer, self.pool, self.retention
        useful, wasted = self.monitor.useful, self.monitor.wasted
        self.lanes.begin_layer(layer)
        arrived, brought, gone = self._receive(layer)
        resident = int(np.count_nonzero(pool.resident[layer]))
        retention.observe(use)
        if self._apart is not None:
            self._apart.observe(use)
        hits, misses = pool.look(use)
        case = self.lanes.case(use, hits, misses, pool.gains(layer, misses, retention))
        there = self.dispatch.plan(case)
        self.lanes.run_layer(layer, misses, case, there)
        wanted = misses[there & retention.admits(use)[misses]]
        kept, evicted = pool.admit(layer, wanted, retention)
        retention.placed(layer, kept)
        self.monitor.used((layer, expert) for expert in hits.tolist())
        self.monitor.left(evicted)
        self._order(layer)
        return LayerDecision(
            arrived=arrived,
            brought=brought,
            resident=resident,
            hits=hits,
            transferred=misses[link_order(case, there)],
            hosted=misses[~there],
            kept=kept,
            evicted=(*gone, *evicted),
            useful=self.monitor.useful - useful,
            wasted=self.monitor.wasted - wasted,
        )

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Take note of what the decoder made of the forward, its requests in order."""
        self.retention.end_forward(spans)
        if self._apart is not None:
            self._apart.end_forward(spans)
        self.lanes.end_forward(sum(int(np.count_nonzero(span.masked)) for span in spans))
        self._order(None)

    @property
    def _apart(self) -> Prefetch | None:
        """The prefetch, unless it is the retention, which knows already."""
        known: object = self.retention
        return None if self.prefetch is known else self.prefetch

    def _receive(self, layer: int) -> tuple[np.ndarray, np.ndarray, tuple[Key, ...]]:
        """Let in what has arrived for a layer; returns it, what of it stays, and what leaves."""
        arrived = np.array(self.lanes.arrived(layer), dtype=np.int64)
        if not len(arrived):
            return arrived, arrived, ()
        absent = arrived[~self.pool.resident[layer, arrived]]
        brought, evicted = self.pool.admit(layer, absent, self.retention)
        self.monitor.brought((layer, expert) for expert in brought.tolist())
        self.monitor.left(evicted, dropped=len(arrived) - len(brought))
        return arrived, brought, evicted

    def _order(self, layer: int | None) -> None:
        if self.prefetch is None:
            return
        keys = [] if self.monitor.stopped else self.prefetch.wanted(layer, self.pool, self.retention)
        if keys is not None:
            self.lanes.order(keys)
