"""Scoring, variants, and a whole evaluation on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relume import Engine, RelumeError
from relume.config import DecodingConfig, ShapeOverrides
from relume.evaluate.job import evaluate
from relume.evaluate.prompts import problems_for, sample_problems
from relume.evaluate.scoring import Score
from relume.evaluate.variants import Variant
from relume.synth.job import synthesise
from relume.tasks import TASKS, Problem, split_of
from terminal import run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval") / "model"
    sizes = ShapeOverrides(layers=2, hidden=32, experts=8, top_k=2, groups=2, vocab=600, heads=2, kv_heads=1)
    synthesise(folder, "llada2-mini", 0, sizes)
    return folder


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (900, 1000, 0.8799, 0.9171)],
)
def test_wilson_interval_against_published_values(right: int, total: int, low: float, high: float) -> None:
    assert Score(right, total).interval == pytest.approx((low, high), abs=5e-4)


def test_variants() -> None:
    assert Variant.parse("threshold:0.9").options == {"decoder": "threshold", "threshold": 0.9}
    assert Variant.parse("joint:speed").options == {"decoder": "joint", "mode": "speed"}
    assert Variant.parse("joint:quality:0.8").options == {"decoder": "joint", "mode": "quality", "threshold": 0.8}
    without_post = Variant.parse("joint:speed:post=0")
    assert without_post.options == {"decoder": "joint", "mode": "speed", "max_post_iterations": 0}
    for text in (
        "magic",
        "threshold:high",
        "threshold:2",
        "threshold:speed",
        "joint:post=x",
        "joint:pre=1",
        "joint:post=-1",
    ):
        with pytest.raises(RelumeError):
            Variant.parse(text)


def test_held_out_problems_are_different_and_held_out() -> None:
    problems = sample_problems(list(TASKS), 103, seed=4)
    assert sum(map(len, problems.values())) == 103
    assert set(problems) == set(TASKS)
    for name, group in problems.items():
        assert len({problem.prompt for problem in group}) == len(group) >= 10
        assert all(split_of(name, problem.key) == "held_out" for problem in group)
    with pytest.raises(RelumeError, match=r"--num-prompts 4000: the task date has \d+ different ones, 2000 are"):
        sample_problems(["compare", "date"], 4000, seed=4)
    everything = problems_for(None, "date,compare,date", None, 4)  # by default as many as there are, up to 1,000
    assert [len(everything[name]) for name in ("date", "compare")] == [500, 500]
    assert 800 < len(problems_for(None, "date", None, 4)["date"]) < 1000


def test_a_file_is_answered_whole_by_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(1319)))
    assert len(problems_for(file, None, None, 0)["mine"]) == 1319
    assert len(problems_for(file, None, 7, 0)["mine"]) == 7


def test_exact_match_counts_final_lines(model: Path) -> None:
    """The model's own answers are declared right for one task and wrong for another."""
    engine = Engine.load(model)
    decoding = DecodingConfig(max_tokens=8)
    prompts = ["One?", "Two?", "Three?"]
    answers = [
        engine.generate(messages=[{"role": "user", "content": text}], max_tokens=8, threshold=0.9).text or ""
        for text in prompts
    ]
    problems = {
        "same": [Problem(p, p, f"some steps\n{a}") for p, a in zip(prompts, answers, strict=True)],
        "other": [Problem(p, p, f"{a}!") for p, a in zip(prompts, answers, strict=True)],
    }
    seen = []
    row = evaluate(
        engine,
        problems,
        Variant.parse("threshold:0.9"),
        decoding,
        4,
        lambda done, total: seen.append((done, total)),
    )
    assert (row.tasks["same"].exact_match, row.tasks["other"].exact_match) == (1.0, 0.0)
    assert row.overall == Score(3, 6)
    assert row.unterminated == 6
    assert seen == [(4, 6), (2, 6)]
    assert 2 <= row.active_experts <= 8


def test_the_command_prints_a_table_and_json(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "Two and two?", "answer": "2+2\\n#### 4"}\n')
    done = run(
        "eval", model, "--num-prompts", 3, "--tasks", "compare,date", "--max-tokens", 8,
        "--variants", "threshold:0.9,joint:speed", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document["exact_match"]) == {"overall", "tasks"}
    assert set(document["exact_match"]["tasks"]) == {"compare", "date"}
    assert document["num_prompts"] == 3
    assert [row["variant"] for row in document["rows"]] == ["threshold:0.9", "joint:speed"]
    assert document["kind"] == "measured"
    assert "tokens per iteration" in done.stdout
    own = run("eval", model, "--prompts", tmp_path / "mine.jsonl", "--max-tokens", 8, "--json")
    assert json.loads(own.stdout.splitlines()[-1])["exact_match"]["tasks"] == {"mine": 0.0}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--variants", "magic"],
        ["--tasks", "juggling"],
        ["--num-prompts", "0"],
        ["--seed", "-1"],
    ],
)
def test_wrong_usage(model: Path, arguments: list[str]) -> None:
    done = run("eval", model, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
