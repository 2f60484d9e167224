"""The public engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

import relume
from relume.checkpoint.folder import open_checkpoint
from relume.checkpoint.hub import resolve_model
from relume.checkpoint.tokenizer import Tokenizer
from relume.config import DecodingConfig, DTypeName, EngineConfig, ModelConfig, require
from relume.core import RelumeError
from relume.engine.events import Event, GenerationResult, Statistics
from relume.engine.request import Messages, Request
from relume.engine.scheduler import Scheduler, Usage
from relume.engine.sequence import DecodingSequence, Phase
from relume.engine.stream import Stream
from relume.machine.memory import peak_rss_bytes
from relume.model.batch import Segment
from relume.model.families import identify
from relume.model.kv_cache import KVCache
from relume.model.loading import LoadedModel, Progress, compute_dtype, load_model


class Engine:
    """A loaded model that decodes requests exactly. Make one with `Engine.load`."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        model: LoadedModel,
        engine: EngineConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._model = model
        self._engine = engine
        self._tokenizer = tokenizer
        self._unreported_bytes = model.bytes_read

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
        dtype_name = cast("DTypeName", str(dtype).removeprefix("torch."))
        engine = EngineConfig(
            dtype=dtype_name,
            device=device,
            prefill_blocks=prefill_blocks,
            max_batch=max_batch,
            exact_batches=exact_batches,
        )
        try:
            target = torch.device(device)
            torch.empty(0, device=target)
        except (RuntimeError, AssertionError) as error:
            raise RelumeError(f"device {device!r} cannot be used ({str(error).splitlines()[0]})") from None
        folder = resolve_model(model, revision, offline)
        checkpoint = open_checkpoint(folder)
        family, config = identify(checkpoint)
        loaded = load_model(
            checkpoint,
            family,
            config,
            compute_dtype(checkpoint, dtype_name),
            target,
            progress or (lambda _read, _total: None),
            exact_batches,
        )
        try:
            tokenizer = Tokenizer(folder)
        except RelumeError:
            tokenizer = None
        return cls(folder, config, loaded, engine, tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `RelumeError` that says why there is none."""
        return self._tokenizer or Tokenizer(self.folder)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
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
        """
        make = [self._sequence_maker(request) for request in requests]
        scheduler = Scheduler(self._model, self._engine.max_batch)
        for index, make_sequence in enumerate(make):
            scheduler.add(index, make_sequence)
        results: dict[int, GenerationResult] = {}
        while scheduler.busy:
            for index, sequence, events in scheduler.step():
                for event in events:
                    if on_event is not None:
                        on_event(index, event)
                if sequence.phase is Phase.DONE:
                    results[index] = self._result(sequence, scheduler.usage[index])
        return [results[index] for index in range(len(requests))]

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **decoding: Any,
    ) -> Stream:
        """Decode one request event by event; see `Stream`."""
        request = Request(prompt, messages, input_ids, DecodingConfig.from_mapping(decoding))
        return Stream(Scheduler(self._model, max_batch=1), self._sequence_maker(request)(), self._result)

    def logits(
        self, input_ids: Sequence[int], *, block_length: int | None = None, prefill_blocks: int | None = None
    ) -> torch.Tensor:
        """Logits of one strictly block-causal pass over `input_ids`.

        Args:
            input_ids: token ids; the last block may be partial.
            block_length: positions that see each other; the model's by default.
            prefill_blocks: blocks in one forward; all of them by default.

        Returns:
            `[tokens, vocab]` float32.
        """
        length = block_length or self.config.block_length
        require(len(input_ids) > 0, "input_ids is empty: give at least one token")
        tokens = torch.tensor(input_ids, dtype=torch.int64, device=self._model.transformer.device)
        require(
            bool(((tokens >= 0) & (tokens < self.config.vocab_size)).all()),
            f"input_ids reach outside the vocabulary of {self.config.vocab_size}",
        )
        cache = self._make_cache(len(tokens))
        found = []
        for part in tokens.split(length * prefill_blocks if prefill_blocks else len(tokens)):
            rows = torch.arange(len(part), device=part.device)
            found += self._model.transformer.forward([Segment(part, cache, rows, length)])
            cache.commit(len(part))
        return torch.cat(found)

    def _sequence_maker(self, request: Request) -> Callable[[], DecodingSequence]:
        if request.messages is not None:
            prompt = self.tokenizer.encode_chat(request.messages)
        elif request.prompt is not None:
            prompt = self.tokenizer.encode(request.prompt)
        else:
            prompt = [int(token) for token in request.input_ids or ()]
        decode = None if self._tokenizer is None else self._tokenizer.decode
        return lambda: DecodingSequence(
            prompt, request.decoding, self.config, self._make_cache, decode, self._engine.prefill_blocks
        )

    def _make_cache(self, capacity: int) -> KVCache:
        transformer = self._model.transformer
        return KVCache(self.config, capacity, transformer.dtype, transformer.device)

    def _result(self, sequence: DecodingSequence, usage: Usage) -> GenerationResult:
        wall_s = time.perf_counter() - sequence.started
        num_tokens = len(sequence.ending.token_ids)
        from_disk, self._unreported_bytes = self._unreported_bytes, 0
        layers = max(1, usage.layers)
        statistics = Statistics(
            num_tokens=num_tokens,
            num_iterations=len(sequence.commits),
            wall_s=wall_s,
            tpot_ms=1000.0 * wall_s / max(1, num_tokens),
            hit_rate=1.0,
            utilisation=usage.resident_active / layers / self.config.router.num_experts,
            active_experts=usage.active / layers,
            bytes_from_disk=from_disk,
            bytes_to_device=from_disk,
            stall_s=0.0,
            compute_s=usage.compute_s,
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
