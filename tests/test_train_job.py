"""Whole trainings: learning, resuming exactly, surviving a kill, stopping on a bad loss."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relume import Engine
from relume.core import RelumeError
from relume.train.codec import Codec
from relume.train.config import TrainConfig
from relume.train.data import DataSource
from relume.train.job import Progress, train
from relume.train.starting_point import starting_point
from relume.train.state import load_state, locked, save_state
from relume.train.trainer import Trainer
from terminal import run
from training import SHAPE, small_config


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(out)]


def stored_weights(out: Path) -> dict[str, torch.Tensor]:
    state = load_state(out)
    assert state is not None
    return dict(state.weights) | {f"averaged.{name}": weight for name, weight in state.averaged.items()}


def assert_same_weights(left: Path, right: Path) -> None:
    mine, theirs = stored_weights(left), stored_weights(right)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    config = small_config(optimizer={"name": name})
    train(config, tmp_path / "whole")
    notes: list[str] = []
    train(config, tmp_path / "parts", stop_after=5, note=notes.append)
    assert notes == []
    train(config, tmp_path / "parts", note=notes.append)
    assert notes == [f"{tmp_path / 'parts'}: continues after step 5"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert [line["step"] for line in metrics(tmp_path / "whole")] == list(range(1, 13))
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_workers_do_not_change_the_result(tmp_path: Path) -> None:
    for workers in (1, 2):
        train(small_config(run={"workers": workers, "steps": 3}), tmp_path / str(workers))
    assert losses(tmp_path / "1") == losses(tmp_path / "2")
    assert_same_weights(tmp_path / "1", tmp_path / "2")


def test_few_forwards_of_a_step_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds gradients of all weights, and accumulation is there to need them once."""
    config = small_config(data={"batch_size": 32, "micro_positions": 192}, run={"workers": 2})
    start = starting_point(config.model, 0)
    source = DataSource(config, start.config, Codec.of(start.tokenizer, start.config))
    trainer = Trainer(config, start.config, start.weights, len(source.names))
    begun: list[Any] = []

    def begin(_: Trainer, batch: Any, *__: Any) -> Any:
        begun.append(batch)
        return batch

    monkeypatch.setattr(Trainer, "_part", begin)
    data = source.step(0)
    assert len(data.batches) > 8
    parts: Iterator[Any] = trainer._parts(data)
    for taken, part in enumerate(parts):
        assert part is data.batches[taken]  # in order
        assert len(begun) <= taken + 1 + trainer._workers
    assert len(begun) == len(data.batches)
    trainer.close()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_values_that_change_on_a_resume_count(tmp_path: Path, name: str) -> None:
    first = small_config(optimizer={"name": name})
    other = {"name": name, "weight_decay": 0.5, "betas": [0.5, 0.5]}
    for folder in ("same", "other"):
        train(first, tmp_path / folder, stop_after=4)
    train(first, tmp_path / "same", stop_after=5)
    train(small_config(optimizer=other), tmp_path / "other", stop_after=5)
    same, changed = stored_weights(tmp_path / "same"), stored_weights(tmp_path / "other")
    assert not torch.equal(same["embeddings"], changed["embeddings"])
    state = load_state(tmp_path / "other")
    assert state is not None
    groups = state.optimizer["adamw"]["param_groups"]
    assert [(group["weight_decay"], tuple(group["betas"])) for group in groups] == [
        (0.5, (0.5, 0.5)),
        (0.0, (0.5, 0.5)),
    ]


def test_bfloat16_forwards_train_float32_weights(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        train(small_config(run={"dtype": dtype, "steps": 8}), tmp_path / dtype)
    lines, exact = metrics(tmp_path / "bfloat16"), metrics(tmp_path / "float32")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[0]["loss"] != exact[0]["loss"] and lines[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.05)
    assert all(weight.dtype == torch.float32 for weight in stored_weights(tmp_path / "bfloat16").values())


def test_the_command_trains_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Two and two?", "answer": "4"}\n' * 3)
    shape = "\n".join(f"{key} = {value}" for key, value in SHAPE.items())
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[model.shape]\n{shape}\n[data]\nfiles = ['{tmp_path / 'mine.jsonl'}']\n[run]\nsteps = 3\n")
    done = run("train", recipe, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out" / "checkpoint")
    assert [line["step"] for line in metrics(tmp_path / "out")] == [3]
    recipe.write_text(recipe.read_text() + "stepz = 4\n")
    for path, complaint in ((recipe, "[run] unknown key 'stepz'"), (tmp_path / "none.toml", "none.toml")):
        done = run("train", path, tmp_path / "out")
        assert done.returncode == 1 and complaint in done.stderr and "Traceback" not in done.stderr
        assert not done.stdout


_CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import relume
from training import small_config
from relume.train.job import train
train(small_config(run={"steps": 10_000}), Path(sys.argv[2]))
"""


def test_a_kill_keeps_a_good_state_and_the_run_goes_on_exactly(tmp_path: Path) -> None:
    out, tests = tmp_path / "killed", str(Path(__file__).parent)
    command = [sys.executable, "-c", _CHILD, tests, str(out)]
    reached = 0
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as child:
            deadline = time.monotonic() + 60
            while len(losses(out) if (out / "metrics.jsonl").exists() else []) < reached + 4:
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(child.pid, signal.SIGKILL)
        state = load_state(out)  # every step is saved: at most the one under way is lost
        lines = (out / "metrics.jsonl").read_text().count("\n")
        assert state is not None and state.step >= lines - 1 >= reached + 3
        reached = state.step
    steps = reached + 2
    train(small_config(run={"steps": 10_000}), out, stop_after=steps)
    assert not list(out.glob("*partial*"))
    train(small_config(run={"steps": 10_000}), tmp_path / "whole", stop_after=steps)
    assert losses(out) == losses(tmp_path / "whole")
    assert_same_weights(out, tmp_path / "whole")


def test_a_failed_save_keeps_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    train(config, tmp_path, stop_after=3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RelumeError, match=r"No space left on device.*the state before it was kept"):
            train(config, tmp_path, stop_after=6)
    state = load_state(tmp_path)
    assert state is not None and state.step == 3
    assert not list(tmp_path.glob("*partial*"))


def test_a_folder_takes_one_training_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RelumeError, match="another process trains there"):
        train(small_config(), tmp_path)
    train(small_config(), tmp_path, stop_after=1)


@pytest.mark.parametrize("content", [b"PK\x03\x04 no state", b""])
def test_a_damaged_state_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(RelumeError, match=r"state\.pt: cannot be read .*remove it to start anew"):
        train(small_config(), tmp_path)


def test_another_model_is_refused_and_other_values_are_announced(tmp_path: Path) -> None:
    train(small_config(), tmp_path, stop_after=1)
    other = {"shape": {**small_config().model.shape, "intermediate_size": 128}}
    with pytest.raises(RelumeError, match="another model"):
        train(small_config(model=other), tmp_path)
    notes: list[str] = []
    train(small_config(optimizer={"lr": 1e-4}), tmp_path, stop_after=2, note=notes.append)
    assert "other values of optimizer.lr" in notes[0]
    with pytest.raises(RelumeError, match=r"another optimizer\.name; choose another folder"):
        train(small_config(optimizer={"name": "muon"}), tmp_path)


def test_a_state_from_before_a_value_was_known_goes_on(tmp_path: Path) -> None:
    train(small_config(), tmp_path, stop_after=1)
    state = load_state(tmp_path)
    assert state is not None
    config = {name: dict(values) for name, values in state.config.items()}
    del config["model"]["routing"], config["objective"]["kl_weight"]
    save_state(tmp_path, dataclasses.replace(state, config=config))
    notes: list[str] = []
    train(small_config(), tmp_path, stop_after=2, note=notes.append)
    assert notes == [f"{tmp_path}: continues after step 1"]


def test_a_loss_that_is_not_finite_stops_with_the_step_and_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step = Trainer.step

    def poisoned(self: Trainer, step: int, data: Any) -> Any:
        if step == 4:
            with torch.no_grad():
                self.weights["final_norm"][0] = float("nan")
        return real_step(self, step, data)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(RelumeError, match=r"step 4: the loss is nan.*last saved state is kept"):
        train(small_config(), tmp_path)
    state = load_state(tmp_path)
    assert state is not None and state.step == 4
    assert all(bool(weight.isfinite().all()) for weight in state.weights.values())
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize(
    ("parameters", "roles"), [("experts", {"expert_gate_up", "expert_down"}), ("router", {"router"})]
)
def test_only_the_chosen_weights_of_a_checkpoint_change(tmp_path: Path, parameters: str, roles: set[str]) -> None:
    train(small_config(), tmp_path / "base", stop_after=2)
    tuned = TrainConfig.from_mapping(
        {
            "model": {"init": str(tmp_path / "base" / "checkpoint")},
            "data": {"tasks": {"reverse_word": 1.0}, "batch_size": 8},
            "optimizer": {"parameters": parameters, "balance_rate": 1e-3 if parameters == "experts" else 0},
            "run": {"steps": 2},
        }
    )
    start = starting_point(tuned.model, 0).weights
    exported = train(tuned, tmp_path / "tuned")
    after = stored_weights(tmp_path / "tuned")
    changed = {name.rsplit(".", 1)[-1] for name in start if not torch.equal(start[name], after[name])}
    assert changed == roles
    assert Engine.load(exported).tokenizer.has_chat_template


def test_a_short_training_learns_and_the_export_answers(tmp_path: Path) -> None:
    config = small_config(
        data={"tasks": {"compare": 1.0}, "batch_size": 32, "micro_positions": 1536},
        objective={"wrong_share": 0.0, "visible_weight": 0.0},
        optimizer={"lr": 1e-2, "warmup_steps": 10, "name": "muon"},
        run={"steps": 120, "log_steps": 20, "save_seconds": 60.0, "workers": 2},
    )
    reports: list[Progress] = []
    exported = train(config, tmp_path, progress=reports.append)
    lines = metrics(tmp_path)
    assert [report.step for report in reports] == [line["step"] for line in lines] == list(range(20, 121, 20))
    assert lines[0]["loss"] > 1.5
    assert lines[-1]["loss"] < 0.75
    assert lines[-1]["masked_accuracy"] > 0.7 and lines[-1]["tokens_per_s"] > 0
    assert min(lines[-1]["least_load"]) > 0.2
    assert "step 120/120" in str(reports[-1]) and "0 min 00 s left" in str(reports[-1])
    engine = Engine.load(exported)
    result = engine.generate(messages=[{"role": "user", "content": "Which is larger, 31 or 78?"}], max_tokens=16)
    assert result.finish_reason == "eos"


def test_time_is_up(tmp_path: Path) -> None:
    train(small_config(run={"log_steps": 20}), tmp_path, max_seconds=0.0)
    assert [line["step"] for line in metrics(tmp_path)] == [1]
    state = load_state(tmp_path)
    assert state is not None and state.step == 1 and (tmp_path / "checkpoint").is_dir()
