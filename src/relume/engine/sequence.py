"""One request under way: which tokens its next forward takes, and what to do with the logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property

import numpy as np
import torch

from relume.config import PREFILL_TOKENS, DecodingConfig, ModelConfig, require
from relume.core import Phase, SpanInput, SpanSignals
from relume.decoding import make_decoder
from relume.decoding.block import Step
from relume.engine.ending import AnswerCutter, Ending
from relume.engine.events import BlockEvent, Event, IterationEvent
from relume.engine.usage import Usage
from relume.model.batch import Segment
from relume.model.kv_cache import KVCache
from relume.routing.choice import NATIVE, RoutingChoice


def check_tokens(tokens: Sequence[int], model: ModelConfig) -> None:
    """Raise `RelumeError` unless there are tokens and the model knows and can hold them."""
    require(len(tokens) > 0, "the prompt is empty: give at least one token")
    unknown = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
    require(unknown is None, f"the token id {unknown} lies outside the vocabulary of {model.vocab_size}")
    require(
        len(tokens) <= model.max_context,
        f"{len(tokens)} tokens exceed the model's context of {model.max_context}: shorten the prompt",
    )


def check_block_length(block_length: int, model: ModelConfig, routing: RoutingChoice = NATIVE) -> None:
    """Raise `RelumeError` for a block length that the model's context or routing forbids."""
    require(
        1 <= block_length <= model.max_context,
        f"block_length is {block_length}: it must lie in 1..{model.max_context}, the model's context",
    )
    router = model.router
    require(
        not router.capacity or block_length % router.capacity_window == 0,
        f"block_length is {block_length}: this model admits experts per {router.capacity_window} tokens, "
        "so it must be a multiple of that",
    )
    routing.check_block_length(block_length)


class DecodingSequence:
    """Walks a canvas: prefill the prompt's whole blocks, then denoise and commit block after block.

    Everything that decides its tokens is its own: block state, random generator, K/V cache.

    Args:
        prompt: token ids.
        decoding: how to decode.
        model: the model's shape.
        make_cache: allocates a cache for a number of positions.
        decode: token ids to text, or `None` without a tokenizer.
        prefill_blocks: blocks of the prompt in one forward; see `EngineConfig`.
        number: of the request, unique within the engine.
        routing: with which the model runs.

    Raises:
        RelumeError: the prompt is empty, holds unknown ids, or does not fit the model's context.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        decoding: DecodingConfig,
        model: ModelConfig,
        make_cache: Callable[[int], KVCache],
        decode: Callable[[Sequence[int]], str] | None,
        prefill_blocks: int | None,
        number: int = 0,
        routing: RoutingChoice = NATIVE,
    ) -> None:
        self.decoder = make_decoder(decoding, model)
        self.block_length = self.decoder.block_length
        check_tokens(prompt, model)
        check_block_length(self.block_length, model, routing)
        require(not decoding.stop or decode is not None, "stop strings need a tokenizer, and this model has none")
        self.num_blocks = -(-(len(prompt) + decoding.max_tokens) // self.block_length)
        require(
            len(prompt) + decoding.max_tokens <= model.max_context,
            f"{len(prompt)} prompt tokens and max_tokens {decoding.max_tokens} exceed the model's context of "
            f"{model.max_context}: shorten the prompt or lower max_tokens",
        )
        self.number = number
        self.prompt = tuple(prompt)
        self.commits: list[int] = []
        self.usage = Usage()
        self.started = time.perf_counter()
        self._make_cache = make_cache
        blocks = prefill_blocks or max(1, PREFILL_TOKENS // self.block_length)
        self._prefill_tokens = blocks * self.block_length
        self._prompt_blocks = len(prompt) // self.block_length
        self._cutter = AnswerCutter(decoding, model.eos_token_ids, decode)
        self._generator = torch.Generator().manual_seed(decoding.seed)
        self._sampled = decoding.temperature > 0.0
        self._finished_tokens: list[int] = list(prompt[: self._prompt_blocks * self.block_length])
        self._block = self._prompt_blocks
        self._state = self.decoder.begin(torch.tensor(prompt[len(self._finished_tokens) :], dtype=torch.int64))
        self._confidences: torch.Tensor | None = None  # of the block's last iteration
        self._emitted_tokens, self._emitted_text = 0, 0
        self.ending = Ending((), None if decode is None else "", None)
        self.phase = Phase.PREFILL if self._prompt_blocks else Phase.DENOISE

    @cached_property
    def cache(self) -> KVCache:
        """The K/V of the whole canvas; allocated when the first forward is due."""
        return self._make_cache(self.capacity)

    @property
    def capacity(self) -> int:
        """Positions of the whole canvas."""
        return self.num_blocks * self.block_length

    @property
    def canvas(self) -> tuple[int, ...]:
        """Prompt and decoded blocks as they are now."""
        if self.phase in {Phase.COMMIT, Phase.DONE}:  # the state is then the last finished block
            return tuple(self._finished_tokens)
        return (*self._finished_tokens, *self._state.tokens.tolist())

    def segment(self, device: torch.device) -> Segment:
        """The tokens of the next forward."""
        rows, masked = torch.empty(0, dtype=torch.int64), None
        if self.phase is Phase.DENOISE:
            rows, masked = self.decoder.rows(self._state), self._state.masked
        return Segment(
            self._next_tokens().to(device),
            self.cache,
            rows.to(device),
            self.block_length,
            self.phase,
            masked,
            None if masked is None else self._confidences,
        )

    def span_input(self, segment: Segment) -> SpanInput:
        """What the forward over `segment` is about to do, for strategies."""
        start, end = self.cache.length, self.cache.length + segment.num_tokens
        masked = np.zeros(segment.num_tokens, dtype=bool)
        next_start, following = end, torch.empty(0, dtype=torch.int64)
        if self.phase is Phase.DENOISE:
            masked, next_start = self._state.masked.numpy(), start
        elif self.phase is Phase.COMMIT:
            following = self.decoder.begin(following).tokens
        else:
            following = self._input_at(end)
        return SpanInput(
            request=self.number,
            phase=self.phase,
            start=start,
            block_length=self.block_length,
            token_ids=segment.token_ids.cpu().numpy(),
            masked=masked,
            next_start=next_start,
            next_token_ids=following.numpy(),
        )

    def advance(
        self, segment: Segment, logits: torch.Tensor, before: SpanInput
    ) -> tuple[list[Event], SpanSignals]:
        """Take the result of the forward over `segment`; return what happened, for callers and for strategies."""
        step = None
        events: list[Event] = []
        if self.phase is Phase.PREFILL:
            self.cache.commit(segment.num_tokens)
            if self.cache.length == self._prompt_blocks * self.block_length:
                self.phase = Phase.DENOISE
        elif self.phase is Phase.COMMIT:
            self._next_block()
        else:
            iteration = self._state.iteration
            step = self._denoise(logits)
            events.append(self._iteration_event(step, iteration))
            if self._state.finished:
                events.append(self._finish_block())
        return events, self._signals(before, step)

    def _denoise(self, logits: torch.Tensor) -> Step:
        uniforms = None
        if self._sampled:
            uniforms = torch.rand(self.block_length, generator=self._generator, dtype=torch.float64)
        step = self.decoder.step(self._state, logits, uniforms)
        self.commits.append(len(step.committed))
        self._state, self._confidences = step.state, step.confidence
        return step

    def _next_tokens(self) -> torch.Tensor:
        """Input of the next forward; empty if there is none."""
        if self.phase is Phase.DONE:
            return torch.empty(0, dtype=torch.int64)
        return self._state.tokens if self.phase is not Phase.PREFILL else self._input_at(self.cache.length)

    def _input_at(self, start: int) -> torch.Tensor:
        """Input of a forward that begins at `start`, before the first denoising one has changed any."""
        end = self._prompt_blocks * self.block_length
        if start == end:
            return self._state.tokens
        return torch.tensor(self.prompt[start : min(start + self._prefill_tokens, end)], dtype=torch.int64)

    def _signals(self, before: SpanInput, step: Step | None) -> SpanSignals:
        """What `step` made of the tokens, if there was one."""
        num_tokens = len(before.token_ids)
        candidates, confidences = before.token_ids, np.ones(num_tokens, dtype=np.float32)
        committed, edited = np.zeros(num_tokens, dtype=bool), np.zeros(num_tokens, dtype=bool)
        if step is not None:
            candidates = step.candidates.numpy()
            confidences = torch.where(step.confidence.isnan(), 1.0, step.confidence).numpy()
            committed[step.committed.numpy()] = True
            edited[step.edited.numpy()] = True
        known = {field.name: getattr(before, field.name) for field in fields(SpanInput)}
        known |= {"next_start": self.cache.length, "next_token_ids": self._next_tokens().numpy()}
        return SpanSignals(
            **known, candidates=candidates, confidences=confidences, committed=committed, edited=edited
        )

    def cancel(self) -> None:
        """End the request; its answer is that of the finished blocks, its canvas stays as it is."""
        if self.phase is not Phase.DONE:
            self.ending = Ending(self.ending.token_ids, self.ending.text, "cancelled")
            self._finished_tokens = list(self.canvas)
            self.phase = Phase.DONE
            self.release()

    def release(self) -> None:
        """Let go of the K/V; the sequence has ended."""
        self.__dict__.pop("cache", None)

    def _finish_block(self) -> BlockEvent:
        start = self._block * self.block_length
        self._finished_tokens += self._state.tokens.tolist()
        self.ending = self._cutter.cut(self._finished_tokens[len(self.prompt) :])
        text = self._cutter.certain_text(self.ending)
        event = BlockEvent(
            block=self._block,
            start=start,
            token_ids=self.ending.token_ids[self._emitted_tokens :],
            text=None if text is None else text[self._emitted_text :],
            last=self.ending.reason is not None,
        )
        self._emitted_tokens = len(self.ending.token_ids)
        self._emitted_text = len(text or "")
        if event.last:
            self.phase = Phase.DONE
        elif self._state.cache_is_final:
            self._next_block()
        else:
            self.phase = Phase.COMMIT
        return event

    def _next_block(self) -> None:
        self.cache.commit(self.block_length)
        self._block += 1
        self._confidences = None
        self._state = self.decoder.begin(torch.empty(0, dtype=torch.int64))
        self.phase = Phase.DENOISE

    def _iteration_event(self, step: Step, iteration: int) -> IterationEvent:
        start = self._block * self.block_length
        changed = torch.cat((step.committed, step.edited)).sort().values
        return IterationEvent(
            block=self._block,
            start=start,
            iteration=iteration,
            positions=tuple((changed + start).tolist()),
            tokens=tuple(step.state.tokens[changed].tolist()),
            confidences=tuple(step.confidence[changed].tolist()),
            edits=tuple((step.edited + start).tolist()),
            token_ids=tuple(step.state.tokens.tolist()),
            masked=tuple(step.state.masked.tolist()),
        )
