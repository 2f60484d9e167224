"""Decodes several sequences together: one joined forward a step, each sequence at its own phase."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from relume.core import Phase
from relume.engine.events import Event
from relume.engine.sequence import DecodingSequence
from relume.experts.executor import ExpertUsage
from relume.model.transformer import Transformer


@dataclass
class Scheduler:
    """First come, first served; at most `max_batch` sequences at a time hold K/V."""

    transformer: Transformer
    max_batch: int
    waiting: deque[DecodingSequence] = field(default_factory=deque)
    running: list[DecodingSequence] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[DecodingSequence, list[Event]]]:
        """One forward of all running sequences; returns each with its events. Finished ones leave."""
        while self.waiting and len(self.running) < self.max_batch:
            self.running.append(self.waiting.popleft())
        segments = [sequence.segment(self.transformer.device) for sequence in self.running]
        used = ExpertUsage()
        logits = self.transformer.forward(segments, used)
        happened = []
        for span, (sequence, segment, rows) in enumerate(zip(self.running, segments, logits, strict=True)):
            if sequence.phase is Phase.DENOISE:
                sequence.usage.layers += used.layers
                sequence.usage.active += used.active_by_span[span if self.transformer.exact_batches else 0]
                sequence.usage.resident_active += used.active
            sequence.usage.compute_s += used.compute_s
            happened.append((sequence, sequence.advance(segment, rows)))
        self.running = [sequence for sequence in self.running if sequence.phase is not Phase.DONE]
        return happened
