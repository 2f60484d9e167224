"""The experts of a model in a bounded arena: what is resident, and bringing what is not."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from relume.core import SpanSignals
from relume.experts.arena import Arena, Lease
from relume.experts.loader import Load, Loader
from relume.experts.usage import ExpertUsage
from relume.strategy.pool import Decision, ResidentPool
from relume.strategy.retention.base import Retention
from relume.strategy.use import LayerUse

Leased = tuple[int, Lease]


class ExpertMemory:
    """Keeps the arena in the state that the pool says.

    The arena has more slots than may be resident: a miss is read into one of the others. If it stays, its slot
    becomes a resident one and the slot of what it replaces becomes free; nothing is copied.

    Args:
        arena: at least one slot more than the pool may hold, unless that is every expert.
        loader: fills slots.
        pool: which experts are resident.
        retention: ranks them.
    """

    def __init__(self, arena: Arena, loader: Loader, pool: ResidentPool, retention: Retention) -> None:
        self.arena = arena
        self.loader = loader
        self.pool = pool
        self.retention = retention
        self.leases: dict[tuple[int, int], Lease] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self.arena.memory.numel()

    def preload(self, progress: Callable[[int], None]) -> None:
        """Fill the slots by rank, if the strategy wants that; `progress` is told of bytes read.

        Raises as `ExpertSource.read`; what was read stays usable.
        """
        if not self.retention.preload:
            return
        wanted = self.pool.fill(self.retention)
        finished: SimpleQueue[Load] = SimpleQueue()
        # In the order of places on disk, not of rank.
        for layer, expert in sorted(wanted):
            self.loader.submit(Load(layer, expert, self.arena.take(), finished))
        error = None
        for _ in wanted:
            load = finished.get()
            if load.error is not None:
                error = load.error
                self.arena.give_back(load.lease)
                self.pool.forget(load.layer, load.expert)
                continue
            self.leases[load.layer, load.expert] = load.lease
            progress(load.bytes_from_disk)
        if error is not None:
            raise error

    def access(self, use: LayerUse, usage: ExpertUsage) -> Access:
        """Find a layer's active experts, and start to bring those that are missing."""
        usage.layers += 1
        usage.resident += int(self.pool.resident[use.layer].sum())
        self.retention.observe(use)
        decision = self.pool.decide(use, self.retention)
        usage.hits += len(decision.hits)
        usage.active += len(decision.hits) + len(decision.misses)
        if usage.record:
            usage.misses.append(decision.misses)
            usage.routings.append((use.expert_ids, use.weights))
        return Access(self, use.layer, decision, usage)

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:
        """Tell the strategy what the decoder made of the forward."""
        self.retention.end_forward(spans)

    def resize(self, slots: Sequence[int] | int) -> None:
        """Let fewer experts be resident, or as many again as the arena was made for; the lowest ranks leave."""
        for key in self.pool.resize(slots, self.retention):
            self.arena.give_back(self.leases.pop(key))

    def close(self) -> None:
        """End the threads and close the files."""
        self.loader.close()


class Access:
    """One layer's experts during one forward; a context that leaves nothing half done.

    Attributes:
        hits: (expert, lease) of those that were resident.
    """

    def __init__(self, memory: ExpertMemory, layer: int, decision: Decision, usage: ExpertUsage) -> None:
        self._memory = memory
        self._layer = layer
        self._usage = usage
        self._kept = set(decision.kept.tolist())
        self._waiting = deque(decision.misses.tolist())
        self._in_flight: dict[int, Load] = {}
        self._arrived: list[Load] = []  # being computed
        self._finished: SimpleQueue[Load] = SimpleQueue()
        self._began, self._ended = float("inf"), 0.0
        hits = set(decision.hits.tolist())
        self._leaving: list[Lease] = []  # hits that make room: their slots are free once they are computed
        leases = memory.leases
        self.hits: list[Leased] = [(expert, leases[layer, expert]) for expert in sorted(hits)]
        for key in decision.evicted:
            lease = leases.pop(key)
            if key[0] == layer and key[1] in hits:
                self._leaving.append(lease)
            else:
                memory.arena.give_back(lease)
        self._start_loads()

    def __enter__(self) -> Self:
        return self

    def arrivals(self) -> Iterator[list[Leased]]:
        """Missed experts as they arrive, some at a time; those of a batch may be used until the next is asked for.

        To be called when the hits have been computed.

        Raises:
            Exception: that of the first load that failed.
        """
        self._free_leaving()
        while self._waiting or self._in_flight:
            self._start_loads()
            self._wait()
            yield [(load.expert, load.lease) for load in self._arrived]
            while self._arrived:
                self._settle(self._arrived.pop())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free_leaving()
        for load in list(self._in_flight.values()):  # something failed
            if self._memory.loader.cancel(load):
                self._abandon(self._in_flight.pop(load.expert))
        while self._in_flight:
            self._abandon(self._in_flight.pop(self._finished.get().expert))
        for load in self._arrived:
            self._abandon(load)
        for expert in self._kept.intersection(self._waiting):
            self._memory.pool.forget(self._layer, expert)
        self._usage.load_s += max(0.0, self._ended - self._began)

    def _start_loads(self) -> None:
        arena, loader = self._memory.arena, self._memory.loader
        while self._waiting and arena.num_free:
            expert = self._waiting.popleft()
            load = Load(self._layer, expert, arena.take(), self._finished)
            self._in_flight[expert] = load
            loader.submit(load)

    def _wait(self) -> None:
        """Wait for one load and take all that have ended by then."""
        started = time.perf_counter()
        loads = [self._finished.get()]
        self._usage.stall_s += time.perf_counter() - started
        while True:
            try:
                loads.append(self._finished.get_nowait())
            except Empty:
                break
        for load in loads:
            self._arrived.append(self._in_flight.pop(load.expert))
            self._began, self._ended = min(self._began, load.began), max(self._ended, load.ended)
            self._usage.bytes_from_disk += load.bytes_from_disk
            self._usage.bytes_to_device += self._memory.arena.format.slot_bytes
        for load in loads:
            if load.error is not None:
                raise load.error

    def _settle(self, load: Load) -> None:
        """A computed miss stays, or its slot is free."""
        if load.expert in self._kept:
            self._memory.leases[load.layer, load.expert] = load.lease
        else:
            self._memory.arena.give_back(load.lease)

    def _abandon(self, load: Load) -> None:
        """A load that failed, or that nobody will compute with."""
        self._memory.arena.give_back(load.lease)
        if load.expert in self._kept:
            self._memory.pool.forget(load.layer, load.expert)

    def _free_leaving(self) -> None:
        for lease in self._leaving:
            self._memory.arena.give_back(lease)
        self._leaving.clear()
