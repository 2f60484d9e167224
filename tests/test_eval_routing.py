"""Several routings side by side: rows, their comparison by paired resampling, and what is said of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pairs import write_made_for, write_model
from relume import Engine, RelumeError
from relume.config import DecodingConfig
from relume.evaluate.job import EvaluationRow, evaluate
from relume.evaluate.scoring import bootstrap_means, compare, interval_of
from relume.evaluate.variants import Variant
from relume.tasks import Problem
from terminal import run

DMOE = "dmoe:p=0.5"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(scope="module")
def trained(model: Path) -> Path:
    return write_made_for(model, DMOE, model.parent / "trained")


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def document(*arguments: object) -> dict[str, Any]:
    done = run("eval", *arguments, "--num-prompts", 4, "--tasks", "compare,date", "--max-tokens", 8, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_bootstrap_draws_as_all_resamples_one_by_one() -> None:
    """All 5^5 ways to draw five prompts from five, against draws of kinds of prompts."""
    values = np.array([[1, 1], [1, 0], [0, 1], [1, 1], [0, 0]], dtype=float)
    drawn = values[np.array(list(itertools.product(range(5), repeat=5)))].mean(axis=1)
    found = bootstrap_means(values, generator(), 200_000)
    assert found.mean(axis=0) == pytest.approx(drawn.mean(axis=0), abs=2e-3)
    difference, expected = found[:, 0] - found[:, 1], drawn[:, 0] - drawn[:, 1]
    for value in np.arange(-5, 6) / 5:
        share = np.isclose(expected, value).mean()
        assert np.isclose(difference, value).mean() == pytest.approx(share, abs=5e-3)
    assert interval_of(difference) == pytest.approx(interval_of(expected))


def test_comparisons_in_cases_that_are_known() -> None:
    right = [True, False, True, True] * 25
    same = compare(right, right, generator())
    assert (same.points, same.points_interval) == (0.0, (0.0, 0.0))
    assert (same.relative, same.relative_interval) == (1.0, (1.0, 1.0))
    half = compare([True, False] * 500, [True] * 1000, generator())
    assert half.points == -50.0 and half.relative == 0.5
    spread = 100 * 1.96 * np.sqrt(0.25 / 1000)
    assert half.points_interval == pytest.approx((-50 - spread, -50 + spread), abs=0.3)
    none = compare([True, False], [False, False], generator())
    assert none.points == 50.0 and none.relative is None and none.relative_interval is None
    assert compare(right, right[::-1], generator(3)) == compare(right, right[::-1], generator(3))


def test_pairs_are_what_makes_an_interval_narrow() -> None:
    """One answer of difference, of which the base's own share of right answers says nothing."""
    base = [number % 2 == 0 for number in range(200)]
    paired = compare([*base[:-1], True], base, generator())
    other = compare([True, *base[:-1]], base, generator())  # as many right, of other prompts
    assert paired.points == other.points == 0.5
    low, high = paired.points_interval
    assert low >= 0.0 and high <= 2.0
    assert other.points_interval[0] < -10.0 and other.points_interval[1] > 10.0


def test_other_prompts_cannot_be_paired(model: Path) -> None:
    def answered(*prompts: str) -> EvaluationRow:
        problems = {"mine": [Problem(text, text, "1") for text in prompts]}
        return evaluate(engine, problems, Variant.parse("threshold:0.9"), DecodingConfig(max_tokens=4))

    with Engine.load(model) as engine:
        row = answered("One?", "Two?")
        assert row.against(answered("One?", "Two?")).points == 0.0
        for other in (answered("Two?", "One?"), answered("One?")):
            with pytest.raises(RelumeError, match="different prompts"):
                row.against(other)
    with pytest.raises(ValueError, match="cannot be paired"):
        compare([True], [True, False], generator())


def test_a_row_for_each_routing_variant_and_block_length(model: Path) -> None:
    found = document(
        model, "--routing", f"own,{DMOE}", "--block-lengths", "8,16", "--variants", "threshold:0.9,joint:speed"
    )
    rows = found["rows"]
    assert [(row["routing"], row["variant"], row["block_length"]) for row in rows] == [
        (routing, variant, length)
        for routing in ("native", DMOE)
        for variant in ("threshold:0.9", "joint:speed")
        for length in (8, 16)
    ]
    assert [row["lossless"] for row in rows] == [True] * 4 + [False] * 4
    assert all(row["kind"] == "measured" for row in rows)
    own, fewer = rows[0], rows[4]
    assert fewer["active_experts"] < own["active_experts"]
    assert fewer["active_experts_prefill"] < own["active_experts_prefill"]
    assert own["wall_s_per_request"] == own["wall_s"] / 4
    assert set(fewer["against_base"]) == {"points", "points_interval", "relative", "relative_interval"}
    assert own["against_base"]["points_interval"] == [0.0, 0.0]


def test_bytes_are_those_of_the_types_that_the_checkpoint_stores(model: Path) -> None:
    """Computing in float32 does not make a bfloat16 model's experts twice as large."""
    for dtype in ("auto", "float32"):
        row = document(model, "--dtype", dtype)
        inspected = json.loads(run("inspect", model, "--json").stdout)
        per_expert = inspected["bytes_per_expert"]
        assert per_expert == 2 * 3 * 32 * json.loads((model / "config.json").read_text())["moe_intermediate_size"]
        assert row["active_expert_bytes"] == pytest.approx(row["active_experts"] * 1 * per_expert)


def test_the_base_is_the_first_row_or_the_one_that_is_named(model: Path, trained: Path) -> None:
    spelled = document(trained, "--routing", "native,dmoe:p=0.50", "--base", "dmoe:p=.5")["rows"]
    assert spelled[1]["against_base"]["points_interval"] == [0.0, 0.0]
    named = document(trained, "--routing", "own,native", "--base", "native")["rows"]
    assert [row["routing"] for row in named] == [DMOE, "native"]
    assert [row["lossless"] for row in named] == [True, False]
    assert named[1]["against_base"]["points_interval"] == [0.0, 0.0]
    other = document(trained, "--base-model", model, "--block-lengths", "16,32")["rows"]
    assert [(row["model"], row["routing"], row["block_length"]) for row in other] == [
        (str(model), "native", 16),
        (str(trained), DMOE, 16),
        (str(trained), DMOE, 32),
    ]


def test_the_table_has_a_line_for_each_row(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(
        "eval", model, "--routing", f"native,{DMOE},dmoe:p=0.8", "--num-prompts", 2, "--max-tokens", 8,
        "--plot", tmp_path / "plot.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("measured: 2 prompts") and lines[1].split()[:2] == ["routing", "block"]
    assert [line.split()[0] for line in lines[2:5]] == ["native", DMOE, "dmoe:p=0.8"]
    assert " base " in lines[2]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_row_is_shown_as_ever(model: Path) -> None:
    done = run("eval", model, "--num-prompts", 2, "--tasks", "date", "--max-tokens", 8, "--json")
    lines = done.stdout.splitlines()
    titles = [
        "measured",
        "date",
        "all",
        "prompts",
        "tokens",
        "active",
        "active",
        "MiB",
        "ms",
        "reached",
        "seconds",
    ]
    assert [line.split()[0] for line in lines[:-1]] == titles
    assert "rows" not in json.loads(lines[-1]) and "against_base" not in json.loads(lines[-1])


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--routing", "native,magic"], 2, "unknown routing 'magic'"),
        (["--routing", "native,top-k:9"], 1, "give an n of at most that"),
        (["--routing", "native,dmoe:block=16", "--block-lengths", "16,24"], 1, "no whole windows"),
        (["--block-lengths", "some"], 2, "--block-lengths some"),
        (["--block-lengths", "0"], 2, "block_length is 0"),
        (["--base", "native"], 2, "none of the routings own"),
        (["--base", "own", "--base-model", "demo"], 2, "not both"),
        (["--routing", "own,native", "--against", "demo"], 2, "--against compares"),
        (["--plot", "figure.pdf"], 1, ".png"),
    ],
)
def test_what_cannot_run_is_one_line(model: Path, arguments: list[str], code: int, complaint: str) -> None:
    done = run("eval", model, "--num-prompts", 2, "--max-tokens", 8, *arguments)
    assert done.returncode == code
    assert complaint in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
    assert not done.stdout
    if code == 1:
        assert done.stderr.count("\n") == 1


def test_rows_survive_as_plain_values(model: Path) -> None:
    with Engine.load(model) as engine:
        problems = {"mine": [Problem("One?", "One?", "1")]}
        row = evaluate(engine, problems, Variant.parse("threshold:0.9"), DecodingConfig(max_tokens=4))
    again = EvaluationRow.from_plain(json.loads(json.dumps(dataclasses.asdict(row))))
    assert again == row and again.against(row).points == 0.0
