"""Self-distillation: answers that survive a kill, the published objective, and a model that names its routing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import relume.train.answers as answers_module
from relume import Engine, RelumeError
from relume.evaluate.prompts import prompts_to_learn
from relume.tasks import TASKS, split_of
from relume.tasks.jsonl import read_problems
from relume.train.answer_file import AnswerCounts
from relume.train.answers import AnswerConfig, write_answers
from relume.train.codec import Codec
from relume.train.config import ModelSection, TrainConfig
from relume.train.data import DataSource
from relume.train.distill import distill
from relume.train.distill_config import DistillConfig
from relume.train.initial import read_weights
from relume.train.job import train
from relume.train.objective import divergence
from relume.train.starting_point import starting_point
from relume.train.state import load_state
from relume.train.trainer import StepReport, Trainer
from terminal import RELUME
from training import small_config

#: Of the fixture's model: some answers are longer.
ANSWERING = AnswerConfig(max_tokens=2, batch_size=8)
TUNING = DistillConfig(steps=4, train_batch_size=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that answers with a number, mostly a wrong one, and ends."""
    config = small_config(
        data={"tasks": {"compare": 1.0}, "batch_size": 16, "micro_positions": 1536},
        objective={"wrong_share": 0.0, "visible_weight": 0.0},
        optimizer={"lr": 1e-2, "warmup_steps": 5, "name": "muon"},
        run={"steps": 60, "log_steps": 20, "save_seconds": 60.0, "workers": 2},
    )
    return train(config, tmp_path_factory.mktemp("base"))


def prompts(count: int = 40) -> list[str]:
    return prompts_to_learn(None, "compare", count, 0)


def recipe(model: Path, answers: Path, **changes: Any) -> TrainConfig:
    return dataclasses.replace(TUNING, **changes).recipe(str(model), answers, ANSWERING)


@pytest.fixture(scope="module")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers")
    write_answers(str(model), prompts(), ANSWERING, out)
    return out / "answers.jsonl"


def test_prompts_are_of_the_training_side_and_a_longer_list_begins_with_the_shorter() -> None:
    few, many = (prompts_to_learn(None, "compare,date", count, 3) for count in (10, 20))
    assert many[:10] == few and len(set(many)) == 20
    drawn = {task: itertools.islice(TASKS[task].stream(3, "train"), 20) for task in ("compare", "date")}
    keys = {problem.prompt: (task, problem.key) for task, group in drawn.items() for problem in group}
    assert all(split_of(*keys[prompt]) == "train" for prompt in many)


def test_tasks_take_turns_by_their_shares_until_they_have_nothing_new() -> None:
    mixed = prompts_to_learn(None, "compare=3,date", 40, 3)
    dates = set(prompts_to_learn(None, "date", 10, 3))
    assert [sum(prompt in dates for prompt in mixed[: 4 * n]) for n in range(1, 11)] == list(range(1, 11))
    many = prompts_to_learn(None, "date=9,compare", 12_000, 3)
    assert len(set(many)) == 12_000  # all days of the calendar that are asked for are fewer than nine in ten of it
    everything = prompts_to_learn(None, "date", None, 3)  # by default as many as there are, up to 20,000
    with pytest.raises(RelumeError, match=f"--num-prompts 12000: the tasks have {len(everything)} different"):
        prompts_to_learn(None, "date", 12_000, 3)
    for text in ("date=0", "date=", "date=many", "date=inf"):
        with pytest.raises(RelumeError, match=f"--tasks: '{text}': a share is a positive number, as date=2"):
            prompts_to_learn(None, text, 3, 3)


def test_the_answers_are_the_models_own_and_unfinished_ones_are_dropped_and_counted(
    model: Path, answers: Path
) -> None:
    counts = AnswerCounts(**json.loads(answers.with_suffix(".json").read_text())["counts"])
    engine = Engine.load(model, dtype="float32")
    kept, unterminated, empty = [], 0, 0
    for prompt in prompts():
        message = [{"role": "user", "content": prompt}]
        result = engine.generate(messages=message, max_tokens=2, threshold=0.95)
        unterminated += result.finish_reason == "length"
        empty += result.finish_reason == "eos" and not (result.text or "").strip()
        if result.finish_reason == "eos" and (result.text or "").strip():
            kept.append((prompt, result.text, result.token_ids))
    assert counts == AnswerCounts(40, len(kept), unterminated, empty)
    assert kept and unterminated
    assert [(p.prompt, p.answer, p.answer_ids) for p in read_problems(answers)] == kept


def test_a_row_holds_the_prompt_and_the_answer_as_they_were_decoded(model: Path, answers: Path) -> None:
    """The canvas of the request, up to its end of text, and end of text up to the block's end."""
    engine = Engine.load(model, dtype="float32")
    codec = Codec.of(engine.tokenizer, engine.config)
    eos = engine.config.eos_token_ids[0]
    for problem in read_problems(answers)[:5]:
        message = [{"role": "user", "content": problem.prompt}]
        result = engine.generate(messages=message, max_tokens=2, threshold=0.95)
        example = codec.encode(problem)
        num_text = example.num_prompt + len(result.token_ids)
        assert tuple(example.token_ids[:num_text].tolist()) == result.canvas[:num_text]
        assert result.token_ids[-1] == eos and example.token_ids[num_text:].eq(eos).all()
        assert len(example.token_ids) % engine.config.block_length == 0


_CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import relume
from test_distill import ANSWERING, prompts
from relume.train.answers import write_answers
write_answers(sys.argv[2], prompts(400), ANSWERING, Path(sys.argv[3]), lambda *_: time.sleep(0.02))
"""


def test_a_kill_costs_a_batch_at_most_and_the_file_is_that_of_an_uninterrupted_run(
    model: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    out.mkdir()
    write_answers(str(model), prompts(400), ANSWERING, whole)
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(Path(__file__).parent), str(model), str(out)], stderr=subprocess.PIPE
    ) as child:
        deadline = time.monotonic() + 60
        while (out / "answers.jsonl").read_bytes().count(b"\n") < 20 if (out / "answers.jsonl").exists() else True:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
    written = (out / "answers.jsonl").read_bytes()
    saved = json.loads((out / "answers.json").read_text())
    done = saved["counts"]["done"]
    batch_bytes = [
        len(json.dumps({"prompt": p.prompt, "answer": p.answer, "answer_ids": p.answer_ids})) + 1
        for p in read_problems(whole / "answers.jsonl")
    ]
    assert 0 < done < 400
    assert len(written) - saved["num_bytes"] <= 8 * max(batch_bytes)
    with (out / "answers.jsonl").open("ab") as file:
        file.write(b'{"prompt": "Which is lar')  # as if the kill had come in the middle of the next write
    seen: list[tuple[int, int]] = []
    notes: list[str] = []
    write_answers(
        str(model), prompts(400), ANSWERING, out, lambda added, total: seen.append((added, total)), notes.append
    )
    assert seen[0] == (done, 400) and sum(added for added, _ in seen) == 400
    assert len(seen) - 1 == -(-(400 - done) // 8)  # nothing was answered twice
    assert "bytes of an unfinished batch are cut off" in notes[0]
    assert notes[1] == f"{out / 'answers.jsonl'}: continues after {done} of 400 prompts"
    for name in ("answers.jsonl", "answers.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_processes_give_the_answers_that_one_engine_gives(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    for name, cores in (("alone", 1), ("together", 3)):
        monkeypatch.setattr(answers_module, "effective_cores", lambda cores=cores: cores)

        def count(_added: int, _total: int, name: str = name) -> None:
            seen[name] = max(seen.get(name, 0), len(multiprocessing.active_children()))

        (tmp_path / name).mkdir()
        write_answers(str(model), prompts(259), ANSWERING, tmp_path / name, count)
    assert seen == {"alone": 0, "together": 3}
    for file in ("answers.jsonl", "answers.json"):
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "together" / file).read_bytes()


def test_a_process_that_ends_early_is_named_and_nothing_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers_module, "effective_cores", lambda: 2)

    def kill_one(_added: int, _total: int) -> None:
        children = multiprocessing.active_children()
        if children:
            children[0].kill()

    with pytest.raises(RelumeError, match="a process that answers ended early: give it more memory"):
        write_answers(str(model), prompts(280), ANSWERING, tmp_path, kill_one)
    assert not multiprocessing.active_children()
    done = json.loads((tmp_path / "answers.json").read_text())["counts"]["done"]
    assert 0 < done < 280
    assert write_answers(str(model), prompts(280), ANSWERING, tmp_path).done == 280


def test_finished_answers_load_no_model_and_more_prompts_are_added(
    model: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("answers.jsonl", "answers.json"):
        (tmp_path / name).write_bytes((answers.parent / name).read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "read_weights", lambda *_: pytest.fail("weights were read"))
        before = write_answers(str(model), prompts(), ANSWERING, tmp_path)
    after = write_answers(str(model), prompts(48), ANSWERING, tmp_path)
    assert (before.done, after.done) == (40, 48)
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(answers.read_bytes())


def test_a_first_try_that_answered_nothing_binds_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RelumeError, match="exceed the model's context"):
        write_answers(str(model), prompts(8), dataclasses.replace(ANSWERING, max_tokens=5000), tmp_path)
    (tmp_path / "answers.jsonl").write_text('{"prompt": "Which')  # of a batch that was killed
    assert write_answers(str(model), prompts(16), ANSWERING, tmp_path).done == 16
    assert len(read_problems(tmp_path / "answers.jsonl")) > 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"threshold": 0.9}, "another threshold; choose another folder"),
        ({"max_tokens": 4, "dtype": "bfloat16"}, "another max_tokens and dtype"),
        ({"prompts": ["What?"] * 40}, "answers to other prompts"),
        ({"prompts": prompts(8)}, "answers to other prompts"),
        ({"model": "demo"}, "another model"),
        ({"truncate": 10}, r"has 10 of \d+ bytes: part of it is lost"),
        ({"forget": True}, r"exists without answers\.json"),
        ({"damage": "{"}, r"answers\.json: not valid JSON"),
        ({"damage": "{}"}, r"answers\.json: not of this version"),
        ({"damage": '{"of": 5, "counts": {}}'}, r"answers\.json: not of this version"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_line(
    model: Path, answers: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    for name in ("answers.jsonl", "answers.json"):
        (tmp_path / name).write_bytes((answers.parent / name).read_bytes())
    texts, name = changes.pop("prompts", prompts()), changes.pop("model", str(model))
    if size := changes.pop("truncate", None):
        os.truncate(tmp_path / "answers.jsonl", size)
    if changes.pop("forget", False):
        (tmp_path / "answers.json").unlink()
    if damage := changes.pop("damage", None):
        (tmp_path / "answers.json").write_text(damage)
    before = (tmp_path / "answers.jsonl").read_bytes()
    with pytest.raises(RelumeError, match=complaint) as error:
        write_answers(name, texts, dataclasses.replace(ANSWERING, **changes), tmp_path)
    assert "\n" not in str(error.value)
    assert (tmp_path / "answers.jsonl").read_bytes() == before


def test_a_full_disk_keeps_what_was_answered(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_answers(str(model), prompts(8), ANSWERING, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RelumeError, match=r"No space left on device.*before is kept"):
            write_answers(str(model), prompts(16), ANSWERING, tmp_path)
    assert write_answers(str(model), prompts(16), ANSWERING, tmp_path).done == 16


def test_answers_at_a_temperature_are_drawn_by_prompt_and_seed(model: Path, tmp_path: Path) -> None:
    def drawn(name: str, seed: int, batch_size: int) -> list[tuple[int, ...]]:
        (tmp_path / name).mkdir()
        config = AnswerConfig(temperature=1.0, max_tokens=8, seed=seed, batch_size=batch_size)
        write_answers(str(model), ["Which is larger, 31 or 78?"] * 12, config, tmp_path / name)
        return [problem.answer_ids for problem in read_problems(tmp_path / name / "answers.jsonl")]

    first = drawn("a", 0, 4)
    assert len(set(first)) > 1
    assert drawn("b", 0, 6) == first
    assert drawn("c", 1, 4) != first


def test_only_masked_response_tokens_count_and_a_sample_has_one_ratio(model: Path, answers: Path) -> None:
    config = recipe(model, answers)
    objective = config.objective
    assert (objective.mask_scope, objective.mask_ratio, objective.full_mask_share) == ("sample", (0.3, 0.8), 0.0)
    assert (config.optimizer.name, config.optimizer.balance_rate) == ("adamw", 0.0)
    start = starting_point(config.model, 0)
    source = DataSource(config, start.config, Codec.of(start.tokenizer, start.config))
    answer = {tuple(problem.answer_ids) for problem in read_problems(answers)}
    longest = max(map(len, answer))
    for step in range(10):
        for batch in source.step(step).batches:
            counted = batch.loss_weights > 0
            assert torch.equal(counted, batch.masked) and set(batch.loss_weights.unique().tolist()) <= {0.0, 1.0}
            assert bool((batch.copies[counted] > 0).all())
            assert torch.equal(batch.token_ids[~counted], batch.targets[~counted])  # no wrong tokens
            eos = start.config.eos_token_ids[0]
            text = counted & (batch.targets != eos)
            assert int(text.sum(dim=1).max()) <= 2 * longest  # prompts have more tokens that are no end of text
            assert bool((counted & (batch.targets == eos)).any())  # end of text and padding are trained


def test_the_loss_is_the_mean_over_masked_tokens(model: Path, answers: Path) -> None:
    config = recipe(model, answers)
    trainer, source = make_trainer(config)
    data = source.step(0)
    network = trainer._network
    with torch.no_grad():
        total = sum(
            torch.nn.functional.cross_entropy(
                network.forward(batch).logits, batch.targets[batch.masked], reduction="sum"
            )
            for batch in data.batches
        )
    num_masked = sum(int(batch.masked.sum()) for batch in data.batches)
    assert trainer.step(0, data).loss == pytest.approx(float(total) / num_masked, rel=1e-5)


def make_trainer(config: TrainConfig) -> tuple[Trainer, DataSource]:
    start = starting_point(config.model, config.run.seed)
    source = DataSource(config, start.config, Codec.of(start.tokenizer, start.config))
    return Trainer(config, start.config, start.weights, len(source.names)), source


def first_step(config: TrainConfig) -> StepReport:
    trainer, source = make_trainer(config)
    return trainer.step(0, source.step(0))


def test_kl_is_zero_until_student_and_teacher_differ(model: Path, answers: Path) -> None:
    same = recipe(model, answers, kl=1.0, routing="native")
    report = first_step(same)
    plain = first_step(recipe(model, answers, routing="native"))
    assert report.kl == 0.0 and report.loss == pytest.approx(plain.loss, rel=1e-6)
    routed = first_step(recipe(model, answers, kl=1.0))
    without = first_step(recipe(model, answers))
    assert routed.kl > 0.0 and without.kl == 0.0
    assert routed.loss == pytest.approx(without.loss + routed.kl, rel=1e-5)
    assert routed.grad_norm != pytest.approx(without.grad_norm, rel=1e-4)
    trainer, source = make_trainer(same)
    reports = [trainer.step(step, source.step(step)) for step in range(2)]
    assert reports[0].kl == 0.0 < reports[1].kl  # the teacher keeps its weights


def test_divergence_against_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 7, generator=generator) for _ in range(2))
    expected = (p.softmax(-1) * (p.softmax(-1).log() - q.softmax(-1).log())).sum(-1)
    torch.testing.assert_close(divergence(p, q), expected)
    assert not divergence(p, p).any()
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(divergence(p, q).sum(), q)
    torch.testing.assert_close(gradient, (q.softmax(-1) - p.softmax(-1)).detach())


def test_experts_and_router_are_trained_alone(model: Path, answers: Path, tmp_path: Path) -> None:
    config = recipe(model, answers, parameters="experts+router")
    start = starting_point(config.model, 0).weights
    train(config, tmp_path)
    state = load_state(tmp_path)
    assert state is not None
    changed = {n.rsplit(".", 1)[-1] for n, weight in start.items() if not torch.equal(weight, state.weights[n])}
    assert changed == {"expert_gate_up", "expert_down", "router"}


def test_a_distillation_is_the_same_again_from_its_recipe_and_after_a_stop(model: Path, tmp_path: Path) -> None:
    tuning = dataclasses.replace(TUNING, kl=0.5)
    report = distill(str(model), prompts(), tmp_path / "a", ANSWERING, tuning)
    assert report.checkpoint == tmp_path / "a" / "checkpoint"
    config = TrainConfig.from_file(tmp_path / "a" / "distill.toml")
    assert config == tuning.recipe(str(model), tmp_path / "a" / "answers.jsonl", ANSWERING)
    train(config, tmp_path / "b", stop_after=2)
    state = load_state(tmp_path / "b")
    assert state is not None and state.weights.keys() == read_weights(model)[3].keys()  # no teacher in it
    train(config, tmp_path / "b")
    files = [tmp_path / name / "checkpoint" / "model-00001-of-00001.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
    other_seed = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=1))
    train(other_seed, tmp_path / "c")
    base, changed = (read_weights(tmp_path / name / "checkpoint")[3] for name in ("a", "c"))
    assert any(not torch.equal(base[name], changed[name]) for name in base)
    again = distill(str(model), prompts(), tmp_path / "a", ANSWERING, tuning)
    assert again.answers == report.answers and files[0].read_bytes() == files[1].read_bytes()


def test_what_a_folder_was_trained_with_stays(model: Path, tmp_path: Path) -> None:
    distill(str(model), prompts(), tmp_path, ANSWERING, TUNING)
    recipe_bytes = (tmp_path / "distill.toml").read_bytes()
    with pytest.raises(RelumeError, match=r"a training with another model\.routing; choose another folder"):
        distill(str(model), prompts(), tmp_path, ANSWERING, dataclasses.replace(TUNING, routing="dmoe:p=0.3"))
    assert (tmp_path / "distill.toml").read_bytes() == recipe_bytes
    notes: list[str] = []
    fewer_steps = dataclasses.replace(TUNING, steps=2)
    report = distill(str(model), prompts(48), tmp_path, ANSWERING, fewer_steps, note=notes.append)
    assert (report.steps, report.answers.done) == (4, 48)
    assert any("began with fewer answers than there are now" in line for line in notes)
    assert any("all 4 steps are done: give more" in line for line in notes)


def test_a_model_can_be_trained_with_its_own_routing(model: Path, tmp_path: Path) -> None:
    tuning = DistillConfig(steps=1, train_batch_size=4, changes={"model": {"routing": ""}})
    assert distill(str(model), prompts(8), tmp_path, ANSWERING, tuning).routing == "native"


def test_the_export_names_its_routing(model: Path, answers: Path, tmp_path: Path) -> None:
    folder = train(recipe(model, answers, routing="dmoe:p=0.5"), tmp_path / "tuned")
    values = json.loads((folder / "config.json").read_text())
    assert (values["routing"], values["core_threshold"]) == ("dmoe:p=0.5", 0.5)
    kept = dataclasses.replace(recipe(folder, answers, steps=1), model=ModelSection(init=str(folder)))
    assert json.loads((train(kept, tmp_path / "kept") / "config.json").read_text())["routing"] == "dmoe:p=0.5"
    native = train(recipe(folder, answers, routing="native", steps=1), tmp_path / "native")
    assert not {"routing", "core_threshold"} & json.loads((native / "config.json").read_text()).keys()
    assert str(Engine.load(folder).routing) == "dmoe:p=0.5"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RELUME), "distill", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_the_command_ends_with_one_document(model: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"question": prompt, "answer": 1}) for prompt in prompts(8)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    options = ("--prompts", tmp_path / "mine.jsonl", "--max-tokens", 2, "--steps", 2, "--train-batch-size", 4)
    done = run(model, "--out", tmp_path / "out", *options, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document) == {
        "checkpoint", "routing", "answers", "steps", "answering_s", "training_s", "wall_s", "kind",
    }  # fmt: skip
    assert document["answers"]["done"] == 8 and document["steps"] == 2 and document["kind"] == "measured"
    assert tomllib.loads((tmp_path / "out" / "distill.toml").read_text())["run"]["steps"] == 2
    refused = run(model, "--out", tmp_path / "out", *options, "--threshold", 0.5)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert "another threshold" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--routing", "magic"], 2, "unknown routing 'magic'"),
        (["--tasks", "juggling"], 2, "unknown task 'juggling'"),
        (["--tasks", "compare", "--prompts", "x.jsonl"], 2, "not both"),
        (["--prompts", "nowhere.jsonl"], 2, "nowhere.jsonl: cannot be read"),
        (["--kl", "-1"], 2, "kl is -1"),
        (["--steps", "0"], 2, "steps is 0"),
        (["--recipe", "RECIPE"], 2, "run is 5: give tables, as [optimizer]"),
        (["--parameters", "attention"], 2, "attention"),
        (["--max-tokens", "400", "--num-prompts", "2"], 1, "exceed the model's context of 256"),
        (["--routing", "dmoe:block=5", "--num-prompts", "2"], 1, "no whole windows"),
        (["--device", "cuda:77", "--num-prompts", "2"], 1, "cuda:77"),
    ],
)
def test_mistakes_are_told_in_a_line(
    model: Path, tmp_path: Path, arguments: list[str], code: int, complaint: str
) -> None:
    (tmp_path / "recipe.toml").write_text("run = 5")
    chosen = [str(tmp_path / "recipe.toml") if text == "RECIPE" else text for text in arguments]
    done = run(model, "--out", tmp_path / "out", *chosen)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    text = " ".join(done.stderr.replace("│", " ").split())
    assert complaint in text
    if code == 1:
        assert done.stderr.count("\n") == 1
    assert (
        not (tmp_path / "out" / "answers.jsonl").exists() or not (tmp_path / "out" / "answers.jsonl").read_text()
    )


def test_a_recipe_changes_what_no_option_gives() -> None:
    changes = {"optimizer": {"name": "muon"}, "run": {"steps": 7}, "model": {"routing": "dmoe:p=0.4"}}
    config = DistillConfig.from_options({"kl": 0.5}, changes).recipe("demo", Path("answers.jsonl"), ANSWERING)
    assert (config.optimizer.name, config.run.steps, config.model.routing) == ("muon", 7, "dmoe:p=0.4")
    assert config.objective.kl_weight == 0.5 and config.objective.mask_ratio == (0.3, 0.8)
    assert (
        config.optimizer.warmup_steps == 1
        and DistillConfig(changes={"optimizer": {"warmup_steps": 9}})
        .recipe("demo", Path("answers.jsonl"), ANSWERING)
        .optimizer.warmup_steps
        == 9
    )
    with pytest.raises(RelumeError, match=r"--steps and \[run\] steps of the recipe both give a value"):
        DistillConfig.from_options({"steps": 3}, changes)
    with pytest.raises(RelumeError, match=r"\[run\] seed: relume distill has options for that"):
        DistillConfig(changes={"run": {"seed": 3}}).recipe("demo", Path("answers.jsonl"), ANSWERING)
    with pytest.raises(RelumeError, match="unknown table"):
        DistillConfig(changes={"optimiser": {}}).recipe("demo", Path("answers.jsonl"), ANSWERING)
