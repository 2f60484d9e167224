"""Decodes several sequences together: one joined forward a step, each sequence at its own phase."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from relume.core import Phase
from relume.engine.events import Event
from relume.engine.recorder import Recorder
from relume.engine.sequence import DecodingSequence
from relume.experts.usage import ExpertUsage
from relume.model.transformer import Transformer


@dataclass
class Scheduler:
    """First come, first served; at most `max_batch` sequences at a time hold K/V.

    Attributes:
        transformer: runs the forwards; its experts' strategy is told what became of each.
        max_batch: sequences in a forward.
        recorder: is given every forward.
    """

    transformer: Transformer
    max_batch: int
    recorder: Recorder | None = None
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
        used = ExpertUsage(record=self.recorder is not None)
        started = time.perf_counter()
        logits = self.transformer.forward(segments, used)
        forward_s = time.perf_counter() - started
        happened, spans = [], []
        for index, (sequence, segment, rows) in enumerate(zip(self.running, segments, logits, strict=True)):
            span = index if self.transformer.exact_batches else 0
            sequence.usage.add(used, span, forward_s, sequence.phase is Phase.DENOISE)
            events, signals = sequence.advance(segment, rows)
            happened.append((sequence, events))
            spans.append(signals)
        self.transformer.executor.memory.end_forward(spans)
        if self.recorder is not None:
            self.recorder.record(spans, used, forward_s)
        self.running = [sequence for sequence in self.running if sequence.phase is not Phase.DONE]
        return happened
