"""Run mixture-of-experts diffusion language models on computers that cannot hold them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relume.machine.threads import configure_threads

if TYPE_CHECKING:
    from relume.config import DecodingConfig as DecodingConfig
    from relume.core import RelumeError as RelumeError
    from relume.engine.engine import Engine as Engine
    from relume.engine.events import BlockEvent as BlockEvent
    from relume.engine.events import IterationEvent as IterationEvent
    from relume.engine.request import Request as Request
    from relume.engine.result import GenerationResult as GenerationResult

__version__ = "0.1.0"

_HOMES = {
    "BlockEvent": "relume.engine.events",
    "DecodingConfig": "relume.config",
    "Engine": "relume.engine.engine",
    "GenerationResult": "relume.engine.result",
    "IterationEvent": "relume.engine.events",
    "RelumeError": "relume.core",
    "Request": "relume.engine.request",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 (names, from the table)

#: Conditions found at import that make relume slower; every run's statistics repeat them.
startup_fallbacks: list[str] = configure_threads()


def __getattr__(name: str) -> Any:
    # Importing torch takes a second or more: `relume --help` must not wait for it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'relume' has no attribute {name!r}")
