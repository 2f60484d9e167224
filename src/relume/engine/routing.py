"""Which routing an engine runs with: what was asked for, else what the model is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relume.config import ModelConfig, require
from relume.routing.choice import RoutingChoice
from relume.strategy.strategies import Strategy

#: Retentions that compare the experts of a token from one iteration to the next, row by row.
_NEED_EVEN_ROWS = ("foresight",)


@dataclass(frozen=True)
class RoutingInForce:
    """A routing that the model can run with.

    Attributes:
        choice: the routing.
        own: the model's, which its checkpoint names; without it the tokens are not those of the plain model.
        config: the model's shape with the router that the choice runs with.
    """

    choice: RoutingChoice
    own: RoutingChoice
    config: ModelConfig

    @classmethod
    def of(cls, config: ModelConfig, asked: str | None) -> RoutingInForce:
        """The routing `asked` for, or by default the model's own.

        Raises:
            RelumeError: there is no such routing, or the model cannot run with it.
        """
        own = RoutingChoice.parse(config.routing)
        choice = own if asked is None else RoutingChoice.parse(asked)
        choice.check(config.router)
        return cls(choice, own, replace(config, router=choice.router(config.router)))

    @property
    def is_own(self) -> bool:
        """Whether the routing is the model's own, in other words or the same."""
        router = self.config.router
        return self.choice == self.own or self.choice.resolved(router) == self.own.resolved(router)

    @property
    def is_lossless(self) -> bool:
        """Whether tokens are those of the plain model: its own routing, and no regard to what is resident."""
        return self.is_own and not self.choice.uses_residents

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each: the model's own routing gave way, or the plan does not hold all that the choice takes."""
        other = () if self.is_own else (f"routing {self.choice} instead of the model's own {self.own}",)
        wide = (f"routing {self.choice}: the memory plan does not count tokens with more experts than the top-k",)
        return (*other, *wide) if self.choice.is_ragged else other

    def check_strategy(self, strategy: str) -> None:
        """Raise `RelumeError` if a strategy needs as many experts for every token, and the routing differs."""
        retention = Strategy.parse(strategy).retention
        require(
            not self.choice.is_ragged or retention not in _NEED_EVEN_ROWS,
            f"routing {self.choice}: the strategy {strategy} needs as many experts for every token: choose "
            "another, as --strategy lru",
        )

    def check_recording(self) -> None:
        """Raise `RelumeError` if a trace cannot hold what the routing gives."""
        require(
            not self.choice.is_ragged,
            f"routing {self.choice}: a trace holds as many experts for every token: record with another routing",
        )
