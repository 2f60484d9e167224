"""Self-distillation: a model learns to answer as it did, with fewer experts.

After dMoE (arXiv 2605.30876): the model answers prompts as it is, and is then trained on its own answers while the
forward routes as it shall from now on. Nothing here trains; it puts a configuration together for `train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.checkpoint.copying import replace_file
from relume.checkpoint.folder import open_checkpoint
from relume.checkpoint.hub import resolve_model
from relume.core import Progress as ItemProgress
from relume.core import RelumeError
from relume.model.families import identify
from relume.train.answer_file import ANSWERS_FILE, AnswerCounts
from relume.train.answers import AnswerConfig, write_answers
from relume.train.distill_config import DistillConfig
from relume.train.job import Progress, check_resumable, require_device, train
from relume.train.network import Network
from relume.train.recipe import to_toml
from relume.train.state import load_state, locked

RECIPE_FILE = "distill.toml"


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
    routing = config.routing(shape)
    Network(shape, {}, torch.float32, routing)  # refuses it before any work
    began = time.monotonic()
    with locked(out):
        state = load_state(out, mapped=True)
        if state is not None:
            check_resumable(out, state, config)
        size = answers.stat().st_size if answers.exists() else 0
        counts = write_answers(model, prompts, answering, out, answered, note)
        if state is not None and answers.stat().st_size > size:
            note(f"{out}: the training began with fewer answers than there are now")
        _write(out / RECIPE_FILE, to_toml(config, "Made by relume distill; relume train repeats its training."))
    answered_at = time.monotonic()
    checkpoint = train(config, out, progress=trained, note=note)
    ended = time.monotonic()
    steps = max(config.run.steps, 0 if state is None else state.step)
    return DistillReport(counts, steps, checkpoint, str(routing), answered_at - began, ended - answered_at)


def _init(model: str) -> str:
    """The model by a name that holds in any directory."""
    folder = resolve_model(model)
    return str(folder.resolve()) if Path(model).exists() and folder == Path(model) else model


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise RelumeError(f"{path}: cannot be written ({error.strerror})") from None
