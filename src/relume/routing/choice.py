"""Which routing a model runs with: its own, or one that uses fewer experts. Text in, text out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from relume.config import RouterConfig, require
from relume.core import RelumeError
from relume.routing.guard import legal_guard
from relume.routing.options import OPTIONS, ROUTINGS


@dataclass(frozen=True)
class RoutingChoice:
    """A name of `ROUTINGS` with its options; `None` where an option is not its own or is left to its default.

    docs/routing.md has the mathematics and the sources.

    Attributes:
        name: `native` (the model's own), `top-k`, `des-seq`, `des-vote`, `expert-choice`, `team` or `dmoe`.
        n: of `top-k`: experts of a token; of `des-seq`: those of each token's that the coreset unites.
        share: of `des-vote`: coreset / experts of the layer, by default 0.15.
        least, most: of `expert-choice`: experts of a token, on average, in a window that is all masked and in one
            that has no mask; by default half of the model's top-k, and its top-k.
        distance, confidence: of `team`: masks nearer than this to the first mask, and tokens whose candidate was
            more confident than this in the block's last iteration, route natively.
        p: of `dmoe`: share of the votes that the coreset holds, by default 0.6.
        guard: the smallest coreset; by default, and at least, `legal_guard`.
        aggregate: how a window's votes add up: `sum` (published, the default) or `max`.
        block: tokens of a window, which share a coreset; by default the request's block length, which it must
            divide.
        prefill: routing of the forwards that do not denoise: `same` (the default) or `native`.
        residents: added to the normalised votes of resident experts when they are ordered; 0 by default.

    Raises:
        RelumeError: an unknown name or option, or a value out of range.
    """

    name: str = "native"
    n: int | None = None
    share: float | None = None
    least: float | None = None
    most: float | None = None
    distance: int | None = None
    confidence: float | None = None
    p: float | None = None
    guard: int | None = None
    aggregate: str | None = None
    block: int | None = None
    prefill: str | None = None
    residents: float | None = None

    def __post_init__(self) -> None:
        kind = ROUTINGS[self.name]
        for key, value in kind.defaults:
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        for key, unsaid in (("aggregate", "sum"), ("prefill", "same"), ("residents", 0.0)):
            if getattr(self, key) == unsaid and key in kind.names:
                object.__setattr__(self, key, None)  # one choice, one text
        for key, value in self._given().items():
            require(key in kind.names, f"routing {self.name}: no option {key!r}; {kind.known}")
            option = OPTIONS[key]
            if option.read is float:
                object.__setattr__(self, key, float(value))
            require(option.holds(value), f"routing {self.name}: {key} is {value}: {option.words} was expected")
        for key in kind.required:
            require(
                getattr(self, key) is not None, f"routing {self.name} needs {key}: write {self.name}:{key}=..."
            )
        if self.least is not None and self.most is not None:
            require(
                self.least <= self.most,
                f"routing {self.name}: least is {self.least}, which exceeds most ({self.most})",
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name and its options: `dmoe:p=0.6:guard=12`, `top-k:4`; the reverse of `str`.

        Raises:
            RelumeError: an unknown name or option, or a value that cannot be used; one line.
        """
        name, *parts = text.strip().split(":")
        kind = ROUTINGS[name]
        values: dict[str, Any] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if not equals and len(kind.required) == 1:  # the one that must be given may go without its name
                key, value = kind.required[0], part
            require(key in kind.names, f"routing {text!r}: no option {key!r}; {kind.known}")
            require(key not in values, f"routing {text!r}: {key} is given twice")
            try:
                values[key] = OPTIONS[key].read(value)
            except ValueError:
                raise RelumeError(
                    f"routing {text!r}: {key} is {value!r}: {OPTIONS[key].words} was expected"
                ) from None
        return cls(name, **values)

    def __str__(self) -> str:
        return ":".join([self.name, *(f"{key}={_text(value)}" for key, value in self._given().items())])

    @property
    def has_coreset(self) -> bool:
        """Whether tokens choose among a window's coreset, which has to be large enough for each of them."""
        return "guard" in ROUTINGS[self.name].names

    @property
    def is_ragged(self) -> bool:
        """Whether tokens differ in how many experts they have."""
        return self.name == "expert-choice"

    @property
    def uses_residents(self) -> bool:
        """Whether the routing depends on which experts are resident."""
        return bool(self.residents)

    def router(self, config: RouterConfig) -> RouterConfig:
        """The router with which the choice runs: `top-k` is one that is narrower everywhere."""
        return replace(config, top_k=self.n) if self.name == "top-k" and self.n is not None else config

    def smallest(self, config: RouterConfig) -> int:
        """The smallest coreset that a window may get."""
        return self.guard or _least(config)

    def window(self, block_length: int) -> int:
        """Tokens that share a coreset in a request of this block length."""
        return self.block or block_length

    def resolved(self, config: RouterConfig) -> Self:
        """The same routing with what a router decides written out, so that equal routings are equal."""
        if self.has_coreset:
            return replace(self, guard=self.smallest(config))
        if self.is_ragged:
            most = config.top_k if self.most is None else self.most
            return replace(self, least=most / 2 if self.least is None else self.least, most=most)
        return self

    def check(self, config: RouterConfig) -> None:
        """Raise `RelumeError` unless a model with this router, its own one, can run with the choice."""
        if self.name == "native":
            return
        if self.name == "top-k":
            require(
                self.n is not None and self.n <= config.top_k,
                f"routing {self}: a token of this model uses {config.top_k} experts: give an n of at most that",
            )
            return
        require(
            not config.capacity,
            f"routing {self}: this model admits {config.capacity} experts per {config.capacity_window} tokens by "
            "itself, and a second restriction could leave a token too few: leave the routing native",
        )
        if self.has_coreset:
            least = _least(config)
            require(
                least <= self.smallest(config) <= config.num_experts,
                f"routing {self}: guard is {self.guard}, and only {least}..{config.num_experts} experts leave "
                f"every token of this model {config.top_k} of them: leave the guard out for {least}",
            )
        if self.name == "des-seq":
            require(
                self.n is not None and self.n < config.top_k,
                f"routing {self}: n must be less than the {config.top_k} experts of a token",
            )
        if self.is_ragged:
            whole = self.resolved(config)  # refuses a least that exceeds the most
            require(
                whole.most is not None and whole.most <= config.num_experts,
                f"routing {self}: a token cannot have {whole.most} experts of the layer's {config.num_experts}",
            )

    def check_block_length(self, block_length: int) -> None:
        """Raise `RelumeError` if windows would straddle the blocks of a request."""
        window = self.window(block_length)
        require(
            block_length % window == 0,
            f"routing {self}: blocks of {block_length} tokens are no whole windows of {window}: give a block that "
            "divides the block length, or leave it out",
        )

    def _given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"}
        return {key: value for key, value in values.items() if value is not None}


def _least(config: RouterConfig) -> int:
    return legal_guard(config.num_experts, config.top_k, config.num_groups, config.kept_groups)


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


#: The model's own routing.
NATIVE = RoutingChoice()
