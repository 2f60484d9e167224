"""The configuration of a training: frozen sections of one TOML file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from relume.config import ModelConfig, require, require_choice
from relume.core import RelumeError
from relume.routing.choice import RoutingChoice
from relume.train.sections import build_section, is_number, read_toml, require_at_least

MaskScope = Literal["block", "sample"]
Trained = Literal["all", "experts", "experts+router", "router"]
ComputeDType = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class ModelSection:
    """What is trained.

    Attributes:
        init: a checkpoint folder to start from; empty starts from random weights.
        shape: keys of the official config.json for random weights; the byte tokenizer adds vocabulary and
            token ids.
        routing: how the forward chooses experts, as `RoutingChoice.parse` reads it: `native`, `dmoe:p=0.6`, ...;
            empty for the model's own. The exported config.json names it: the model is run as it was trained.
    """

    init: str = ""
    shape: Mapping[str, Any] = field(default_factory=dict)
    routing: str = ""

    def __post_init__(self) -> None:
        if self.routing:
            try:
                object.__setattr__(self, "routing", str(RoutingChoice.parse(self.routing)))
            except RelumeError as error:
                raise RelumeError(f"[model] routing: {error}") from None
        require(bool(self.init) != bool(self.shape), "[model] needs either init or a table [model.shape]")


@dataclass(frozen=True)
class DataSection:
    """What it is trained on.

    Attributes:
        tasks: share of each generated task, by name; the shares need not add up to 1.
        files: JSONL files of prompts and answers, and `file_share` their share against all tasks together.
        batch_size: problems in an optimiser step.
        micro_positions: positions (clean and noisy) in one forward; a step takes several, of like lengths.
        max_positions: of a row; another problem is drawn instead of a longer one.
    """

    tasks: Mapping[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    file_share: float = 1.0
    batch_size: int = 64
    micro_positions: int = 4096
    max_positions: int = 4096

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(self.files))
        require(
            all(isinstance(file, str) for file in self.files), f"[data] files is {self.files}: paths are needed"
        )
        require(bool(self.tasks or self.files), "[data] names neither tasks nor files")
        for name, share in self.tasks.items():
            require(
                is_number(share) and share > 0, f"[data.tasks] {name} is {share!r}: a positive number is needed"
            )
        require(self.file_share > 0, f"[data] file_share is {self.file_share}: it must be positive")
        require_at_least("data", self, batch_size=1, micro_positions=1, max_positions=1)


@dataclass(frozen=True)
class ObjectiveConfig:
    """How text is noised.

    Attributes:
        copies: noisy copies of an answer that share one clean copy.
        mask_scope: draw one mask ratio a block or one a sample.
        mask_ratio: its bounds, drawn evenly between them.
        full_mask_share: share of the draws that are 1 instead: how a block's decoding begins.
        weight_by_ratio: divide the loss of a masked token by its mask ratio (1/t).
        wrong_share: share of the blocks in which visible tokens may be wrong, for editing decoders.
        wrong_ratio: the largest share of such a block's visible tokens that is wrong.
        visible_weight: loss weight of visible tokens that are right; wrong and masked ones have 1.
        substitutes: wrong tokens are drawn from this range of ids (from, to before), or from the answer itself.
        kl_weight: of KL(start || trained) over the masked tokens' distributions at temperature 1, added to the
            loss; the start is the model of [model] init as it was, with its own routing. 0 leaves it out.
    """

    copies: int = 1
    mask_scope: MaskScope = "block"
    mask_ratio: tuple[float, float] = (0.1, 1.0)
    full_mask_share: float = 0.2
    weight_by_ratio: bool = False
    wrong_share: float = 0.2
    wrong_ratio: float = 0.2
    visible_weight: float = 0.1
    substitutes: tuple[int, int] = (32, 127)
    kl_weight: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_ratio", tuple(self.mask_ratio))
        object.__setattr__(self, "substitutes", tuple(self.substitutes))
        require_choice("[objective] mask_scope", self.mask_scope, get_args(MaskScope))
        require_at_least("objective", self, copies=1, kl_weight=0)
        require(
            len(self.mask_ratio) == 2 and 0 < self.mask_ratio[0] <= self.mask_ratio[1] <= 1,
            f"[objective] mask_ratio is {list(self.mask_ratio)}: two numbers a <= b within 0..1 are needed",
        )
        require(
            len(self.substitutes) == 2 and 0 <= self.substitutes[0] < self.substitutes[1],
            f"[objective] substitutes is {list(self.substitutes)}: two token ids a < b are needed",
        )
        for name in ("full_mask_share", "wrong_share", "wrong_ratio", "visible_weight"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"[objective] {name} is {value}: it must lie in 0..1")


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights change.

    Attributes:
        name: `adamw`, or `muon` for the matrices between embeddings and head and adamw for the rest.
        parameters: train `all` weights, the `experts` only, the `router` only or both (`experts+router`).
        lr: peak learning rate, reached after `warmup_steps` and followed by a cosine to `final_lr_ratio` of it.
        muon_lr: the same for the matrices that muon trains.
        weight_decay: of matrices; vectors never decay.
        clip_norm: the gradient's largest norm; 0 does not clip.
        ema_decay: of the averaged weights that are exported; 0 exports the weights themselves. The average
            begins at the initial weights, of which `ema_decay ** steps` is left at the end.
        balance_rate: step of the expert bias against each expert's load error; 0 leaves the bias alone, and so
            does a training in which routers do not learn.
    """

    name: OptimizerName = "adamw"
    parameters: Trained = "all"
    lr: float = 1e-3
    muon_lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup_steps: int = 100
    final_lr_ratio: float = 0.05
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    balance_rate: float = 1e-3

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        require_choice("[optimizer] name", self.name, get_args(OptimizerName))
        require_choice("[optimizer] parameters", self.parameters, get_args(Trained))
        require_at_least(
            "optimizer", self, lr=0, muon_lr=0, weight_decay=0, warmup_steps=0, clip_norm=0, balance_rate=0
        )
        for name in ("lr", "muon_lr", "weight_decay", "clip_norm", "balance_rate"):
            require(math.isfinite(getattr(self, name)), f"[optimizer] {name} must be finite")
        require(
            0 <= self.final_lr_ratio <= 1,
            f"[optimizer] final_lr_ratio is {self.final_lr_ratio}: it must lie in 0..1",
        )
        for value in (*self.betas, self.ema_decay):
            require(0 <= value < 1, f"[optimizer] betas and ema_decay must lie in 0..1 (1 excluded), not {value}")


@dataclass(frozen=True)
class RunConfig:
    """How long and where.

    Attributes:
        steps: optimiser steps; also the length of the learning-rate schedule.
        seed: of weights, data and noise.
        device, dtype: where and in what type the forward computes; weights stay float32.
        workers: on a CPU, forwards of one step that run side by side, on one core each. The result does not
            depend on it: gradients are added in a fixed order.
        save_seconds: time between two saved states.
        log_steps: steps between two lines of metrics.
    """

    steps: int = 1000
    seed: int = 0
    device: str = "cpu"
    dtype: ComputeDType = "float32"
    workers: int = 1
    save_seconds: float = 120.0
    log_steps: int = 20

    def __post_init__(self) -> None:
        require_choice("[run] dtype", self.dtype, get_args(ComputeDType))
        require_at_least("run", self, steps=1, seed=0, workers=1, save_seconds=0, log_steps=1)


@dataclass(frozen=True)
class TrainConfig:
    """All sections; each is a table of the file."""

    model: ModelSection
    data: DataSection
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require(
            not self.objective.kl_weight or bool(self.model.init),
            "[objective] kl_weight compares with the model that training starts from: [model] init must name one",
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from the tables of a file. Raises `RelumeError` that lists the known keys for an unknown one."""
        sections = {
            "model": ModelSection,
            "data": DataSection,
            "objective": ObjectiveConfig,
            "optimizer": OptimizerConfig,
            "run": RunConfig,
        }
        for name in values:
            require(name in sections, f"unknown table [{name}]: known are {', '.join(sections)}")
        for name in ("model", "data"):
            require(name in values, f"the table [{name}] is missing")
        return cls(**{name: build_section(name, kind, values.get(name, {})) for name, kind in sections.items()})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a TOML file. Raises `RelumeError` that names it and what is wrong."""
        values = read_toml(path)
        try:
            return cls.from_mapping(values)
        except RelumeError as error:
            raise RelumeError(f"{path}: {error}") from None

    def routing(self, model: ModelConfig) -> RoutingChoice:
        """That a model is trained with."""
        return RoutingChoice.parse(self.model.routing or model.routing)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for a state file."""
        return dataclasses.asdict(self)
