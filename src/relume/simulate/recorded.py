"""A recorded run's own lanes: what depended on time is repeated as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from relume.simulate.replay import Replay, ReplayResult, replay_together
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.case import DispatchCase
from relume.strategy.lanes import TimelessLanes
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.retention.context import RetentionContext
from relume.strategy.strategies import Strategy
from relume.strategy.use import LayerUse
from relume.trace.record import ForwardRecord


class Recorded(TimelessLanes, Dispatch):
    """Lanes and dispatch that repeat the record that `follow` was given."""

    def __init__(self) -> None:
        super().__init__()
        self._record: ForwardRecord | None = None
        self._hosted = np.zeros(0, dtype=bool)

    def follow(self, record: ForwardRecord) -> None:
        """The next forward is this one."""
        self._record = record

    def arrived(self, layer: int) -> list[int]:
        """As recorded."""
        assert self._record is not None
        return [int(expert) for expert in self._record.arrived[layer]]

    def case(self, use: LayerUse, hits: np.ndarray, misses: np.ndarray, reuse: np.ndarray) -> DispatchCase:
        """Nothing is decided on it: `plan` knows the misses already."""
        assert self._record is not None
        self._hosted = np.isin(misses, self._record.hosted[use.layer])
        return super().case(use, hits, misses, reuse)

    def plan(self, case: DispatchCase) -> np.ndarray:
        """As recorded."""
        return ~self._hosted


def replay_recorded(
    records: Iterable[ForwardRecord], strategy: Strategy, context: RetentionContext, slots: Sequence[int] | int
) -> ReplayResult:
    """What a live run of the strategy recorded, once more: its hits and misses, exactly."""
    run = recorded_run(strategy, context, slots)
    replay_together(records, [run], context.shape)
    return run.result()


def recorded_run(strategy: Strategy, context: RetentionContext, slots: Sequence[int] | int) -> Replay:
    """A replay that repeats where what was recorded depended on time."""
    recorded = Recorded()
    parts = replace(strategy.make(context), dispatch=recorded)
    return Replay(Placement(ResidentPool(context.shape, slots), parts, recorded), recorded.follow)
