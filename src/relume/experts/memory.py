"""The experts of a model in a bounded arena: what is resident, and bringing what is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from relume.core import SpanInput, SpanSignals
from relume.experts.access import Access
from relume.experts.ahead import Ahead
from relume.experts.arena import Arena, Lease
from relume.experts.lanes import LaneCosts
from relume.experts.loader import Load, Loader
from relume.experts.usage import ExpertUsage
from relume.strategy.lanes import Key
from relume.strategy.placement import Placement
from relume.strategy.pool import ResidentPool
from relume.strategy.use import LayerUse


class ExpertMemory:
    """Keeps the arena in the state that the pool says.

    The arena has more slots than may be resident: a miss is read into one of the others. If it stays, its slot
    becomes a resident one and the slot of what it replaces becomes free; nothing is copied.

    Args:
        arena: at least one slot more than the pool may hold, unless that is every expert.
        loader: fills slots.
        ahead: what is brought before anything asks for it.
        placement: which experts are resident, and where the others are computed.
        costs: of the lanes, which learn from what is measured.
    """

    def __init__(self, arena: Arena, loader: Loader, ahead: Ahead, placement: Placement, costs: LaneCosts) -> None:
        self.arena = arena
        self.loader = loader
        self.ahead = ahead
        self.placement = placement
        self.costs = costs
        self.leases: dict[Key, Lease] = {}
        self._settled = True
        self._stuck: list[Load] = []  # given up, but still being written: their slots are nobody's

    @property
    def pool(self) -> ResidentPool:
        """Which experts are resident."""
        return self.placement.pool

    def preload(self, progress: Callable[[int], None]) -> None:
        """Prepare the source, and fill the slots by rank if the strategy wants that; `progress` is told of bytes.

        Raises as `ExpertSource.read` and `Loader.wait`; what was read stays usable.
        """
        self.loader.source.prepare(progress)
        self.begin()
        try:
            wanted = self.placement.fill()
            finished: SimpleQueue[Load] = SimpleQueue()
            # In the order of places on disk, not of rank.
            for layer, expert in sorted(wanted):
                self.loader.submit(Load(layer, expert, self.arena.take(), finished))
            missing = len(wanted)
            while missing:
                for load in self.loader.wait(finished):
                    if load.error is not None:
                        raise load.error
                    self.leases[load.layer, load.expert] = load.lease
                    missing -= 1
                    progress(load.bytes_from_disk)
        except BaseException:
            self.recover()
            raise
        self.end()

    def access(self, use: LayerUse, usage: ExpertUsage) -> Access:
        """A context in which a layer's active experts are found, and those that are missing are brought."""
        return Access(self, use, usage)

    def begin(self) -> None:
        """Slots and residents are about to change; `end` says that they agree again."""
        if not self._settled or any(load.ended for load in self._stuck):
            self.recover()  # an interrupt kept the last change from its end, or a read has come to one after all
        self._settled = False

    def end(self) -> None:
        """The change that `begin` announced is complete."""
        self._settled = True

    def recover(self) -> None:
        """Make slots and residents agree after a change that was broken off at any point.

        What is leased to an expert was loaded completely, and stays. All else is free, except the slots of reads
        that do not end.
        """
        self._settled = False
        self._stuck = self.loader.halt()
        self.loader.copies.settle()
        self.ahead.forget()
        self.arena.reclaim([*self.leases.values(), *(load.lease for load in self._stuck)])
        self.pool.restore(self.leases)
        self.placement.monitor.forget_but(self.leases)
        self._settled = True

    def check_integrity(self) -> None:
        """Fail unless, between forwards, each slot is free or one resident expert's, and no other is resident."""
        others = [*self._stuck, *self.ahead.loads.values()]
        self.arena.check_partition([*self.leases.values(), *(load.lease for load in others)])
        resident = zip(*(indices.tolist() for indices in np.nonzero(self.pool.resident)), strict=True)
        assert set(resident) == set(self.leases), "residents and leases differ"
        assert len(self.leases) <= self.pool.num_slots, "more residents than slots"

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:
        """Tell the strategy what is about to be computed."""
        self.placement.begin_forward(spans)

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Tell the strategy what the decoder made of the forward; it may have experts brought ahead."""
        self.begin()
        self.placement.end_forward(spans)
        self.end()

    def resize(self, slots: Sequence[int] | int) -> None:
        """Let fewer experts be resident, or as many again as the arena was made for; the lowest ranks leave."""
        self.begin()
        for key in self.pool.resize(slots, self.placement.retention):
            self.arena.give_back(self.leases.pop(key))
        self.end()

    def close(self) -> None:
        """End the threads and close the files."""
        self.loader.close()
