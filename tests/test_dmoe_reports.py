"""The scripts that report on a distilled model, on a small one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pairs import write_made_for, write_model
from relume import Engine
from relume.config import DecodingConfig
from relume.evaluate.job import evaluate
from relume.evaluate.variants import Variant
from relume.tasks import Problem

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reports") / "base")


@pytest.fixture(scope="module")
def distilled(base: Path) -> Path:
    return write_made_for(base, "dmoe:p=0.5", base.parent / "distilled")


def report(script: str, *arguments: object) -> str:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments), "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(script: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(Path(script).stem, SCRIPTS / script)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # its dataclasses look themselves up
    found.loader.exec_module(module)
    return module


def test_the_report_goes_on_where_it_stopped(base: Path, distilled: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "dmoe"
    arguments = ("dmoe_report.py", distilled, out, "--base", base, "--num-prompts", 3)
    printed = report(*arguments)
    document = json.loads((tmp_path / "dmoe.json").read_text())
    rows = document["rows"]
    assert document["kind"] == "measured" and all(row["kind"] == "measured" for row in rows)
    assert {row["model"] for row in rows} == {"base", "distilled"}
    assert {row["block_length"] for row in rows} == {8, 16, 32}
    kinds = {row["routing"].partition(":")[0] for row in rows}
    assert kinds == {"native", "dmoe", "des-vote", "des-seq", "top-k", "expert-choice", "team"}
    assert rows[0]["routing"] == "native" and rows[0]["against_base"] is None
    assert len({(row["model"], row["routing"], row["block_length"]) for row in rows}) == len(rows)
    assert f"{len(rows)}/{len(rows)}" in printed
    assert {found["routing"] for found in document["equal_experts"]} == {
        f"dmoe:p={p}" for p in (0.4, 0.5, 0.6, 0.7, 0.8)
    }
    assert (tmp_path / "dmoe.png").exists()
    text = (tmp_path / "dmoe.md").read_text()
    assert "\nMeasured on " in text and "](dmoe.png)" in text and str(tmp_path) not in text

    kept = tmp_path / "dmoe.rows.jsonl"
    kept.write_text(kept.read_text()[:-100])  # the last line is cut off
    again = report(*arguments)
    assert "1/1 " in again and json.loads((tmp_path / "dmoe.json").read_text())["rows"][:-1] == rows[:-1]
    assert "s left" not in report(*arguments)


def test_equal_experts_lie_between_two_rows(base: Path) -> None:
    script = load("dmoe_report.py")
    problems = {"mine": [Problem(str(number), f"{number}?", "1") for number in range(4)]}
    with Engine.load(base) as engine:
        row = evaluate(engine, problems, Variant.parse("threshold:0.9"), DecodingConfig(max_tokens=4))
    right = {4.0: (False, False, True, False), 8.0: (True, True, True, False)}
    others = [
        dataclasses.replace(row, active_experts=count, right=found, routing=f"at {count}")
        for count, found in right.items()
    ]
    for count, expected, between in (
        (5.0, 0.375, ["at 4.0", "at 8.0"]),
        (8.0, 0.75, ["at 8.0"]),
        (3.0, 0.25, ["at 4.0"]),
        (9.0, 0.75, ["at 8.0"]),
    ):
        mine = dataclasses.replace(row, active_experts=count, right=(True,) * 4)
        found = script.at_equal_experts(mine, others, np.random.default_rng(0))
        assert found["other_exact_match"] == expected and found["between"] == between
        assert found["other_active_experts"] == min(max(count, 4.0), 8.0)
        assert found["points"] == pytest.approx(100 * (1.0 - expected))


def test_the_budget_report(base: Path, distilled: Path, tmp_path: Path) -> None:
    report(
        "dmoe_budget.py", distilled, tmp_path / "budget", "--base", base, "--budget", "25%", "--num-prompts", 3,
        "--profile-prompts", 3, "--rounds", 2,
    )  # fmt: skip
    rows = json.loads((tmp_path / "budget.json").read_text())["rows"]
    assert [(row["model"], row["strategy"]) for row in rows[:4]] == [
        ("base", "lru"), ("base", "foresight"), ("distilled", "lru"), ("distilled", "foresight"),
    ]  # fmt: skip
    assert [row["routing"] for row in rows[2:]] == ["dmoe:p=0.5"] * 2 + [
        f"dmoe:p=0.5:residents={strength}" for strength in (0.05, 0.1, 0.05)
    ]
    for row in rows:
        assert row["kind"] == "measured" and len(row["rounds"]) == 2
        assert 0.0 <= row["hit_rate"] <= 1.0 and 0.0 <= row["belady_hit_rate_simulated"] <= 1.0
        assert set(row["phases"]) <= {"prefill", "first", "later", "commit"} and "first" in row["phases"]
        assert row["tpot_ms"] > 0
    assert rows[0]["bytes_per_token"] > rows[2]["bytes_per_token"]
    assert rows[0]["exact_match"] == rows[1]["exact_match"]
    assert (tmp_path / "budget.md").read_text().count("\n| ") == len(rows) + 1
