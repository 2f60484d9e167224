"""A small model, and the same one as a model that is made for a routing."""

from __future__ import annotations

import json
from pathlib import Path

from relume.config import ShapeOverrides
from relume.synth.job import synthesise


def write_model(folder: Path) -> Path:
    sizes = ShapeOverrides(layers=2, hidden=32, experts=16, top_k=4, groups=1, vocab=600, heads=2, kv_heads=1)
    synthesise(folder, "llada2-mini", 0, sizes)
    return folder


def write_made_for(model: Path, routing: str, folder: Path) -> Path:
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"routing": routing}))
    return folder
