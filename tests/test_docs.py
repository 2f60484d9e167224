"""What the documentation names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "relume"
DOCS = sorted((TESTS.parent / "docs").glob("*.md"))
NAMED = re.compile(r"\b(test_\w+\.py)::(\w+)")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_tests_that_documentation_names_exist(path: Path) -> None:
    for file, function in NAMED.findall(path.read_text()):
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{path.name} names {file}::{function}"


def test_every_file_has_its_place_in_the_architecture() -> None:
    text = (TESTS.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (?:`(\w+)/`|alone) \| (.*?) \|", text, re.MULTILINE)
    named = {room: set(re.findall(r"`(\w+)/?`", files)) for room, files in rows}
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        *folders, name = path.relative_to(SOURCE).with_suffix("").parts
        if name != "__init__":
            room, file = [*folders, name][:2] if folders else ("", name)  # a folder in a room counts as a file
            found.setdefault(room, set()).add(file)
    assert named == found


def test_every_row_of_robustness_names_a_test() -> None:
    text = (TESTS.parent / "docs" / "robustness.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [\w-]+/[\w.-]+", line)]
    assert len(rows) == 25
    assert all(NAMED.search(row) for row in rows)
