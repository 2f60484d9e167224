"""The model that comes with the package."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relume import DecodingConfig, Engine
from relume.checkpoint.hub import SHIPPED
from relume.evaluate.job import EvaluationRow, evaluate
from relume.evaluate.prompts import sample_problems
from relume.evaluate.variants import Variant
from relume.tasks import TASKS, final_answer


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine.load("demo")


def questions() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parent.parent / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.QUESTIONS)


def test_the_demo_s_questions_are_answered_right(demo: Engine) -> None:
    for question, answer in questions().items():
        result = demo.generate(messages=[{"role": "user", "content": question}], threshold=0.9)
        assert final_answer(result.text or "") == answer
        assert result.finish_reason == "eos"


def test_its_shape_and_size(demo: Engine) -> None:
    assert sum(path.stat().st_size for path in (SHIPPED / "demo").iterdir()) < 20 * 2**20
    config = demo.config
    assert (config.family, config.num_layers, config.num_dense_layers) == ("llada2", 6, 1)
    assert (config.router.num_experts, config.router.top_k, config.router.num_groups) == (64, 4, 8)


@pytest.fixture(scope="module")
def row(demo: Engine) -> EvaluationRow:
    return held_out(demo)


def held_out(engine: Engine) -> EvaluationRow:
    problems = sample_problems(list(TASKS), 100, seed=11)
    return evaluate(engine, problems, Variant.parse("threshold:0.9"), DecodingConfig(max_tokens=128))


def test_most_held_out_answers_are_right(demo: Engine, row: EvaluationRow) -> None:
    assert row.overall.exact_match >= 0.8
    assert row.tokens_per_iteration >= 2
    assert 0.3 <= row.active_experts / demo.config.router.num_experts <= 0.45


def test_make_demo_shows_the_canvas_filling_in() -> None:
    script = Path(__file__).parent.parent / "scripts" / "demo.py"
    plain = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "TTY_COMPATIBLE"}}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == 0, done.stderr
    for question, answer in questions().items():
        frames = done.stdout.partition(f"\n{question}\n")[2].partition("\n\n")[0]
        assert frames.count("iteration") >= 2 and answer in frames.splitlines(), question
    assert "░" in done.stdout.partition("how sure")[2]
    assert "The tokens are the same." in done.stdout


@pytest.mark.slow
def test_the_bars_of_1000_held_out_prompts(demo: Engine) -> None:
    problems = sample_problems(list(TASKS), 1000, seed=0)

    def rate(engine: Engine, variant: str) -> EvaluationRow:
        return evaluate(engine, problems, Variant.parse(variant), DecodingConfig(max_tokens=256), 64)

    own = rate(demo, "threshold:0.9")
    assert own.overall.exact_match >= 0.90 and own.tokens_per_iteration >= 2
    assert min(score.exact_match for score in own.tasks.values()) >= 0.75
    with Engine.load("demo", dtype="float32") as base, Engine.load("demo-dmoe", dtype="float32") as distilled:
        variants = ("threshold:0.9", "joint:quality", "joint:speed", "joint:speed:post=0")
        whole, quality, speed, hasty = (rate(base, each) for each in variants)
        few = rate(distilled, "threshold:0.9")
    assert quality.overall.exact_match >= whole.overall.exact_match - 0.01
    assert speed.tokens_per_iteration > quality.tokens_per_iteration
    assert hasty.tokens_per_iteration > whole.tokens_per_iteration
    assert few.overall.num_right >= 0.99 * whole.overall.num_right
    assert few.active_experts <= whole.active_experts / 3


def test_the_distilled_one_needs_a_third_of_the_experts(row: EvaluationRow) -> None:
    folder = SHIPPED / "demo-dmoe"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20 * 2**20
    with Engine.load("demo-dmoe") as distilled:
        own = held_out(distilled)
    assert own.routing == json.loads((folder / "config.json").read_text())["routing"]
    assert own.lossless and own.routing.startswith("dmoe:")
    assert own.overall.exact_match >= 0.8
    assert own.active_experts <= row.active_experts / 3
