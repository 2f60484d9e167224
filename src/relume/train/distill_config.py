"""How a model is trained on its own answers, as a configuration of `train`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from relume.config import require
from relume.machine.threads import effective_cores
from relume.routing.choice import RoutingChoice
from relume.train.answers import AnswerConfig
from relume.train.config import (
    DataSection,
    ModelSection,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    Trained,
)
from relume.train.sections import read_toml

_WARMUP_SHARE = 0.03  # published
_ANY = 2**31  # positions: no answer that was kept is too long to be learnt
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
                key not in changes.get(table, {}),
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
            own = {"model": {"init", "shape"}, "data": {"files", "tasks"}, "run": {"seed", "device", "dtype"}}
            taken = own.get(table, set()) & set(changed)
            require(not taken, f"[{table}] {', '.join(sorted(taken))}: relume distill has options for that")
            values[table] = values.get(table, {}) | dict(changed)
        found = TrainConfig.from_mapping(values)
        if "warmup_steps" in self.changes.get("optimizer", {}):
            return found
        warmup_steps = math.ceil(_WARMUP_SHARE * found.run.steps)
        return dataclasses.replace(
            found, optimizer=dataclasses.replace(found.optimizer, warmup_steps=warmup_steps)
        )

    def _published(self, model: str, answers: Path, answering: AnswerConfig) -> TrainConfig:
        return TrainConfig(
            ModelSection(init=model, routing=self.routing),
            DataSection(
                files=(str(answers),), batch_size=self.train_batch_size, micro_positions=2048, max_positions=_ANY
            ),
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


def read_changes(path: Path) -> dict[str, Any]:
    """Tables of a TOML file, for `DistillConfig.changes`; anything else in it raises `RelumeError`."""
    values = read_toml(path)
    for table, changed in values.items():
        require(isinstance(changed, Mapping), f"{path}: {table} is {changed!r}: give tables, as [optimizer]")
    return values
