"""Dispatch policies. A new one is a file here and a line in `DISPATCHES`."""

from __future__ import annotations

from collections.abc import Callable

from relume.core import Registry
from relume.strategy.dispatch.base import Dispatch
from relume.strategy.dispatch.fiddler import FiddlerMax, FiddlerSum
from relume.strategy.dispatch.freetoken import FreeToken
from relume.strategy.dispatch.host import AllHost
from relume.strategy.dispatch.hybrimoe import HybriMoE
from relume.strategy.dispatch.oled import Balanced
from relume.strategy.dispatch.transfer import AllTransfer

DispatchFactory = Callable[[], Dispatch]

DISPATCHES: Registry[DispatchFactory] = Registry(
    "dispatch",
    {
        "transfer": AllTransfer,
        "host": AllHost,
        "fiddler": FiddlerSum,
        "fiddler-max": FiddlerMax,
        "hybrimoe": HybriMoE,
        "freetoken": FreeToken,
        "balanced": Balanced,
    },
)
