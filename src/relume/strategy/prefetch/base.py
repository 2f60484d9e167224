"""What every prefetch policy answers: which experts to bring before they are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relume.core import SpanInput, SpanSignals
from relume.strategy.use import LayerUse

if TYPE_CHECKING:
    from relume.strategy.lanes import Key
    from relume.strategy.pool import ResidentPool
    from relume.strategy.retention.base import Retention


class Prefetch(ABC):
    """Names experts to bring. It sees what a retention sees, in the same order, after it.

    A policy that is its strategy's retention too is told of everything once, as that.
    """

    def begin_forward(self, spans: Sequence[SpanInput]) -> None:  # noqa: B027 (most have nothing to do)
        """Take note of what is about to be computed."""

    def observe(self, use: LayerUse) -> None:  # noqa: B027 (as above)
        """Take note of a layer's routing."""

    def end_forward(self, spans: Sequence[SpanSignals]) -> None:  # noqa: B027 (as above)
        """Take note of what the decoder made of the forward."""

    @abstractmethod
    def wanted(self, layer: int | None, pool: ResidentPool, retention: Retention) -> list[Key] | None:
        """Absent experts to bring when the link is idle, the most urgent first; `None` leaves the last answer.

        Args:
            layer: that has just been decided on; `None` after a forward.
            pool: who is resident.
            retention: of the strategy.
        """
