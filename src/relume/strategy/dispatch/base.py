"""What every dispatch answers: which misses cross the link."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from relume.strategy.dispatch.case import DispatchCase


class Dispatch(ABC):
    """Splits a layer's misses between the device and the host. Equal cases give equal plans."""

    @abstractmethod
    def plan(self, case: DispatchCase) -> np.ndarray:
        """`[m]` bool: True is brought over the link, False is computed on the host.

        Whatever the host cannot compute is True.
        """
