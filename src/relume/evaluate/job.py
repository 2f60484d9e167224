"""Answers problems with a model and scores them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np

from relume.config import DecodingConfig, require
from relume.core import Progress
from relume.engine.engine import Engine
from relume.engine.request import Request
from relume.engine.result import GenerationResult, Statistics
from relume.evaluate.scoring import Comparison, Score, compare
from relume.evaluate.variants import Variant
from relume.tasks import Problem, is_exact


@dataclass(frozen=True)
class EvaluationRow:
    """One variant's figures over all problems.

    Attributes:
        variant: its name.
        tasks: score of each task.
        tokens_per_iteration: tokens of answers / denoising iterations.
        active_experts: distinct experts of a layer that a request used in an iteration, mean over iterations.
        active_experts_prefill: the same of forwards that do not denoise, prefills and those that commit K/V, but
            the mean over requests.
        active_expert_bytes: of an iteration's active experts of all layers, as the checkpoint stores them.
        unterminated: answers that reached the longest length.
        wall_s: seconds for all of them, decoded in batches.
        model: its folder or name.
        routing: with which it ran.
        block_length: positions decoded together.
        lossless: whether the tokens are those of the plain model.
        right: of each prompt, whether it was answered exactly.
        prompts: which they are, and in which order; rows of the same prompts can be paired.
    """

    variant: str
    tasks: Mapping[str, Score]
    tokens_per_iteration: float
    active_experts: float
    active_experts_prefill: float
    active_expert_bytes: float
    unterminated: int
    wall_s: float
    model: str
    routing: str
    block_length: int
    lossless: bool
    right: tuple[bool, ...]
    prompts: str

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `dataclasses.asdict`, as JSON gives it back."""
        tasks = {name: Score(**score) for name, score in values["tasks"].items()}
        return cls(**{**values, "tasks": tasks, "right": tuple(values["right"])})

    def against(self, base: EvaluationRow, seed: int = 0) -> Comparison:
        """This row's exact match against another's, on the same prompts.

        Raises:
            RelumeError: they answered different ones, or in another order.
        """
        require(
            self.prompts == base.prompts,
            f"{self.routing} and {base.routing} answered different prompts: only the same ones can be compared",
        )
        return compare(self.right, base.right, np.random.default_rng(seed))

    @property
    def overall(self) -> Score:
        """All tasks together."""
        return reduce(add, self.tasks.values(), Score(0, 0))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; all figures are measured."""
        return {
            "model": self.model,
            "variant": self.variant,
            "routing": self.routing,
            "block_length": self.block_length,
            "lossless": self.lossless,
            "exact_match": {
                "overall": self.overall.exact_match,
                "tasks": {name: score.exact_match for name, score in self.tasks.items()},
            },
            "intervals": {"overall": self.overall.to_dict()}
            | {name: score.to_dict() for name, score in self.tasks.items()},
            "num_prompts": self.overall.num_prompts,
            "tokens_per_iteration": self.tokens_per_iteration,
            "active_experts": self.active_experts,
            "active_experts_prefill": self.active_experts_prefill,
            "active_expert_bytes": self.active_expert_bytes,
            "unterminated": self.unterminated,
            "wall_s": self.wall_s,
            "wall_s_per_request": self.wall_s / max(1, self.overall.num_prompts),
            "kind": "measured",
        }


def evaluate(
    engine: Engine,
    problems: Mapping[str, Sequence[Problem]],
    variant: Variant,
    decoding: DecodingConfig,
    batch_size: int = 32,
    progress: Progress = lambda _done, _total: None,
    model: str | None = None,
) -> EvaluationRow:
    """Answer every problem as a user's message and compare the final lines.

    Args:
        engine: the model; its tokenizer needs a chat template.
        problems: by task.
        variant: sets decoder, mode and threshold over `decoding`.
        decoding: everything else.
        batch_size: problems decoded together; exact batches do not change an answer.
        progress: called with (answers since the last call, answers in all).
        model: what the row calls it; by default its folder's name.
    """
    require_chat_template(engine)
    config = variant.over(decoding)
    all_problems = [(name, problem) for name, group in problems.items() for problem in group]
    started = time.perf_counter()
    results = answer(engine, [problem.prompt for _, problem in all_problems], config, batch_size, progress)
    wall_s = time.perf_counter() - started
    tasks: dict[str, Score] = {}
    right = []
    for (task, problem), result in zip(all_problems, results, strict=True):
        right.append(is_exact(result.text or "", problem.answer))
        tasks[task] = tasks.get(task, Score(0, 0)) + Score(int(right[-1]), 1)
    statistics = [result.statistics for result in results]
    num_iterations = sum(s.num_iterations for s in statistics)
    active = sum(s.active_experts * s.num_iterations for s in statistics) / max(1, num_iterations)
    return EvaluationRow(
        variant=variant.name,
        tasks=tasks,
        tokens_per_iteration=sum(s.num_tokens for s in statistics) / max(1, num_iterations),
        active_experts=active,
        active_experts_prefill=_mean_prefill(statistics),
        active_expert_bytes=active * len(engine.config.moe_layers) * engine.bytes_per_expert,
        unterminated=sum(result.finish_reason == "length" for result in results),
        wall_s=wall_s,
        model=engine.folder.name if model is None else model,
        routing=str(engine.routing),
        block_length=config.block_length or engine.config.block_length,
        lossless=all(s.lossless for s in statistics),
        right=tuple(right),
        prompts=digest_of([problem.prompt for _, problem in all_problems]),
    )


def answer(
    engine: Engine, prompts: Sequence[str], decoding: DecodingConfig, batch_size: int, progress: Progress
) -> list[GenerationResult]:
    """Answer prompts, `batch_size` at a time: as a user's messages, or as they are without a chat template."""
    requests = [request_of(engine, prompt, decoding) for prompt in prompts]
    results: list[GenerationResult] = []
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        results += engine.generate_batch(batch)
        progress(len(batch), len(requests))
    return results


def request_of(engine: Engine, prompt: str, decoding: DecodingConfig) -> Request:
    """A prompt as a user's message, or as it is without a chat template."""
    if engine.tokenizer.has_chat_template:
        return Request(messages=[{"role": "user", "content": prompt}], decoding=decoding)
    return Request(prompt=prompt, decoding=decoding)


def require_chat_template(engine: Engine) -> None:
    """Raise `RelumeError` if the model has none: tasks are asked as messages."""
    require(
        engine.tokenizer.has_chat_template,
        f"{engine.folder}: its tokenizer has no chat template, which evaluation needs",
    )


def digest_of(prompts: Sequence[str]) -> str:
    """Short, and different for other prompts or another order."""
    return hashlib.blake2b("\0".join(prompts).encode(), digest_size=8).hexdigest()


def _mean_prefill(statistics: Sequence[Statistics]) -> float:
    """Over the requests that had such a forward: a prompt shorter than a block has no prefill."""
    found = [s.active_experts_prefill for s in statistics if s.active_experts_prefill]
    return sum(found) / max(1, len(found))
