"""Self-distillation: a model learns to answer as it did, with fewer experts.

After dMoE (arXiv 2605.30876): the model answers prompts as it is, and is then trained on its own answers while the
forward routes as it shall from now on. Nothing here trains; it puts a configuration together for `train`.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from relume.checkpoint.copying import replace_file
from relume.checkpoint.folder import open_checkpoint
from relume.checkpoint.hub import resolve_model
from relume.config import require
from relume.core import Progress as ItemProgress
from relume.core import RelumeError
from relume.machine.threads import effective_cores
from relume.model.families import identify
from relume.routing.choice import RoutingChoice
from relume.train.answer_file import ANSWERS_FILE, AnswerCounts
from relume.train.answers import AnswerConfig, write_answers
from relume.train.config import (
    DataSection,
    ModelSection,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    Trained,
)
from relume.train.job import Progress, require_device, train
from relume.train.network import Network
from relume.train.recipe import to_toml
from relume.train.state import STATE_FILE, locked

RECIPE_FILE = "distill.toml"
_WARMUP_SHARE = 0.03  # published
#: Where a recipe has what is an option too.
_IN_RECIPE = {
    "routing": ("model", "routing"),
    "parameters": ("optimizer", "parameters"),
    "kl": ("objective", "kl_weight"),
    "steps": ("run", "steps"),
    "lr": ("optimizer", "lr"),
    "train_batch_size": ("data", "batch_size"),
}


@dataclass(frozen=True)
class DistillConfig:
    """How the model is trained on its answers; the published values are those of 16 billion parameters.

    Attributes:
        routing: that it is trained with and from then on runs with; published `dmoe` with p=0.6 (and 0.5).
        parameters: `all` (published), `experts`, `experts+router` or `router`.
        kl: weight of KL(model as it was || trained) over the masked positions; published 0.
        steps: of the optimiser; published about 350,000.
        lr: peak of AdamW's learning rate, which warms up over 3% of the steps and falls in a cosine to 0;
            published 2e-6.
        train_batch_size: answers in a step, each noised twice; published 4, noised once.
        changes: further values by table, as a recipe of `relume train` has them; they win over the others.
    """

    routing: str = "dmoe:p=0.6"
    parameters: Trained = "all"
    kl: float = 0.0
    steps: int = 1500
    lr: float = 1e-3
    train_batch_size: int = 64
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        RoutingChoice.parse(self.routing)
        OptimizerConfig(parameters=self.parameters, lr=self.lr)
        require(math.isfinite(self.kl) and self.kl >= 0, f"kl is {self.kl}: it must be at least 0")
        require(self.steps >= 1, f"steps is {self.steps}: it must be at least 1")
        require(self.train_batch_size >= 1, f"train_batch_size is {self.train_batch_size}: it must be at least 1")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], changes: Mapping[str, Any]) -> Self:
        """Of values by name, and a recipe's changes.

        Raises:
            RelumeError: a value is no such value, or both give it.
        """
        for name in options:
            table, key = _IN_RECIPE[name]
            require(
                key not in (changes.get(table) or {}),
                f"--{name.replace('_', '-')} and [{table}] {key} of the recipe both give a value: leave one out",
            )
        return cls(**options, changes=changes)

    def recipe(self, model: str, answers: Path, answering: AnswerConfig) -> TrainConfig:
        """The whole training: masked cross-entropy over the answers, padding included, one mask ratio a sample.

        Raises:
            RelumeError: a change that no training knows, or of what it is trained on.
        """
        config = self._published(model, answers, answering)
        values = config.to_dict()
        for table, changed in self.changes.items():
            require(isinstance(changed, Mapping), f"{table} is {changed!r}: give tables, as [optimizer]")
            own = {"model": {"init", "shape"}, "data": {"files", "tasks"}, "run": {"seed", "device", "dtype"}}
            taken = own.get(table, set()) & set(changed)
            require(not taken, f"[{table}] {', '.join(sorted(taken))}: relume distill has options for that")
            values[table] = values.get(table, {}) | dict(changed)
        return TrainConfig.from_mapping(values)

    def _published(self, model: str, answers: Path, answering: AnswerConfig) -> TrainConfig:
        return TrainConfig(
            ModelSection(init=model, routing=self.routing),
            DataSection(files=(str(answers),), batch_size=self.train_batch_size, micro_positions=2048),
            ObjectiveConfig(
                copies=2,
                mask_scope="sample",
                mask_ratio=(0.3, 0.8),
                full_mask_share=0.0,
                wrong_share=0.0,
                wrong_ratio=0.0,
                visible_weight=0.0,
                kl_weight=self.kl,
            ),
            OptimizerConfig(
                parameters=self.parameters,
                lr=self.lr,
                betas=(0.9, 0.999),
                weight_decay=0.01,
                warmup_steps=math.ceil(_WARMUP_SHARE * self.steps),
                final_lr_ratio=0.0,
                clip_norm=1.0,
                ema_decay=0.0,
                balance_rate=0.0,
            ),
            RunConfig(
                steps=self.steps,
                seed=answering.seed,
                device=answering.device,
                dtype=answering.dtype,
                workers=effective_cores(),
            ),
        )


@dataclass(frozen=True)
class DistillReport:
    """What was done.

    Attributes:
        answers: what became of the prompts, at earlier calls included.
        steps: of the optimiser, likewise.
        checkpoint: folder of the model.
        routing: that it names.
        answering_s, training_s: seconds of this call.
    """

    answers: AnswerCounts
    steps: int
    checkpoint: Path
    routing: str
    answering_s: float
    training_s: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "checkpoint": str(self.checkpoint),
            "routing": self.routing,
            "answers": self.answers.to_dict(),
            "steps": self.steps,
            "answering_s": self.answering_s,
            "training_s": self.training_s,
            "wall_s": self.answering_s + self.training_s,
            "kind": "measured",
        }


def distill(
    model: str,
    prompts: Sequence[str],
    out: Path,
    answering: AnswerConfig,
    tuning: DistillConfig,
    *,
    answered: ItemProgress = lambda _done, _total: None,
    trained: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> DistillReport:
    """Answer, train and export; goes on where `out` was left.

    Args:
        model: a folder, a hub id or `demo`.
        prompts: users' messages.
        out: folder of the answers, the recipe, the training and the exported model.
        answering, tuning: how.
        answered: called with (prompts since the last call, prompts in all).
        trained: called every few steps.
        note: called with one line for what a user should know.

    Raises:
        RelumeError: as `write_answers` and `train`, or a routing that the model cannot be trained with.
    """
    answers = out.resolve() / ANSWERS_FILE
    config = tuning.recipe(_init(model), answers, answering)
    require_device(answering.device)
    shape = identify(open_checkpoint(resolve_model(model)))[1]
    Network(shape, {}, torch.float32, RoutingChoice.parse(config.model.routing))  # refuses it before any work
    began = time.monotonic()
    with locked(out):
        size = answers.stat().st_size if answers.exists() else 0
        counts = write_answers(model, prompts, answering, out, answered, note)
        if (out / STATE_FILE).exists() and answers.stat().st_size > size:
            note(f"{out}: the training goes on with more answers than it began with")
        _write(out / RECIPE_FILE, to_toml(config, "Made by relume distill; relume train repeats its training."))
    answered_at = time.monotonic()
    checkpoint = train(config, out, progress=trained, note=note)
    ended = time.monotonic()
    return DistillReport(
        counts, config.run.steps, checkpoint, config.model.routing, answered_at - began, ended - answered_at
    )


def read_changes(path: Path) -> dict[str, Any]:
    """Tables of a TOML file, for `DistillConfig.changes`. Raises `RelumeError` if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise RelumeError(f"{path}: not valid TOML ({error})") from None


def _init(model: str) -> str:
    """The model by a name that holds in any directory."""
    folder = resolve_model(model)
    return str(folder.resolve()) if Path(model).exists() and folder == Path(model) else model


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RelumeError(f"{path}: cannot be written ({error.strerror})") from None
