"""Writes what an engine's forwards do to a trace file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relume.core import SpanSignals
from relume.experts.usage import ExpertUsage
from relume.trace.file import TraceWriter
from relume.trace.record import ForwardRecord


class Recorder:
    """Turns forwards into records."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def record(self, spans: Sequence[SpanSignals], used: ExpertUsage, wall_s: float) -> None:
        """Add a forward whose usage was made with `record` set."""
        self._writer.write(
            ForwardRecord(
                spans=tuple(spans),
                expert_ids=np.stack([ids for ids, _ in used.routings]).astype(np.uint16),
                weights=np.stack([weights for _, weights in used.routings]),
                misses=tuple(layer.misses.astype(np.uint16) for layer in used.decisions),
                hosted=tuple(layer.hosted.astype(np.uint16) for layer in used.decisions),
                arrived=tuple(layer.arrived.astype(np.uint16) for layer in used.decisions),
                bytes_loaded=used.bytes_to_device,
                wall_s=wall_s,
                compute_s=used.compute_s,
                stall_s=used.stall_s,
            )
        )
