"""Decodes several sequences together: one joined forward a step, each sequence at its own phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from relume.engine.events import Event
from relume.engine.sequence import DecodingSequence, Phase
from relume.experts.executor import ExpertCounters
from relume.model.loading import LoadedModel


@dataclass
class Usage:
    """What the forwards that a sequence took part in used. `active` counts denoising forwards only."""

    active: int = 0
    layer_calls: int = 0
    compute_s: float = 0.0


@dataclass
class Scheduler:
    """First come, first served; at most `max_batch` sequences at a time.

    A waiting entry is a function that makes its sequence, so that K/V exist only while it runs.
    """

    model: LoadedModel
    max_batch: int
    waiting: deque[tuple[int, Callable[[], DecodingSequence]]] = field(default_factory=deque)
    running: dict[int, DecodingSequence] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)

    def add(self, key: int, make_sequence: Callable[[], DecodingSequence]) -> None:
        """Queue a sequence under a key of the caller's."""
        self.waiting.append((key, make_sequence))

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[int, DecodingSequence, list[Event]]]:
        """One forward of all running sequences; returns each with its events. Finished ones leave."""
        while self.waiting and len(self.running) < self.max_batch:
            key, make_sequence = self.waiting.popleft()
            self.running[key] = make_sequence()
            self.usage[key] = Usage()
        device = self.model.transformer.device
        segments = {key: sequence.segment(device) for key, sequence in self.running.items()}
        before = self._counters()
        logits = self.model.transformer.forward(list(segments.values()))
        after = self._counters()
        happened = []
        for (key, segment), rows in zip(segments.items(), logits, strict=True):
            sequence, usage = self.running[key], self.usage[key]
            if sequence.phase is Phase.DENOISE:
                usage.active += after.active - before.active
                usage.layer_calls += after.layer_calls - before.layer_calls
            usage.compute_s += after.compute_s - before.compute_s
            happened.append((key, sequence, sequence.advance(segment, rows)))
            if sequence.phase is Phase.DONE:
                del self.running[key]
        return happened

    def _counters(self) -> ExpertCounters:
        counters = self.model.executor.counters
        return ExpertCounters(counters.active, counters.layer_calls, counters.compute_s)
