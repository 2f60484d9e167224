"""The script that checks a GPU, run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relume.strategy.strategies import STRATEGIES

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.sh"


def check(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The report and what was printed."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(out), "HOME": str(out)}
    command = ["bash", str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    return document, done.stdout


def test_it_keeps_to_its_time_and_says_what_it_skipped(tmp_path: Path) -> None:
    report, printed = check(tmp_path, "--dry-run", "--seconds", "3", "--folder", str(tmp_path))
    assert report["kind"] == "measured" and report["torch"] and report["hardware"]
    assert report["dry_run"] and not report["failures"]
    assert any("s are left" in line for line in report["skipped"])
    assert report["skipped"][-1] in printed
    assert not list(tmp_path.glob("relume-gpu-check-*"))


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    """A minute."""
    report, printed = check(tmp_path, "--dry-run", "--folder", str(tmp_path), "--seconds", "3000")
    assert not report["failures"] and all("s are left" not in line for line in report["skipped"])
    for name in ("llada2_float32", "sdar_float32"):
        assert report[name]["full_against_cpu"] == 0.0
        rows = report[name]["strategies"]
        assert {key.partition(",")[0] for key in rows} == set(STRATEGIES) - {"belady", "full"}
        assert all(row == {"against_full": 0.0, "same_tokens": True} for row in rows.values())
    assert all(row["worst"] == 0.0 for key, row in report["races"].items() if key != "seconds")
    rows = report["speed"]["rows"]
    assert {row["strategy"] for row in rows} > {"full", "oled", "foresight"}
    assert all(row["same_tokens_as_full"] and row["tpot_ms"] > 0 and row["kind"] == "measured" for row in rows)
    assert "foresight" in printed and "failures: 0" in printed


def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": sys.executable,
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 1 and "--dry-run" in done.stderr and done.stderr.count("\n") == 1
