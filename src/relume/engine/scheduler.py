"""Decodes several sequences together: one joined forward a step, each sequence at its own phase."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from relume.core import Phase
from relume.engine.events import Event
from relume.engine.runtime import Runtime
from relume.engine.sequence import DecodingSequence


@dataclass
class Scheduler:
    """First come, first served; at most `max_batch` sequences at a time hold K/V.

    Attributes:
        runtime: runs the forwards.
        max_batch: sequences in a forward.
    """

    runtime: Runtime
    max_batch: int
    waiting: deque[DecodingSequence] = field(default_factory=deque)
    running: list[DecodingSequence] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def step(self) -> list[tuple[DecodingSequence, list[Event]]]:
        """One forward of all running sequences; returns each with its events. Finished ones leave."""
        with self.runtime.lock:
            return self._step()

    def _step(self) -> list[tuple[DecodingSequence, list[Event]]]:
        while self.waiting and len(self.running) < self.max_batch:
            self.running.append(self.waiting.popleft())
        transformer = self.runtime.model.transformer
        segments = [sequence.segment(transformer.device) for sequence in self.running]
        inputs = [sequence.span_input(segment) for sequence, segment in zip(self.running, segments, strict=True)]
        started = time.perf_counter()
        logits, used = self.runtime.forward(segments, inputs)
        forward_s = time.perf_counter() - started
        happened, spans = [], []
        ran = zip(self.running, segments, inputs, logits, strict=True)
        for sequence, segment, before, rows in ran:
            events, signals = sequence.advance(segment, rows, before)
            happened.append((sequence, events))
            spans.append(signals)
            if sequence.phase is Phase.DONE:
                sequence.release()
        forward_s = self.runtime.end_forward(spans, used, forward_s)
        for index, (sequence, before) in enumerate(zip(self.running, inputs, strict=True)):
            span = index if transformer.exact_batches else 0
            sequence.usage.add(used, span, forward_s, before.phase is Phase.DENOISE)
        self.running = [sequence for sequence in self.running if sequence.phase is not Phase.DONE]
        return happened
