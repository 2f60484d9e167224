"""Prefetch: which experts are brought ahead. One policy a file."""

from __future__ import annotations

from collections.abc import Callable

from relume.core import Registry
from relume.strategy.prefetch.base import Prefetch
from relume.strategy.prefetch.by_need import ByNeed

#: `own` is the retention itself, where it prefetches too; `none` brings nothing ahead.
PREFETCHES: Registry[Callable[[], Prefetch] | None] = Registry(
    "prefetch", {"none": None, "own": None, "need": ByNeed}
)
