"""Loading an engine with a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import relume
from relume.cli.terminal import byte_progress, note

if TYPE_CHECKING:
    from relume.config import DTypeName
    from relume.engine.engine import Engine


def load_engine(
    model: str, *, dtype: DTypeName, device: str, revision: str | None, offline: bool, prefill_blocks: int | None
) -> Engine:
    """`Engine.load` for the command line; says aloud what will make it slower."""
    for fallback in relume.startup_fallbacks:
        note(fallback)
    with byte_progress("loading") as progress:
        return relume.Engine.load(
            model,
            dtype=dtype,
            device=device,
            revision=revision,
            offline=offline,
            prefill_blocks=prefill_blocks,
            progress=progress,
        )
