"""Loading an engine with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import relume
from relume.cli.options import options_of
from relume.cli.terminal import byte_progress, note
from relume.config import DTypeName, EngineConfig

if TYPE_CHECKING:
    from relume.engine.engine import Engine

_HELP = {
    "dtype": "float32, bfloat16, or auto: the checkpoint's.",
    "device": "cpu or cuda.",
    "prefill_blocks": "Blocks of the prompt in one forward; by default as many as hold 512 tokens.",
    "revision": "Branch, tag or commit of a hub id.",
    "offline": "Use only what was downloaded before.",
}


@dataclass(frozen=True)
class LoadOptions:
    """Options of every command that loads a model; raises `RelumeError` for values that no engine takes."""

    dtype: DTypeName = "auto"
    device: str = "cpu"
    prefill_blocks: int | None = None
    revision: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        self.engine  # noqa: B018 (building it checks the values)

    @property
    def engine(self) -> EngineConfig:
        """The engine's configuration."""
        return EngineConfig(dtype=self.dtype, device=self.device, prefill_blocks=self.prefill_blocks)


loading_options = options_of(LoadOptions, "loading", _HELP)


def open_engine(model: str, options: LoadOptions) -> Engine:
    """An engine without its weights yet; says aloud what will make it slower."""
    from relume.engine.engine import Engine

    for fallback in relume.startup_fallbacks:
        note(fallback)
    return Engine.open(model, options.engine, revision=options.revision, offline=options.offline)


def read_weights(engine: Engine) -> None:
    """Read the weights of an opened engine, with a progress bar."""
    with byte_progress("loading") as progress:
        engine.read_weights(progress)
