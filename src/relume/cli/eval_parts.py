"""Which rows `relume eval` makes, and with which engine each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relume.cli.loading import OWN, LoadOptions, RoutingsOptions, open_engine, read_weights
from relume.cli.simulate import parts_of
from relume.cli.terminal import item_progress
from relume.config import DecodingConfig, require
from relume.core import RelumeError
from relume.engine.engine import Engine
from relume.evaluate.job import EvaluationRow, evaluate, request_of, require_chat_template
from relume.evaluate.variants import Variant
from relume.routing.choice import RoutingChoice
from relume.tasks import Problem


@dataclass(frozen=True)
class Part:
    """Rows of one model and routing, for which one engine is loaded: a row a variant and decoding.

    Attributes:
        model: as it was named.
        loading: with the routing.
        variants, decodings: all pairs of them.
    """

    model: str
    loading: LoadOptions
    variants: Sequence[Variant]
    decodings: Sequence[DecodingConfig]

    def check(self, longest: str, batch_size: int) -> None:
        """Raise what loading and decoding the longest prompt would raise; reads no weights."""
        with open_engine(self.model, self.loading, batch_size) as engine:
            require_chat_template(engine)
            for variant, decoding in itertools.product(self.variants, self.decodings):
                engine.check(request_of(engine, longest, variant.over(decoding)))

    def rows(self, engine: Engine, problems: Mapping[str, Sequence[Problem]], batch: int) -> list[EvaluationRow]:
        """Answer the problems for each row."""
        found = []
        for variant, decoding in itertools.product(self.variants, self.decodings):
            with item_progress(f"answering, {variant.name}, {engine.routing}") as progress:
                found.append(evaluate(engine, problems, variant, decoding, batch, progress, self.model))
        return found


def plan_parts(
    model: str,
    loading: RoutingsOptions,
    variants: Sequence[Variant],
    block_lengths: str | None,
    max_tokens: int,
    base: str | None,
    base_model: str | None,
) -> tuple[list[Part], int]:
    """What to run, and the number of the row that all are compared with.

    Raises:
        RelumeError: options that contradict each other, or no lengths of blocks.
    """
    decodings = [DecodingConfig(max_tokens=max_tokens, block_length=length) for length in _lengths(block_lengths)]
    routings = loading.routings
    parts = [Part(model, loading.one(routing), variants, decodings) for routing in routings]
    if base_model is not None:
        require(base is None, "give --base or --base-model, not both")
        return [Part(base_model, loading.one("native"), variants[:1], decodings[:1]), *parts], 0
    if base is None:
        return parts, 0
    choices = [_choice(routing or OWN) for routing in routings]
    names = ", ".join(routing or OWN for routing in routings)
    require(_choice(base) in choices, f"--base {base}: it is none of the routings {names}")
    return parts, choices.index(_choice(base)) * len(variants) * len(decodings)


def run_parts(
    parts: Sequence[Part], problems: Mapping[str, Sequence[Problem]], batch_size: int
) -> tuple[list[EvaluationRow], Engine]:
    """All rows, and the last engine; the others are closed, so that one model is in memory at a time."""
    longest = max((problem.prompt for group in problems.values() for problem in group), key=len, default="")
    if sum(len(part.variants) * len(part.decodings) for part in parts) > 1:
        for part in parts:  # what cannot run is found before the first long work
            part.check(longest, batch_size)
    rows: list[EvaluationRow] = []
    for part in parts:
        engine = open_engine(part.model, part.loading, batch_size)
        read_weights(engine)
        rows += part.rows(engine, problems, batch_size)
        if part is not parts[-1]:
            engine.close()
    return rows, engine


def _choice(text: str) -> RoutingChoice | None:
    """However it is spelled; `None` is the model's own."""
    return None if text.strip() == OWN else RoutingChoice.parse(text)


def _lengths(text: str | None) -> list[int | None]:
    try:
        return [int(part) for part in dict.fromkeys(parts_of(text))] or [None]
    except ValueError:
        raise RelumeError(f"--block-lengths {text}: write whole numbers, separated by commas") from None
