"""Experts that are brought before anything asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from relume.experts.arena import Arena
from relume.experts.loader import Load, Loader
from relume.strategy.lanes import Key


class Ahead:
    """Loads that nobody waits for, until the layer that they are for begins.

    Args:
        loader: brings them when it has nothing else to do.
        arena: gives each a slot.
        num_slots: that they may hold at once; the arena has as many for them.

    Attributes:
        loads: by expert, whether they have ended or not; each holds a slot.
    """

    def __init__(self, loader: Loader, arena: Arena, num_slots: int) -> None:
        self.loads: dict[Key, Load] = {}
        self._loader = loader
        self._arena = arena
        self._num_slots = num_slots
        self._wanted: list[Key] = []
        self._order: list[Key] = []  # of urgency
        self._finished: SimpleQueue[Load] = SimpleQueue()  # whoever looks, looks at the loads

    def order(self, keys: Sequence[Key]) -> None:
        """Bring these, the first one first; as many as there are slots for now, the others as slots come free."""
        self._wanted, self._order = list(keys), list(keys)
        queued = [self.loads[key] for key in keys if key in self.loads]
        for load in self._loader.bring_ahead(queued):
            self._drop(load)
        self._fill()

    def arrived(self, layer: int) -> list[int]:
        """Experts of a layer that are there, ascending.

        One that could not be read is forgotten: if it is asked for, reading it again says what is wrong.
        """
        here = [load for (its_layer, _), load in self.loads.items() if its_layer == layer and load.ended]
        for load in here:
            if load.error is not None:
                self._drop(load)
        return sorted(load.expert for load in here if load.error is None)

    def take(self, key: Key) -> Load | None:
        """The load of an expert, if there is one, which is the caller's from now on, as its slot."""
        if key in self._wanted:
            self._wanted.remove(key)
        load = self.loads.pop(key, None)
        self._fill()
        return load

    def forget(self) -> None:
        """All loads have ended or are given up, and nobody's slots are theirs."""
        self.loads.clear()
        self._wanted.clear()

    def _fill(self) -> None:
        fresh: list[Load] = []
        while self._wanted and len(self.loads) < self._num_slots and self._arena.num_free:
            layer, expert = key = self._wanted.pop(0)
            if key not in self.loads:
                self.loads[key] = Load(layer, expert, self._arena.take(), self._finished, ahead=True)
                fresh.append(self.loads[key])
        if fresh:
            place = {key: index for index, key in enumerate(self._order)}
            waiting = [load for load in self.loads.values() if not load.began]
            waiting.sort(key=lambda load: place.get((load.layer, load.expert), -1))
            self._loader.bring_ahead(waiting)

    def _drop(self, load: Load) -> None:
        del self.loads[load.layer, load.expert]
        self._arena.give_back(load.lease)
