"""Retention once more, in plain Python: what a pool and the policies do, from their descriptions alone."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence

from relume.strategy.use import ExpertShape
from relume.trace.record import ForwardRecord

Expert = tuple[int, int]


def uses_of(records: Iterable[ForwardRecord]) -> list[list[tuple[set[int], set[int]]]]:
    """For each forward and layer: the active experts, and those that voting tokens use."""
    forwards = []
    for record in records:
        voting: list[int] = []
        position = 0
        for span in record.spans:
            tokens = range(position, position + len(span.token_ids))
            voting += tokens[-span.block_length :]
            position = tokens.stop
        ids = record.expert_ids.tolist()
        forwards.append([({e for t in layer for e in t}, {e for t in voting for e in layer[t]}) for layer in ids])
    return forwards


class NaivePolicy(ABC):
    def __init__(self) -> None:
        self.clock = 0

    @abstractmethod
    def use(self, layer: int, experts: set[int]) -> None: ...

    @abstractmethod
    def worth(self, expert: Expert) -> float: ...

    def end_pass(self) -> None:  # noqa: B027 (most have nothing to do)
        pass


class NaiveLru(NaivePolicy):
    def __init__(self) -> None:
        super().__init__()
        self.last: dict[Expert, int] = {}

    def use(self, layer: int, experts: set[int]) -> None:
        self.clock += 1
        for expert in experts:
            self.last[layer, expert] = self.clock

    def worth(self, expert: Expert) -> float:
        return self.last.get(expert, 0)


class NaiveLfu(NaivePolicy):
    def __init__(self) -> None:
        super().__init__()
        self.uses: dict[Expert, int] = defaultdict(int)

    def use(self, layer: int, experts: set[int]) -> None:
        for expert in experts:
            self.uses[layer, expert] += 1

    def worth(self, expert: Expert) -> float:
        return self.uses[expert]


class NaiveLfru(NaiveLfu):
    def __init__(self) -> None:
        super().__init__()
        self.clocks: dict[int, int] = defaultdict(int)
        self.last: dict[Expert, int] = {}

    def use(self, layer: int, experts: set[int]) -> None:
        super().use(layer, experts)
        self.clocks[layer] += 1
        for expert in experts:
            self.last[layer, expert] = self.clocks[layer]

    def worth(self, expert: Expert) -> float:
        age = self.clocks[expert[0]] - self.last.get(expert, 0)
        return self.uses[expert] / (age + 1)


class NaiveLeastStale(NaivePolicy):
    """Two generations of experts, each with its time of entry."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: dict[Expert, int] = {}
        self.stale: dict[Expert, int] = {}
        self.fresh_before: dict[Expert, int] = {}

    def use(self, layer: int, experts: set[int]) -> None:
        self.clock += 1
        for expert in experts:
            self.stale.pop((layer, expert), None)
            self.fresh[layer, expert] = self.fresh_before.get((layer, expert), self.clock)

    def worth(self, expert: Expert) -> float:
        return 1e9 + self.fresh[expert] if expert in self.fresh else self.stale.get(expert, 0)

    def end_pass(self) -> None:
        self.stale |= self.fresh
        self.fresh_before, self.fresh = self.fresh, {}


class NaiveCounts(NaivePolicy):
    """Needs the tokens' counts, so it is told of them before each pass."""

    def __init__(self, records: Sequence[ForwardRecord]) -> None:
        super().__init__()
        self.records = iter(records)
        self.current = next(self.records)
        self.counts: dict[Expert, int] = {}

    def use(self, layer: int, experts: set[int]) -> None:
        ids = self.current.expert_ids[layer].tolist()
        last_block = ids[-self.current.spans[-1].block_length :]  # one request only
        self.counts = {key: count for key, count in self.counts.items() if key[0] != layer}
        for expert in experts:
            self.counts[layer, expert] = sum(expert in token for token in last_block)

    def worth(self, expert: Expert) -> float:
        return self.counts.get(expert, 0)

    def end_pass(self) -> None:
        self.current = next(self.records, self.current)


def naive_replay(
    records: Sequence[ForwardRecord], shape: ExpertShape, slots: Sequence[int] | int, policy: NaivePolicy
) -> list[list[tuple[int, int]]]:
    """(hits, misses) of each forward and layer."""
    resident: set[Expert] = set()
    outcome = []
    for forward in uses_of(records):
        row = []
        for layer, (active, voting) in enumerate(forward):
            policy.use(layer, voting)
            hits = {e for e in active if (layer, e) in resident}
            row.append((len(hits), len(active - hits)))
            group = range(shape.num_layers) if isinstance(slots, int) else [layer]
            inside = sorted(expert for expert in resident if expert[0] in group)
            candidates = inside + [(layer, e) for e in sorted((active - hits) & voting)]
            ranked = sorted(enumerate(candidates), key=lambda pair: (-policy.worth(pair[1]), pair[0]))
            limit = slots if isinstance(slots, int) else slots[layer]
            resident -= set(inside)
            resident |= {expert for _, expert in ranked[:limit]}
        policy.end_pass()
        outcome.append(row)
    return outcome


def lru_list(records: Sequence[ForwardRecord], slots: int) -> list[tuple[int, int]]:
    """(hits, misses) of each forward of a one-layer model: a list from the oldest to the newest, as in textbooks.

    What one forward uses is equally new. Then what was resident is newer, then the lower id.
    """
    cache: list[int] = []
    outcome = []
    for [(active, voting)] in uses_of(records):
        hits = [e for e in cache if e in active]
        outcome.append((len(hits), len(active) - len(hits)))
        cache = [e for e in cache if e not in voting]
        newcomers = sorted(voting - set(hits), reverse=True)
        touched = sorted(voting & set(hits), reverse=True)
        cache = (cache + newcomers + touched)[-slots:]
        kept = len(cache) - len([e for e in cache if e in voting])
        cache[kept:] = sorted(cache[kept:], reverse=True)
    return outcome


def most_hits(records: Sequence[ForwardRecord], shape: ExpertShape, slots: Sequence[int] | int) -> int:
    """The most hits that any choice of what to keep can have, by trying all of them; slots may start full."""
    experts = list(itertools.product(range(shape.num_layers), range(shape.num_experts)))

    def fits(kept: Iterable[Expert]) -> bool:
        if isinstance(slots, int):
            return len(list(kept)) <= slots
        layers = [layer for layer, _ in kept]
        return all(layers.count(layer) <= slots[layer] for layer in range(shape.num_layers))

    subsets = [
        frozenset(s) for r in range(len(experts) + 1) for s in itertools.combinations(experts, r) if fits(s)
    ]
    best = dict.fromkeys(subsets, 0)
    for forward in uses_of(records):
        for layer, (active, _) in enumerate(forward):
            used = {(layer, expert) for expert in active}
            after: dict[frozenset[Expert], int] = {}
            for resident, hits in best.items():
                reachable = resident | used
                gained = hits + len(used & resident)
                for kept in subsets:
                    if kept <= reachable and gained > after.get(kept, -1):
                        after[kept] = gained
            best = after
    return max(best.values())
