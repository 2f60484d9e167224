"""Retention policies. A new one is a file here and a line in `RETENTIONS`."""

from __future__ import annotations

from collections.abc import Callable

from relume.core import Registry
from relume.strategy.retention.base import Retention
from relume.strategy.retention.belady import Belady
from relume.strategy.retention.counts import Counts
from relume.strategy.retention.finemoe import FineMoE
from relume.strategy.retention.foresight import Foresight
from relume.strategy.retention.full import Full
from relume.strategy.retention.hybrimoe import HybriMoE
from relume.strategy.retention.least_stale import LeastStale
from relume.strategy.retention.lfru import Lfru
from relume.strategy.retention.lfu import Lfu
from relume.strategy.retention.lru import Lru
from relume.strategy.retention.moe_infinity import MoEInfinity
from relume.strategy.retention.oled import Oled
from relume.strategy.retention.static import Static
from relume.strategy.retention.tide import Tide

#: Makes one from a context and its parameters, which are keywords.
RetentionFactory = Callable[..., Retention]

RETENTIONS: Registry[RetentionFactory] = Registry(
    "strategy",
    {
        "full": Full,
        "lru": Lru,
        "lfu": Lfu,
        "lfru": Lfru,
        "least-stale": LeastStale,
        "static": Static,
        "counts": Counts,
        "belady": Belady,
        "foresight": Foresight,
        "oled": Oled,
        "moe-infinity": MoEInfinity,
        "finemoe": FineMoE,
        "hybrimoe": HybriMoE,
        "tide": Tide,
    },
)
