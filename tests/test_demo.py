"""The model that comes with the package."""

from __future__ import annotations

import importlib.util
import json
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


def test_the_distilled_one_needs_a_third_of_the_experts(row: EvaluationRow) -> None:
    folder = SHIPPED / "demo-dmoe"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20 * 2**20
    with Engine.load("demo-dmoe") as distilled:
        own = held_out(distilled)
    assert own.routing == json.loads((folder / "config.json").read_text())["routing"]
    assert own.lossless and own.routing.startswith("dmoe:")
    assert own.overall.exact_match >= 0.8
    assert own.active_experts <= row.active_experts / 3
