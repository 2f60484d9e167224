"""The configuration refuses what it does not know, and the shipped recipe fits its promises."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from relume.core import RelumeError
from relume.tasks import TASKS
from relume.train.config import OptimizerConfig, RunConfig, TrainConfig
from relume.train.job import train
from relume.train.optim import learning_rate_scale
from relume.train.starting_point import starting_point
from training import SHAPE, small_config

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"run": {"step": 3}}, r"\[run\] unknown key 'step': known are steps, seed"),
        ({"run": {"steps": 0}}, "steps is 0"),
        ({"run": {"steps": "many"}}, r"\[run\] steps is 'many': an integer is needed"),
        ({"run": {"steps": 1.5}}, r"\[run\] steps is 1.5: an integer is needed"),
        ({"run": {"dtype": "float16"}}, "float32, bfloat16"),
        ({"objective": {"mask_scope": "token"}}, "block, sample"),
        ({"objective": {"mask_ratio": [0.8, 0.3]}}, "mask_ratio"),
        ({"objective": {"mask_ratio": 0.5}}, "a list is needed"),
        ({"objective": {"mask_ratio": ["a", 1.0]}}, "a list is needed"),
        ({"objective": {"weight_by_ratio": 1}}, "true or false is needed"),
        ({"data": {"files": [1]}}, "a list is needed"),
        ({"objective": {"wrong_share": 2.0}}, "wrong_share is 2.0"),
        ({"optimizer": {"name": "sgd"}}, "adamw, muon"),
        ({"optimizer": {"parameters": "attention"}}, r"all, experts, experts\+router, router"),
        ({"data": {"tasks": ["compare"]}}, r"\[data\] tasks is \['compare'\]: a table \[data.tasks\] is needed"),
        ({"model": {"shape": 3}}, r"\[model\] shape is 3: a table \[model.shape\] is needed"),
        ({"optimizer": {"final_lr_ratio": -1.0}}, r"final_lr_ratio is -1.0: it must lie in 0..1"),
        ({"optimizer": {"final_lr_ratio": math.nan}}, "it must lie in 0..1"),
        ({"optimizer": {"lr": math.inf}}, "lr must be finite"),
        ({"data": {"tasks": {}}}, "neither tasks nor files"),
        ({"data": {"tasks": {"compare": 0}}}, "compare is 0"),
        ({"model": {"init": "somewhere"}}, "either init or a table"),
    ],
)
def test_wrong_values_are_refused(sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RelumeError, match=complaint):
        small_config(**sections)


def test_unknown_tables_and_missing_ones_are_refused() -> None:
    with pytest.raises(RelumeError, match=r"unknown table \[optimiser\]: known are model, data"):
        TrainConfig.from_mapping({"optimiser": {}})
    with pytest.raises(RelumeError, match=r"\[data\] is missing"):
        TrainConfig.from_mapping({"model": {"shape": SHAPE}})


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    with pytest.raises(RelumeError, match=r"recipe.toml: cannot be read"):
        TrainConfig.from_file(path)
    path.write_text("[run\n")
    with pytest.raises(RelumeError, match=r"recipe.toml: not valid TOML"):
        TrainConfig.from_file(path)
    path.write_text("[run]\nstep = 1\n")
    with pytest.raises(RelumeError, match=r"recipe.toml: "):
        TrainConfig.from_file(path)


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"model": {"shape": {**SHAPE, "hiden_size": 3}}}, "unknown key 'hiden_size': known are hidden_size"),
        ({"model": {"shape": {**SHAPE, "num_experts_per_tok": 9}}}, "num_experts_per_tok"),
        ({"model": {"shape": {**SHAPE, "moe_intermediate_size": 12}}}, "multiple of 8"),
        ({"model": {"shape": {**SHAPE, "first_k_dense_replace": 3}}}, "all 3 layers are dense"),
        ({"data": {"tasks": {"spelling": 1.0}}}, "unknown task 'spelling'"),
        ({"data": {"files": ["nowhere.jsonl"]}}, "nowhere.jsonl: cannot be read"),
        ({"objective": {"substitutes": [0, 4000]}}, "beyond the vocabulary"),
        ({"run": {"device": "cuda:77"}}, "cuda:77"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_training(
    tmp_path: Path, sections: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RelumeError, match=complaint):
        train(small_config(**sections), tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_the_recipe_is_a_small_llada2_over_all_tasks() -> None:
    config = TrainConfig.from_file(RECIPE)
    start = starting_point(config.model, seed=0)
    assert set(config.data.tasks) == set(TASKS)
    assert 2 * sum(weight.numel() for weight in start.weights.values()) < 20e6
    model = start.config
    assert model.num_layers >= 6 and model.num_dense_layers == 1 and model.shared_size
    assert model.router.num_experts >= 64 and model.router.top_k >= 4 and model.router.num_groups > 1
    assert model.block_length in {16, 32}


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    optimizer, run = OptimizerConfig(warmup_steps=10, final_lr_ratio=0.1), RunConfig(steps=110)
    scales = [learning_rate_scale(step, optimizer, run) for step in range(111)]
    assert scales[0] == 0.1 and scales[9] == scales[10] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(scales[10:]))
    assert math.isclose(scales[60], 0.55) and math.isclose(scales[110], 0.1)
