"""Loading an engine with a progress bar."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import relume
from relume.cli.options import options_of
from relume.cli.terminal import byte_progress, note
from relume.config import DTypeName

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
    """Keyword arguments of `Engine.load` that are options of every command that loads a model."""

    dtype: DTypeName = "auto"
    device: str = "cpu"
    prefill_blocks: int | None = None
    revision: str | None = None
    offline: bool = False


loading_options = options_of(LoadOptions, "loading", _HELP)


def load_engine(model: str, options: LoadOptions) -> Engine:
    """`Engine.load` for the command line; says aloud what will make it slower."""
    for fallback in relume.startup_fallbacks:
        note(fallback)
    with byte_progress("loading") as progress:
        return relume.Engine.load(model, **asdict(options), progress=progress)
