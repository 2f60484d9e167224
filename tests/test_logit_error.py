"""Comparing the logits of two models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relume.evaluate.logits import compare_logits


def test_the_error_is_relative_and_blind_to_constants() -> None:
    reference = [torch.tensor([[1.0, -1.0], [3.0, 1.0]]), torch.tensor([[0.0, 2.0]])]
    same = compare_logits([part + 7.0 for part in reference], reference)
    assert (same.relative_error, same.same_top, same.num_positions) == (0.0, 1.0, 3)
    other = compare_logits([torch.tensor([[0.0, -2.0], [-1.0, 1.0]]), torch.tensor([[0.0, 2.0]])], reference)
    assert other.same_top == pytest.approx(2 / 3)
    assert other.relative_error == pytest.approx((8 / 6) ** 0.5)  # one of three rows has the opposite sign


def test_a_model_does_not_differ_from_itself() -> None:
    command = [
        str(Path(sys.executable).parent / "relume"),
        "eval",
        "demo",
        "--tasks",
        "compare",
        "--num-prompts",
        "4",
    ]
    done = subprocess.run([*command, "--against", "demo", "--json"], capture_output=True, text=True, check=True)
    error = json.loads(done.stdout.splitlines()[-1])["logit_error"]
    assert (error["relative_error"], error["same_top"], error["against"]) == (0.0, 1.0, "demo")
    assert error["num_positions"] > 40
