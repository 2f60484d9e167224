"""The public engine."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch

import relume
from relume.checkpoint.folder import Checkpoint, open_checkpoint, stored_dtype
from relume.checkpoint.hub import resolve_model
from relume.checkpoint.tokenizer import Tokenizer
from relume.config import DecodingConfig, DTypeName, EngineConfig, require
from relume.core import Phase, Progress, RelumeError
from relume.engine.events import Event
from relume.engine.memory_plan import MemoryPlan
from relume.engine.provision import DEFAULT_STRATEGY, Provision, compute_threads, provision
from relume.engine.recorder import Recorder
from relume.engine.request import Messages, Request, whole_numbers
from relume.engine.result import GenerationResult, Statistics
from relume.engine.routing import RoutingInForce
from relume.engine.runtime import Runtime
from relume.engine.scheduler import Scheduler
from relume.engine.sequence import DecodingSequence, check_block_length, check_tokens
from relume.engine.stream import Stream
from relume.machine.memory import peak_rss_bytes
from relume.machine.profile import machine_identity
from relume.model.batch import Segment
from relume.model.families import identify
from relume.model.kv_cache import KVCache
from relume.model.loading import LoadedModel, compute_dtype, load_model
from relume.model.sizes import model_sizes
from relume.trace.file import TraceWriter
from relume.trace.metadata import TraceMetadata


class Engine:
    """A model that decodes requests exactly. Make one with `Engine.load`.

    Attributes:
        folder: of the checkpoint.
        config: the model's shape.
        routing: how its tokens choose experts.
    """

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig) -> None:
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._family, config = identify(checkpoint)
        self._routing = RoutingInForce.of(config, engine.routing)
        self.config, self.routing = self._routing.config, self._routing.choice
        self._engine = engine
        self._runtime_or_none: Runtime | None = None
        self._finalizer: Callable[[], object] = lambda: None
        self._numbers = itertools.count()
        try:
            self._tokenizer: Tokenizer | None = Tokenizer(self.folder)
        except RelumeError:
            self._tokenizer = None  # token ids work without one; `tokenizer` says what is wrong

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        dtype: DTypeName | torch.dtype = "auto",
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Load a checkpoint.

        Args:
            model: a folder in the official layout, or a hub id.
            dtype: `float32`, `bfloat16`, or `auto`: the checkpoint's.
            revision, offline: of a hub id; see `resolve_model`.
            progress: called with (bytes since the last call, bytes in all) while weights are read.
            options: further fields of `EngineConfig`: the device, how experts are kept, batches.

        Raises:
            RelumeError: one line that says what is wrong with the checkpoint or the arguments.
        """
        name = cast("DTypeName", str(dtype).removeprefix("torch."))
        engine = cls.open(
            model, EngineConfig.from_mapping(options | {"dtype": name}), revision=revision, offline=offline
        )
        engine.read_weights(progress)
        return engine

    @classmethod
    def open(
        cls, model: str | Path, engine: EngineConfig, *, revision: str | None = None, offline: bool = False
    ) -> Self:
        """All of `load` but reading the weights: `check` works, and `read_weights` completes it."""
        try:
            torch.empty(0, device=torch.device(engine.device))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise RelumeError(f"device {engine.device!r} cannot be used ({reason})") from None
        return cls(open_checkpoint(resolve_model(model, revision, offline)), engine)

    def read_weights(self, progress: Progress | None = None) -> None:
        """Plan the memory and read the weights; see `load` for `progress`."""
        loaded = load_model(
            self._checkpoint,
            self._family,
            self.config,
            self._dtype,
            torch.device(self._engine.device),
            self._provision.settings,
            self._engine.num_threads or compute_threads(),
            progress or (lambda _read, _total: None),
            self._engine.exact_batches,
            self.routing,
        )
        self._runtime_or_none = Runtime(loaded, self.config, self._provision)
        self._finalizer = weakref.finalize(self, loaded.close)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return compute_dtype(self._checkpoint, self._engine.dtype)

    @cached_property
    def _stored_dtype(self) -> torch.dtype:
        return stored_dtype(self._checkpoint.config, self._checkpoint.tensors)

    @property
    def bytes_per_expert(self) -> int:
        """Of one expert as the checkpoint stores it, whatever it is computed in."""
        pack = self._checkpoint.pack
        return (
            self.config.parameters_per_expert * self._stored_dtype.itemsize if pack is None else pack.expert_bytes
        )

    @property
    def _weights_are_exact(self) -> bool:
        """Whether what is computed with holds every weight of the checkpoint as it is."""
        pack = self._checkpoint.pack
        exact = torch.promote_types(self._stored_dtype, self._dtype) == self._dtype
        return (pack is None or pack.lossless) and exact

    @cached_property
    def _provision(self) -> Provision:
        stored = self._stored_dtype
        sizes = model_sizes(self._family, self.config)
        found = provision(
            self.config, sizes, self._engine, self._dtype, stored, self._checkpoint.pack, self.folder
        )
        self._routing.check_strategy(found.strategy)
        return found

    @property
    def plan(self) -> MemoryPlan:
        """Where every byte goes. Raises `RelumeError` if the memory is too small."""
        return self._provision.plan

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What is not as asked or makes relume slower, one line each."""
        runtime = self._runtime_or_none
        loaded = () if runtime is None else runtime.model.experts.loader.source.fallbacks
        stopped: tuple[str, ...] = ()
        if runtime is not None and runtime.model.experts.placement.monitor.stopped:
            stopped = ("experts are no longer brought ahead: most of those that were had not been used",)
        chosen = (*self._routing.warnings, *self._provision.warnings)
        kept = () if runtime is None else runtime.model.experts.placement.retention.notes
        return tuple(dict.fromkeys((*relume.startup_fallbacks, *chosen, *loaded, *kept, *stopped)))

    def resize_experts(self, expert_memory: str) -> None:
        """Let fewer experts be resident from the next forward on, or again as many as the engine was loaded for.

        An engine that held them all goes on with the default strategy.

        Args:
            expert_memory: as in `EngineConfig`.

        Raises:
            RelumeError: no such amount, more than the engine was loaded for, or a strategy that the routing does
                not suit.
        """
        if self._runtime.strategy == "full":
            self._routing.check_strategy(DEFAULT_STRATEGY)
        self._runtime.resize_experts(expert_memory)

    def record(self, path: str | Path) -> AbstractContextManager[None]:
        """Within this context every forward is written to a trace file, which appears at its end.

        A replay gives the recorded misses if the engine has done nothing before.
        """
        return self._recording(Path(path))

    @contextmanager
    def _recording(self, path: Path) -> Iterator[None]:
        self._routing.check_recording()
        memory = self._model.experts
        metadata = TraceMetadata(
            model=self.folder.name,
            shape=memory.pool.shape,
            block_length=self.config.block_length,
            strategy=self._runtime.strategy,
            slots=tuple(memory.pool.slots),
            shared=memory.pool.shared,
            expert_bytes=memory.arena.format.slot_bytes,
            kind=self._kind,
            hardware=self._hardware,
            work=self._provision.work,
            profile=self._provision.profile,
            costs=self._provision.costs,
            intervals=memory.placement.retention.intervals,
            routing=str(self.routing),
        )
        with TraceWriter(path, metadata) as writer, self._runtime.recording(Recorder(writer)):
            yield

    def close(self) -> None:
        """End its threads and close its files; it cannot be used any more."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `RelumeError` that says why there is none."""
        return self._tokenizer or Tokenizer(self.folder)

    def check(self, request: Request) -> None:
        """Raise the `RelumeError` that decoding the request would raise; needs no weights."""
        self._sequence(request)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Iterable[int] | None = None,
        **decoding: Any,
    ) -> GenerationResult:
        """Answer one request; keyword arguments are those of `DecodingConfig`.

        Raises:
            RelumeError: a wrong argument; nothing was decoded.
        """
        stream = self.stream(prompt, messages=messages, input_ids=input_ids, **decoding)
        for _ in stream:
            pass
        return stream.result

    def generate_batch(
        self, requests: Sequence[Request], on_event: Callable[[int, Event], None] | None = None
    ) -> list[GenerationResult]:
        """Answer several requests together, results in their order.

        Each result is what the request gives alone, unless `exact_batches` is off.

        Args:
            requests: all of them are checked before the first is decoded.
            on_event: called with the index of a request and each of its events.

        Raises:
            RelumeError: a wrong request, by its index; nothing was decoded.
        """
        sequences = []
        for index, request in enumerate(requests):
            require(isinstance(request, Request), f"request {index} is a {type(request).__name__}, no Request")
            try:
                sequences.append(self._sequence(request))
            except RelumeError as error:
                raise RelumeError(f"request {index}: {error}") from None
        index_of = {id(sequence): index for index, sequence in enumerate(sequences)}
        scheduler = Scheduler(self._runtime, self._engine.max_batch)
        scheduler.waiting.extend(sequences)
        results: dict[int, GenerationResult] = {}
        while scheduler.busy:
            for sequence, events in scheduler.step():
                index = index_of[id(sequence)]
                for event in events:
                    if on_event is not None:
                        on_event(index, event)
                if sequence.phase is Phase.DONE:
                    results[index] = self._result(sequence)
        return [results[index] for index in range(len(requests))]

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Iterable[int] | None = None,
        **decoding: Any,
    ) -> Stream:
        """Decode one request event by event; see `Stream`. Raises as `generate`."""
        return self.stream_request(Request(prompt, messages, input_ids, DecodingConfig.from_mapping(decoding)))

    def stream_request(self, request: Request) -> Stream:
        """`stream` of a request."""
        return Stream(Scheduler(self._runtime, 1), self._sequence(request), self._result)

    def logits(
        self, input_ids: Iterable[int], *, block_length: int | None = None, prefill_blocks: int | None = None
    ) -> torch.Tensor:
        """Logits of one strictly block-causal pass over `input_ids`.

        The routing takes every block for one that is denoised, whose masks are those that hold the mask token.

        Args:
            input_ids: token ids; the last block may be partial.
            block_length: positions that see each other; the model's by default.
            prefill_blocks: blocks in one forward; all of them by default.

        Returns:
            `[tokens, vocab]` float32.

        Raises:
            RelumeError: no tokens, unknown or too many, or a length that the model forbids.
        """
        length = self.config.block_length if block_length is None else block_length
        ids = whole_numbers(input_ids)
        check_tokens(ids, self.config)
        check_block_length(length, self.config, self.routing)
        EngineConfig(prefill_blocks=prefill_blocks)  # refuses what is no number of blocks
        runtime = self._runtime
        tokens = torch.tensor(ids, dtype=torch.int64, device=self._model.transformer.device)
        cache = runtime.make_cache(len(tokens))
        found = []
        for part in tokens.split(length * prefill_blocks if prefill_blocks else len(tokens)):
            rows = torch.arange(len(part), device=part.device)
            with runtime.lock:
                require(runtime.recorder is None, "logits cannot be asked for while a trace is recorded")
                masked = (part == self.config.mask_token_id).cpu()
                segment = Segment(part, cache, rows, length, Phase.DENOISE, masked)
                found += runtime.forward([segment])[0]
            cache.commit(len(part))
        return torch.cat(found)

    @property
    def _model(self) -> LoadedModel:
        return self._runtime.model

    @property
    def _runtime(self) -> Runtime:
        assert self._runtime_or_none is not None, "read_weights was not called"
        return self._runtime_or_none

    @property
    def _kind(self) -> str:
        return "measured" if self._provision.hardware is None else "simulated"

    @cached_property
    def _hardware(self) -> str:
        if self._provision.hardware is not None:
            return self._provision.hardware.name
        device = self._model.transformer.device
        return machine_identity() if device.type == "cpu" else torch.cuda.get_device_name(device)

    def _sequence(self, request: Request) -> DecodingSequence:
        if request.messages is not None:
            prompt: Sequence[int] = self.tokenizer.encode_chat(request.messages)
        elif request.prompt is not None:
            prompt = self.tokenizer.encode(request.prompt)
        else:
            prompt = tuple(request.input_ids or ())
        decode = None if self._tokenizer is None else self._tokenizer.decode
        sequence = DecodingSequence(
            prompt,
            request.decoding,
            self.config,
            self._make_cache,
            decode,
            self._engine.prefill_blocks,
            next(self._numbers),
            self.routing,
        )
        context = self._provision.planner.work.context
        planned = -(-context // sequence.block_length) * sequence.block_length
        require(
            sequence.capacity <= planned,
            f"prompt and max_tokens need {sequence.capacity} positions, and memory is planned for {planned}: "
            f"lower max_tokens, or load with a context (--context) of {sequence.capacity}",
        )
        return sequence

    def _make_cache(self, capacity: int) -> KVCache:
        return self._runtime.make_cache(capacity)  # requests are checked before there is a runtime

    def _result(self, sequence: DecodingSequence) -> GenerationResult:
        used, hardware = sequence.usage, self._provision.hardware
        wall_s = time.perf_counter() - sequence.started if hardware is None else used.forward_s
        num_tokens = len(sequence.ending.token_ids)
        memory = self._model.experts
        statistics = Statistics(
            num_tokens=num_tokens,
            num_iterations=len(sequence.commits),
            wall_s=wall_s,
            tpot_ms=1000.0 * wall_s / max(1, num_tokens),
            hit_rate=used.hits / max(1, used.active),
            utilisation=used.hits / max(1, used.resident),
            active_experts=used.own_active / max(1, used.layers),
            active_experts_prefill=used.other_active / max(1, used.other_layers),
            bytes_at_load=self._model.bytes_read,
            bytes_from_disk=used.bytes_from_disk,
            bytes_to_device=used.bytes_to_device,
            evictions=used.evictions,
            stall_s=used.stall_s,
            compute_s=used.compute_s,
            load_s=used.load_s,
            moe_s=used.moe_s,
            forward_s=used.forward_s,
            prefetch_useful=used.prefetch_useful,
            prefetch_wasted=used.prefetch_wasted,
            hosted=used.hosted,
            host_s=used.host_s,
            peak_rss_bytes=peak_rss_bytes(),
            strategy=self._runtime.strategy,
            expert_memory_bytes=memory.pool.num_slots * memory.arena.format.slot_bytes,
            expert_format=memory.arena.format.name,
            routing=str(self.routing),
            lossless=self._engine.exact_batches and self._weights_are_exact and self._routing.is_lossless,
            fallbacks=self.fallbacks,
            kind=self._kind,
            hardware=self._hardware,
        )
        return GenerationResult(
            text=sequence.ending.text,
            token_ids=sequence.ending.token_ids,
            finish_reason=sequence.ending.reason or "cancelled",
            canvas=sequence.canvas,
            commits=tuple(sequence.commits),
            statistics=statistics,
        )
