"""What the documentation names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = sorted((TESTS.parent / "docs").glob("*.md"))
NAMED = re.compile(r"\b(test_\w+\.py)::(\w+)")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_tests_that_documentation_names_exist(path: Path) -> None:
    for file, function in NAMED.findall(path.read_text()):
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{path.name} names {file}::{function}"


def test_every_row_of_robustness_names_a_test() -> None:
    text = (TESTS.parent / "docs" / "robustness.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [\w-]+/[\w.-]+", line)]
    assert len(rows) == 25
    assert all(NAMED.search(row) for row in rows)
