"""One layer's experts during one forward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Self

from relume.experts.arena import Lease
from relume.experts.formats import Views
from relume.experts.loader import Load
from relume.experts.usage import ExpertUsage
from relume.strategy.use import LayerUse

if TYPE_CHECKING:
    from relume.experts.memory import ExpertMemory

Leased = tuple[int, Lease]


class Access:
    """A context that finds a layer's active experts, brings those that are missing, and leaves nothing half done.

    Args:
        memory: of the experts.
        use: the layer's routing.
        usage: is added to.

    Attributes:
        hits: (expert, lease) of those that were resident.
        hosted: (expert, tensors) of those to be computed where they lie.
    """

    def __init__(self, memory: ExpertMemory, use: LayerUse, usage: ExpertUsage) -> None:
        self._memory = memory
        self._use = use
        self._usage = usage
        self._kept: set[int] = set()
        self._waiting: deque[int] = deque()
        self._in_flight: dict[int, Load] = {}
        self._arrived: list[Load] = []  # being computed
        self._finished: SimpleQueue[Load] = SimpleQueue()
        self._began, self._ended = float("inf"), 0.0
        self._leaving: list[Lease] = []  # hits that make room: their slots are free once they are computed
        self.hits: list[Leased] = []
        self.hosted: list[tuple[int, Views]] = []

    def __enter__(self) -> Self:
        try:
            self._memory.begin()
            self._decide()
            self._start_loads()
        except BaseException:
            self._memory.recover()
            raise
        return self

    def arrivals(self) -> Iterator[list[Leased]]:
        """Missed experts as they arrive, some at a time; those of a batch may be used until the next is asked for.

        To be called when the hits have been computed.

        Raises:
            Exception: that of the first load that failed; see also `Loader.wait`.
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
        self._usage.load_s += max(0.0, self._ended - self._began)
        if kind is not None or self._leaving or self._waiting or self._in_flight or self._arrived:
            self._memory.recover()
        else:
            self._memory.end()

    def _decide(self) -> None:
        memory, usage, layer = self._memory, self._usage, self._use.layer
        decision = memory.placement.decide(self._use)
        usage.take(decision)
        if usage.record:
            usage.decisions.append(decision)
            usage.routings.append((self._use.expert_ids, self._use.weights))
        self._receive(decision.arrived.tolist(), set(decision.brought.tolist()))
        self._kept.update(decision.kept.tolist())
        self._waiting.extend(decision.transferred.tolist())
        hits = decision.hits.tolist()  # ascending
        self.hits = [(expert, memory.leases[layer, expert]) for expert in hits]
        self.hosted = [(expert, self._where_it_lies(expert)) for expert in decision.hosted.tolist()]
        in_use = set(hits)
        for key in decision.evicted:
            lease = memory.leases.pop(key)
            if key[0] == layer and key[1] in in_use:
                self._leaving.append(lease)
            else:
                memory.arena.give_back(lease)

    def _receive(self, arrived: Sequence[int], brought: Collection[int]) -> None:
        """Take over what was brought ahead for the layer; on a virtual machine it is loaded only now."""
        memory, layer = self._memory, self._use.layer
        missing = 0
        for expert in arrived:
            load = memory.ahead.take((layer, expert))
            if load is not None:
                self._usage.bytes_from_disk += load.bytes_from_disk
                if expert in brought:
                    memory.leases[layer, expert] = load.lease
                else:
                    memory.arena.give_back(load.lease)
            elif expert in brought:
                memory.loader.submit(Load(layer, expert, memory.arena.take(), self._finished))
                missing += 1
        while missing:
            for load in memory.loader.wait(self._finished):
                if load.error is not None:
                    raise load.error
                memory.leases[layer, load.expert] = load.lease
                self._usage.bytes_from_disk += load.bytes_from_disk
                missing -= 1
        self._usage.bytes_to_device += len(arrived) * memory.arena.format.slot_bytes

    def _where_it_lies(self, expert: int) -> Views:
        views = self._memory.loader.source.held(self._use.layer, expert)
        assert views is not None, f"expert {expert} was to be computed in host memory, where it is not"
        return views

    def _start_loads(self) -> None:
        memory, layer = self._memory, self._use.layer
        while self._waiting:
            ahead = memory.ahead.take((layer, self._waiting[0]))
            if ahead is None and not memory.arena.num_free:
                return
            expert = self._waiting.popleft()
            if ahead is not None:  # on its way already
                self._in_flight[expert] = ahead
                memory.loader.hurry(ahead, self._finished)
                continue
            load = Load(layer, expert, memory.arena.take(), self._finished)
            self._in_flight[expert] = load
            memory.loader.submit(load)

    def _wait(self) -> None:
        """Wait for one load and take those that have ended by then."""
        started = time.perf_counter()
        loader = self._memory.loader
        loads = loader.wait(self._finished, loader.copies.batch)
        self._usage.stall_s += time.perf_counter() - started
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

    def _free_leaving(self) -> None:
        while self._leaving:
            self._memory.arena.give_back(self._leaving.pop())
