"""Rooms import downwards only, files stay small, and the command line starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "relume"

#: From top to bottom; a room may import rooms of lower levels, and itself.
LEVELS = [
    {"cli"},
    {"serve", "figures", "evaluate"},
    {"train", "replicate", "simulate", "synth", "pack"},
    {"engine"},
    {"decoding", "model"},
    {"experts"},
    {"clock"},
    {"trace"},
    {"strategy", "routing"},
    {"checkpoint"},
    {"machine", "tasks"},
    {"config"},
    {"core"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "relume" and len(parts) > 1 else None


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    own = relative.parts[0].removesuffix(".py")
    if own in {"__init__", "__main__"}:
        return  # the package itself hands out the engine
    assert own in LEVEL, f"{own} is a new room: give it a level"
    for module in imported(ast.parse(path.read_text())):
        other = room(module)
        if other is not None and other != own:
            assert LEVEL[other] > LEVEL[own], f"{relative} imports {module}, which is not below it"


def test_files_stay_small() -> None:
    lengths = {path.relative_to(SOURCE): len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 500, max(lengths, key=lambda name: lengths[name])
    assert sorted(lengths.values())[len(lengths) // 2] <= 120


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys; import relume.cli.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_wait_policy_is_set_before_torch_and_a_late_import_is_reported() -> None:
    code = "import {}, {}; import os; print(os.environ['OMP_WAIT_POLICY'], relume.startup_fallbacks)"
    environment = {"PATH": "/usr/bin"}
    for order, expected in (
        (("relume", "torch"), "PASSIVE []"),
        (("torch", "relume"), "torch was imported before"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", code.format(*order)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        assert expected in run.stdout
