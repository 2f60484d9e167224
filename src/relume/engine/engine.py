"""The public engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

import relume
from relume.checkpoint.folder import Checkpoint, open_checkpoint
from relume.checkpoint.hub import resolve_model
from relume.checkpoint.tokenizer import Tokenizer
from relume.config import DecodingConfig, DTypeName, EngineConfig, require
from relume.core import Phase, Progress, RelumeError
from relume.engine.events import Event
from relume.engine.request import Messages, Request, whole_numbers
from relume.engine.result import GenerationResult, Statistics
from relume.engine.scheduler import Scheduler
from relume.engine.sequence import DecodingSequence, check_block_length, check_tokens
from relume.engine.stream import Stream
from relume.experts.executor import ExpertUsage
from relume.machine.memory import is_out_of_memory, peak_rss_bytes
from relume.model.batch import Segment
from relume.model.families import identify
from relume.model.kv_cache import KVCache
from relume.model.loading import LoadedModel, compute_dtype, load_model


class Engine:
    """A model that decodes requests exactly. Make one with `Engine.load`.

    Attributes:
        folder: of the checkpoint.
        config: the model's shape.
    """

    def __init__(self, checkpoint: Checkpoint, engine: EngineConfig) -> None:
        self.folder = checkpoint.folder
        self._checkpoint = checkpoint
        self._family, self.config = identify(checkpoint)
        self._engine = engine
        self._loaded: LoadedModel | None = None
        self._unreported_bytes = 0
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
        device: str = "cpu",
        prefill_blocks: int | None = None,
        max_batch: int = 32,
        exact_batches: bool = True,
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Load a checkpoint.

        Args:
            model: a folder in the official layout, or a hub id.
            dtype: `float32`, `bfloat16`, or `auto`: the checkpoint's.
            device: where it runs, `cpu` or `cuda`.
            prefill_blocks: blocks of a prompt in one forward; by default as many as hold 512 tokens.
            max_batch: requests decoded together.
            exact_batches: a request gives the same tokens in any company; see `EngineConfig`.
            revision, offline: of a hub id; see `resolve_model`.
            progress: called with (bytes since the last call, bytes in all) while weights are read.

        Raises:
            RelumeError: one line that says what is wrong with the checkpoint or the arguments.
        """
        engine = cls.open(
            model,
            EngineConfig(
                dtype=cast("DTypeName", str(dtype).removeprefix("torch.")),
                device=device,
                prefill_blocks=prefill_blocks,
                max_batch=max_batch,
                exact_batches=exact_batches,
            ),
            revision=revision,
            offline=offline,
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
        """Read all weights; see `load` for `progress`."""
        dtype = compute_dtype(self._checkpoint, self._engine.dtype)
        self._loaded = load_model(
            self._checkpoint,
            self._family,
            self.config,
            dtype,
            torch.device(self._engine.device),
            progress or (lambda _read, _total: None),
            self._engine.exact_batches,
        )
        self._unreported_bytes = self._loaded.bytes_read

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
        scheduler = self._scheduler(self._engine.max_batch)
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
        return Stream(self._scheduler(max_batch=1), self._sequence(request), self._result)

    def logits(
        self, input_ids: Iterable[int], *, block_length: int | None = None, prefill_blocks: int | None = None
    ) -> torch.Tensor:
        """Logits of one strictly block-causal pass over `input_ids`.

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
        check_block_length(length, self.config)
        EngineConfig(prefill_blocks=prefill_blocks)  # refuses what is no number of blocks
        transformer = self._model.transformer
        tokens = torch.tensor(ids, dtype=torch.int64, device=transformer.device)
        cache = self._make_cache(len(tokens))
        found = []
        for part in tokens.split(length * prefill_blocks if prefill_blocks else len(tokens)):
            rows = torch.arange(len(part), device=part.device)
            found += transformer.forward([Segment(part, cache, rows, length)], ExpertUsage())
            cache.commit(len(part))
        return torch.cat(found)

    @property
    def _model(self) -> LoadedModel:
        assert self._loaded is not None, "read_weights was not called"
        return self._loaded

    def _scheduler(self, max_batch: int) -> Scheduler:
        return Scheduler(self._model.transformer, max_batch)

    def _sequence(self, request: Request) -> DecodingSequence:
        if request.messages is not None:
            prompt: Sequence[int] = self.tokenizer.encode_chat(request.messages)
        elif request.prompt is not None:
            prompt = self.tokenizer.encode(request.prompt)
        else:
            prompt = tuple(request.input_ids or ())
        decode = None if self._tokenizer is None else self._tokenizer.decode
        return DecodingSequence(
            prompt, request.decoding, self.config, self._make_cache, decode, self._engine.prefill_blocks
        )

    def _make_cache(self, capacity: int) -> KVCache:
        transformer = self._model.transformer
        try:
            return KVCache(self.config, capacity, transformer.dtype, transformer.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = capacity * self.config.kv_values_per_token * transformer.dtype.itemsize / 2**30
            raise RelumeError(
                f"the K/V cache of {capacity} positions needs {size:.1f} GiB, more than is free: lower max_tokens"
            ) from None

    def _result(self, sequence: DecodingSequence) -> GenerationResult:
        wall_s = time.perf_counter() - sequence.started
        num_tokens = len(sequence.ending.token_ids)
        from_disk, self._unreported_bytes = self._unreported_bytes, 0
        layers = max(1, sequence.usage.layers)
        statistics = Statistics(
            num_tokens=num_tokens,
            num_iterations=len(sequence.commits),
            wall_s=wall_s,
            tpot_ms=1000.0 * wall_s / max(1, num_tokens),
            hit_rate=1.0,
            utilisation=sequence.usage.resident_active / layers / self.config.router.num_experts,
            active_experts=sequence.usage.active / layers,
            bytes_from_disk=from_disk,
            bytes_to_device=from_disk,
            stall_s=0.0,
            compute_s=sequence.usage.compute_s,
            prefetch_useful=0,
            prefetch_wasted=0,
            peak_rss_bytes=peak_rss_bytes(),
            strategy="full",
            expert_memory_bytes=self._model.expert_bytes,
            lossless=self._engine.exact_batches,
            fallbacks=tuple(relume.startup_fallbacks),
            kind="measured",
            hardware=str(self._model.transformer.device),
        )
        return GenerationResult(
            text=sequence.ending.text,
            token_ids=sequence.ending.token_ids,
            finish_reason=sequence.ending.reason or "cancelled",
            canvas=sequence.canvas,
            commits=tuple(sequence.commits),
            statistics=statistics,
        )
