"""A model's own answers to prompts, as the data of a training."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relume.checkpoint.fingerprint import fingerprint
from relume.checkpoint.folder import Checkpoint, open_checkpoint
from relume.checkpoint.hub import resolve_model
from relume.checkpoint.tokenizer import Tokenizer
from relume.config import DecodingConfig, EngineConfig, require
from relume.core import Progress, RelumeError
from relume.engine.engine import Engine
from relume.engine.request import Request
from relume.machine.threads import effective_cores
from relume.model.families import identify
from relume.train.answer_file import AnswerCounts, AnswerFile
from relume.train.answer_processes import Batch, Results, answer_processes
from relume.train.codec import Codec
from relume.train.config import ComputeDType

#: Of a model that is small enough for processes, each with its own copy, where there is enough to do for them.
_SMALL_BYTES = 64 * 2**20
_MANY_BATCHES = 32
_MOST_PROCESSES = 4  # as each takes half a gigabyte with torch


@dataclass(frozen=True)
class AnswerConfig:
    """How the model answers. Published for dMoE (arXiv 2605.30876): threshold 0.95, up to 2048 tokens.

    Attributes:
        threshold: of the threshold decoder.
        temperature: 0 takes the most likely token.
        max_tokens: the longest answer; one that has no end of text by then is dropped.
        batch_size: prompts decoded together; they share the dense weights' products, so that rounding, and
            rarely a token, depends on it.
        seed: of the draws at a temperature; each prompt has its own.
        dtype, device: in and on which it computes.
    """

    threshold: float = 0.95
    temperature: float = 0.0
    max_tokens: int = 256
    batch_size: int = 64
    seed: int = 0
    dtype: ComputeDType = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size is {self.batch_size}: it must be at least 1")
        self.decoding(0)
        self.engine(1)

    def decoding(self, index: int) -> DecodingConfig:
        """Of prompt number `index`."""
        seed = random.Random(f"{self.seed}/{index}").getrandbits(62) if self.temperature else 0
        return DecodingConfig(
            decoder="threshold",
            threshold=self.threshold,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=seed,
        )

    def engine(self, context: int) -> EngineConfig:
        """Of a model whose longest prompt and answer take `context` positions."""
        return EngineConfig(
            dtype=self.dtype,
            device=self.device,
            max_batch=self.batch_size,
            exact_batches=False,
            context=context,
        )


def write_answers(
    model: str,
    prompts: Sequence[str],
    config: AnswerConfig,
    out: Path,
    progress: Progress = lambda _done, _total: None,
    note: Callable[[str], None] = lambda _: None,
) -> AnswerCounts:
    """Answer prompts as users' messages with the model's own routing; goes on where `out` was left.

    Args:
        model: a folder, a hub id or `demo`; its tokenizer needs a chat template.
        prompts: more of them than at an earlier call are answered in addition.
        config: how.
        out: folder of the two files; lock it against a second process.
        progress: called with (prompts since the last call, prompts in all).
        note: called with one line for what a user should know.

    Returns:
        The counts, those of earlier calls included.

    Raises:
        RelumeError: no such model, a prompt too long for it, answers of another model, other options or other
            prompts in `out`, or a full disk; answers that are there are kept.
    """
    require(bool(prompts), "there are no prompts to answer")
    texts = [prompt.strip() for prompt in prompts]  # as they are read from files
    checkpoint = open_checkpoint(resolve_model(model))
    file = AnswerFile(out, _identity(checkpoint, config), texts)
    file.resume(note)
    progress(file.counts.done, len(texts))
    if file.counts.done < len(texts):
        encoded = _encode(checkpoint, texts)
        context = max(map(len, encoded)) + config.max_tokens
        with Engine(checkpoint, config.engine(context)) as engine:
            for index, ids in enumerate(encoded):
                if len(ids) + config.max_tokens == context:
                    _check(engine, ids, config, f"prompt {index + 1}")
            batches = [
                [
                    Request(input_ids=ids, decoding=config.decoding(first + index))
                    for index, ids in enumerate(encoded[first : first + config.batch_size])
                ]
                for first in range(file.counts.done, len(texts), config.batch_size)
            ]
            with _answering(engine, checkpoint, config.engine(context), len(batches)) as (fallbacks, answer):
                for fallback in fallbacks:
                    note(fallback)
                for results in answer(batches):
                    file.append(results)
                    progress(len(results), len(texts))
    counts = file.counts
    require(
        counts.kept > 0,
        f"{out}: nothing to learn from: of {counts.done} answers {counts.unterminated} did not end within "
        f"max_tokens {config.max_tokens} and {counts.empty} are empty",
    )
    return counts


@contextmanager
def _answering(
    engine: Engine, checkpoint: Checkpoint, config: EngineConfig, num_batches: int
) -> Iterator[tuple[Sequence[str], Callable[[Sequence[Batch]], Iterator[Results]]]]:
    """What a user should know, and what answers batches: the engine, or processes with one each.

    Which of the two it is changes no answer.
    """
    count = min(effective_cores(), _MOST_PROCESSES) if config.device == "cpu" else 1
    if count == 1 or num_batches < _MANY_BATCHES or checkpoint.num_bytes > _SMALL_BYTES:
        engine.read_weights()
        yield engine.fallbacks, lambda batches: map(engine.generate_batch, batches)
        return
    with answer_processes(checkpoint.folder, dataclasses.replace(config, num_threads=1), count) as processes:
        yield processes.fallbacks(), processes.answer


def _encode(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    """Prompts as they will be trained on: the very same ids."""
    codec = Codec.of(Tokenizer(checkpoint.folder), identify(checkpoint)[1])
    return [codec.encode_prompt(text) for text in texts]


def _check(engine: Engine, ids: Sequence[int], config: AnswerConfig, name: str) -> None:
    try:
        engine.check(Request(input_ids=ids, decoding=config.decoding(0)))
    except RelumeError as error:
        raise RelumeError(f"{name}: {error}") from None


def _identity(checkpoint: Checkpoint, config: AnswerConfig) -> dict[str, Any]:
    """All that answers depend on, besides the prompts."""
    values = dataclasses.asdict(config)
    del values["device"]  # an answer is an answer, wherever it was given
    if not config.temperature:
        del values["seed"]
    return {"model": fingerprint(checkpoint), **values}
