"""Decodes several sequences together: one joined forward a step, each sequence at its own phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from relume.engine.events import Event
from relume.engine.sequence import DecodingSequence, Phase
from relume.experts.executor import ExpertUsage
from relume.model.loading import LoadedModel


@dataclass
class Usage:
    """What the forwards of one sequence used; the numbers of experts are sums over denoising forwards and layers.

    Attributes:
        layers: MoE layers in those forwards.
        active: distinct experts that the sequence's own tokens used (all tokens' if batches are joined).
        resident_active: distinct experts that the whole batch used.
        compute_s: seconds in the experts, over all forwards.
    """

    layers: int = 0
    active: int = 0
    resident_active: int = 0
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
        self.model.executor.usage = used = ExpertUsage()
        logits = self.model.transformer.forward(list(segments.values()))
        happened = []
        for span, ((key, segment), rows) in enumerate(zip(segments.items(), logits, strict=True)):
            sequence, usage = self.running[key], self.usage[key]
            if sequence.phase is Phase.DENOISE:
                usage.layers += used.layers
                usage.active += used.active_by_span[span if self.model.transformer.exact_batches else 0]
                usage.resident_active += used.active
            usage.compute_s += used.compute_s
            happened.append((key, sequence, sequence.advance(segment, rows)))
            if sequence.phase is Phase.DONE:
                del self.running[key]
        return happened
