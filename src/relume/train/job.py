"""A whole training: start or resume, step, report, save, export."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.config import require
from relume.core import RelumeError
from relume.train.codec import Codec
from relume.train.config import TrainConfig
from relume.train.data import DataSource, StepData
from relume.train.export import export_checkpoint, restore_export, routing_keys
from relume.train.metrics import Counts, MetricsFile, accuracy
from relume.train.starting_point import StartingPoint, starting_point
from relume.train.state import TrainState, load_state, locked, save_state
from relume.train.trainer import StepReport, Trainer

#: Folder, within the training's, of the exported model.
CHECKPOINT_FOLDER = "checkpoint"
_OPTIMIZER_KIND = {"optimizer.name", "optimizer.parameters"}


@dataclass(frozen=True)
class Progress:
    """Where a training is.

    Attributes:
        step, steps: done and in all.
        loss: mean since the last report.
        tokens_per_s: tokens of prompts and answers, each counted once.
        seconds_left: at the present speed.
    """

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    seconds_left: float

    def __str__(self) -> str:
        left = f"{int(self.seconds_left) // 60} min {int(self.seconds_left) % 60:02d} s"
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.tokens_per_s:.0f} tokens/s  {left} left"
        )


def train(
    config: TrainConfig,
    out: Path,
    *,
    stop_after: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Train to the configured number of steps, or go on where `out` was left, and export the model.

    Args:
        config: what to train.
        out: folder of state, metrics and the exported model; one training a folder.
        stop_after: leave after this many steps in all, with a saved state and an export.
        max_seconds: leave after this time, likewise.
        progress: called every `log_steps` steps.
        note: called with one line for what a user should know.

    Returns:
        The folder of the exported model, in the official layout.

    Raises:
        RelumeError: a configuration that does not fit, a full disk, a state of another model, or a loss that is
            not finite. The last saved state is kept in every case.
    """
    require_device(config.run.device)
    start = starting_point(config.model, config.run.seed)
    source = DataSource(config, start.config, Codec.of(start.tokenizer, start.config))
    trainer = Trainer(config, start.config, start.weights, len(source.names))
    try:
        with locked(out):
            job = _Job(config, out, start, source, trainer)
            job.resume(note)
            job.run(min(config.run.steps, stop_after or config.run.steps), max_seconds, progress)
            return job.export()
    finally:
        trainer.close()


class _Job:
    def __init__(
        self, config: TrainConfig, out: Path, start: StartingPoint, source: DataSource, trainer: Trainer
    ) -> None:
        self._config, self._out, self._start = config, out, start
        self._source, self._trainer = source, trainer
        self._step, self._seconds = 0, 0.0

    def resume(self, note: Callable[[str], None]) -> None:
        """Take over the folder's state, if there is one."""
        restore_export(self._out / CHECKPOINT_FOLDER)
        state = load_state(self._out)
        if state is None:
            return
        check_resumable(self._out, state, self._config)
        if changed := _changes(state.config, self._config.to_dict()):
            note(f"{self._out}: continues with other values of {', '.join(sorted(changed))}")
        trainer = self._trainer
        with torch.no_grad():
            for own, saved in (
                (trainer.weights, state.weights),
                (trainer.averaged, state.averaged or state.weights),
            ):
                for name, weight in own.items():
                    weight.copy_(saved[name])
        try:
            trainer.optimizer.load_state_dict(state.optimizer)
        except (ValueError, KeyError, TypeError):
            raise RelumeError(
                f"{self._out}: its optimiser state is of another kind; choose another folder"
            ) from None
        self._step, self._seconds = state.step, state.seconds
        if state.step >= self._config.run.steps:
            note(f"{self._out}: all {state.step} steps are done: give more of them to train on")
        else:
            note(f"{self._out}: continues after step {state.step}")

    def run(self, last: int, max_seconds: float | None, progress: Callable[[Progress], None]) -> None:
        """Train up to step `last` and save."""
        metrics = MetricsFile(self._out, self._step)
        began = saved = time.monotonic()
        window = _Window(self._source.names, bool(self._config.objective.kl_weight))
        with ThreadPoolExecutor(1) as loader:
            upcoming = self._prefetch(loader, self._step, last)
            while upcoming is not None:
                data = upcoming.result()
                upcoming = self._prefetch(loader, self._step + 1, last)
                started = time.monotonic()
                report = self._trainer.step(self._step, data)
                self._step += 1
                window.add(report, data.num_text_tokens)
                now = time.monotonic()
                self._seconds += now - started
                if max_seconds is not None and now - began >= max_seconds:
                    upcoming = None
                if self._step % self._config.run.log_steps == 0 or upcoming is None:
                    values = window.flush(now)
                    metrics.write({"step": self._step, **values, "seconds": round(self._seconds, 1)})
                    progress(self._progress(values, window.steps_per_s))
                if upcoming is not None and now - saved >= self._config.run.save_seconds:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def export(self) -> Path:
        """Write the model."""
        out, start = self._out / CHECKPOINT_FOLDER, self._start
        config_json = routing_keys(start.config_json, self._config.routing(start.config))
        export_checkpoint(out, start.family, start.config, self._trainer.result, config_json, start.files)
        return out

    def _prefetch(self, loader: ThreadPoolExecutor, step: int, last: int) -> Future[StepData] | None:
        return loader.submit(self._source.step, step) if step < last else None

    def _progress(self, values: Mapping[str, Any], steps_per_s: float) -> Progress:
        left = (self._config.run.steps - self._step) / max(steps_per_s, 1e-9)
        return Progress(self._step, self._config.run.steps, values["loss"], values["tokens_per_s"], left)

    def _save(self) -> None:
        trainer = self._trainer
        save_state(
            self._out,
            TrainState(
                self._step,
                self._config.to_dict(),
                {name: weight.detach() for name, weight in trainer.weights.items()},
                trainer.averaged,
                trainer.optimizer.state_dict(),
                self._seconds,
            ),
        )


class _Window:
    """Sums over the steps since the last line of metrics."""

    def __init__(self, names: list[str], with_kl: bool) -> None:
        self._names, self._with_kl = names, with_kl
        self._reports: list[StepReport] = []
        self._tokens = 0
        self._since = time.monotonic()
        self.steps_per_s = 0.0

    def add(self, report: StepReport, num_tokens: int) -> None:
        """Count a step."""
        self._reports.append(report)
        self._tokens += num_tokens

    def flush(self, now: float) -> dict[str, Any]:
        """The window's values; begins a new one."""
        reports, elapsed = self._reports, max(now - self._since, 1e-9)
        counts: Counts = reports[0].counts
        for report in reports[1:]:
            counts = counts + report.counts
        loads = torch.stack([report.loads for report in reports]).sum(dim=0).float()
        values = {
            "loss": round(sum(report.loss for report in reports) / len(reports), 6),
            "learning_rate": reports[-1].learning_rate,
            "grad_norm": round(sum(report.grad_norm for report in reports) / len(reports), 4),
            "tokens_per_s": round(self._tokens / elapsed, 1),
            "masked_accuracy": round(float(counts.masked_right.sum() / counts.masked.sum().clamp(min=1)), 4),
            "masked_accuracy_by_task": accuracy(counts.masked_right, counts.masked, self._names),
            "wrong_token_accuracy": round(float(counts.wrong_right.sum() / counts.wrong.sum().clamp(min=1)), 4),
            "least_load": [round(float(value), 3) for value in loads.min(dim=1).values / loads.mean(dim=1)],
            "active_share": [
                round(float(value), 3) for value in torch.stack([report.active for report in reports]).mean(dim=0)
            ],
        }
        if self._with_kl:
            values["kl"] = round(sum(report.kl for report in reports) / len(reports), 6)
        self.steps_per_s = len(reports) / elapsed
        self._reports, self._tokens, self._since = [], 0, now
        return values


def check_resumable(out: Path, state: TrainState, config: TrainConfig) -> None:
    """Raise `RelumeError` if the state in `out` is of a training that `config` cannot go on with."""
    changed = _changes(state.config, config.to_dict())
    fixed = {name for name in changed if name.startswith("model.") or name in _OPTIMIZER_KIND}
    require(
        not fixed,
        f"{out}: holds a training with another {' and '.join(sorted(fixed))}; choose another folder",
    )


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Dotted names of the values that differ; one that was not known yet when it was saved was empty or 0."""
    return {
        f"{section}.{key}"
        for section, values in current.items()
        for key, value in values.items()
        if saved.get(section, {}).get(key, type(value)()) != value
    }


def require_device(device: str) -> None:
    """Raise `RelumeError` if nothing can be computed on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RelumeError(f"[run] device {device!r} cannot be used ({str(error).splitlines()[0]})") from None
