"""The most popular experts of a profile, for good."""

from __future__ import annotations

import numpy as np

from relume.core import RelumeError
from relume.strategy.retention.base import Retention
from relume.strategy.retention.context import RetentionContext
from relume.strategy.use import LayerUse


class Static(Retention):
    """Ranks by profiled popularity, so what is loaded at the start never changes (Fiddler's placement).

    Raises:
        RelumeError: there is no profile.
    """

    preload = True

    def __init__(self, context: RetentionContext) -> None:
        super().__init__(context.shape)
        if context.profile is None:
            raise RelumeError(
                "the strategy static needs to know which experts are popular: give --profile a file made with "
                "`relume trace profile TRACE PROFILE`"
            )
        self._popularity = context.profile.popularity.astype(np.float64)

    def observe(self, use: LayerUse) -> None:
        """Nothing to note."""

    def priority(self, layers: slice) -> np.ndarray:
        """Popularity."""
        return self._popularity[layers]
