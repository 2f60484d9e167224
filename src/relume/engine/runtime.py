"""A loaded model and what its requests share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from relume.config import ModelConfig, require
from relume.core import RelumeError, SpanInput, SpanSignals
from relume.engine.meter import Meter
from relume.engine.provision import DEFAULT_STRATEGY, Provision
from relume.engine.recorder import Recorder
from relume.experts.usage import ExpertUsage
from relume.machine.memory import is_out_of_memory
from relume.model.batch import Segment
from relume.model.kv_cache import KVCache
from relume.model.loading import LoadedModel
from relume.strategy.budget import ExpertMemory
from relume.strategy.layer_budgets import BUDGETS
from relume.strategy.placement import Placement
from relume.strategy.retention.context import RetentionContext
from relume.strategy.retention.full import Full
from relume.strategy.strategies import Strategy


class Runtime:
    """One forward at a time, whoever asks: its lock is held for a forward and all that follows from it.

    Args:
        model: loaded.
        config: its shape.
        provision: what was planned for it.

    Attributes:
        lock: of everything that forwards share.
        strategy: the name of what ranks experts now.
        recorder: is given every forward, if there is one.
    """

    def __init__(self, model: LoadedModel, config: ModelConfig, provision: Provision) -> None:
        self.model = model
        self.lock = threading.RLock()
        self.strategy = provision.strategy
        self.recorder: Recorder | None = None
        self._config = config
        self._provision = provision
        self._position_bytes = config.kv_values_per_token * model.transformer.dtype.itemsize
        self._num_positions = provision.plan.bytes["kv_cache"] // self._position_bytes
        self._meter = Meter()
        self._caches: weakref.WeakSet[KVCache] = weakref.WeakSet()

    def forward(
        self, segments: Sequence[Segment], inputs: Sequence[SpanInput] = ()
    ) -> tuple[list[torch.Tensor], ExpertUsage]:
        """Logits of each segment, and what the forward used; `inputs` says what the segments are.

        To be called with the lock held.
        """
        self.model.experts.begin_forward(inputs)
        used = ExpertUsage(record=self.recorder is not None)
        return self.model.transformer.forward(segments, used), used

    def end_forward(self, spans: Sequence[SpanSignals], used: ExpertUsage, wall_s: float) -> float:
        """Tell the strategy and the recorder what became of a forward; with the lock still held.

        Returns the seconds that the forward took. If a machine is simulated they are that one's, and so are
        afterwards those in `used`, and its bytes.
        """
        self.model.experts.end_forward(spans)
        clock = self._provision.settings.virtual
        if clock is not None:
            wall_s = self._meter.charge(clock, used)
        if self.recorder is not None:
            self.recorder.record(spans, used, wall_s)
        return wall_s

    def make_cache(self, capacity: int) -> KVCache:
        """K/V for so many positions, out of what the plan holds for all requests; they return when it is dropped.

        Raises:
            RelumeError: other requests hold too many, or the memory is not there.
        """
        transformer = self.model.transformer
        with self.lock:
            left = self._num_positions - sum(cache.capacity for cache in self._caches)
            require(
                capacity <= left,
                f"{capacity} positions of K/V are asked for and {left} are left: finish other requests first, or "
                "load with more context or a larger max_batch",
            )
            try:
                cache = KVCache(self._config, capacity, transformer.dtype, transformer.device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                size = capacity * self._position_bytes / 2**30
                raise RelumeError(
                    f"the K/V of {capacity} positions need {size:.1f} GiB, more than is free: lower max_tokens"
                ) from None
            self._caches.add(cache)
        return cache

    def resize_experts(self, text: str) -> None:
        """See `Engine.resize_experts`."""
        memory = self.model.experts
        shape = memory.pool.shape
        total = ExpertMemory.parse(text).total_slots(shape, memory.arena.format.slot_bytes)
        most = self._provision.settings.num_slots
        require(total <= most, f"expert memory {text} is more than the {most} slots that were loaded")
        with self.lock:
            require(self.recorder is None, "the expert memory cannot change while a trace is recorded")
            placement = memory.placement
            if isinstance(placement.retention, Full) and total < shape.num_layers * shape.num_experts:
                # All experts alike: nothing would ever be replaced.
                # Nothing was made ready to be brought ahead.
                self.strategy = f"{DEFAULT_STRATEGY}:prefetch=none"
                context = RetentionContext(shape, total, self._provision.habits, costs=self._provision.costs)
                parts = Strategy.parse(self.strategy).make(context)
                memory.placement = Placement(placement.pool, parts, placement.lanes)
            budget = BUDGETS[Strategy.parse(self.strategy).budget]
            slots = budget(total, shape, self._provision.habits, self._provision.costs)
            memory.resize(total if memory.pool.shared else slots)
            memory.placement.retention.resized(None if memory.pool.shared else tuple(slots))

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Give every forward to a recorder."""
        with self.lock:
            require(self.recorder is None, "a trace is being recorded already")
            self.recorder = recorder
        try:
            yield
        finally:
            with self.lock:
                self.recorder = None
