"""Run mixture-of-experts diffusion language models on computers that cannot hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relume.machine.threads import configure_threads

if TYPE_CHECKING:
    from relume.core import RelumeError as RelumeError
    from relume.engine.engine import Engine as Engine

__all__ = ["Engine", "RelumeError", "__version__"]
__version__ = "0.1.0"

#: Conditions found at import that make relume slower; every run's statistics repeat them.
startup_fallbacks: list[str] = configure_threads()


def __getattr__(name: str) -> Any:
    # Importing torch takes a second or more: `relume --help` must not wait for it.
    if name == "Engine":
        from relume.engine.engine import Engine

        return Engine
    if name == "RelumeError":
        from relume.core import RelumeError

        return RelumeError
    raise AttributeError(f"module 'relume' has no attribute {name!r}")
