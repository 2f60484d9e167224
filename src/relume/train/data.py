"""Which problems a step trains on: a function of seed and step, so that a resumed run sees the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from relume.config import ModelConfig, require
from relume.core import RelumeError
from relume.tasks import TASKS, Problem
from relume.tasks.jsonl import read_problems
from relume.train.codec import Codec
from relume.train.config import TrainConfig
from relume.train.objective import Batch, Example, make_batch

#: Name under which problems from files are counted.
FILES = "files"


@dataclass(frozen=True)
class StepData:
    """One optimiser step: rows of like lengths together, one forward each.

    Attributes:
        batches: noised rows.
        tasks: for each batch, the task of each row, as an index into `DataSource.names`.
        num_text_tokens: positions of prompts and answers, each counted once.
    """

    batches: tuple[Batch, ...]
    tasks: tuple[torch.Tensor, ...]
    num_text_tokens: int

    @property
    def total_weight(self) -> float:
        """Sum of all loss weights of the step."""
        return float(sum(batch.loss_weights.sum(dtype=torch.float64) for batch in self.batches))


class DataSource:
    """Draws problems, encodes and noises them. Holds no position: every step stands on its own."""

    def __init__(self, config: TrainConfig, model: ModelConfig, codec: Codec) -> None:
        require(
            model.mask_token_id is not None, "the model names no mask token: add mask_token_id to its config.json"
        )
        assert model.mask_token_id is not None
        require(
            not config.objective.wrong_share or config.objective.substitutes[1] <= model.vocab_size,
            f"[objective] substitutes reach {config.objective.substitutes[1]}, beyond the vocabulary of "
            f"{model.vocab_size}",
        )
        self._config, self._codec = config, codec
        self._mask_token_id = model.mask_token_id
        self._block_length = model.block_length
        self._tasks = [TASKS[name] for name in config.data.tasks]
        self._file_problems = [problem for file in config.data.files for problem in read_problems(Path(file))]
        largest = max((token for problem in self._file_problems for token in problem.answer_ids), default=0)
        require(
            largest < model.vocab_size,
            f"[data] files: the answer_ids reach {largest}, beyond the vocabulary of {model.vocab_size}: they are "
            "another model's",
        )
        self.names = [task.name for task in self._tasks] + ([FILES] if self._file_problems else [])
        total = sum(config.data.tasks.values())
        self._shares = [share / total for share in config.data.tasks.values()]
        if self._file_problems:
            self._shares.append(config.data.file_share if self._tasks else 1.0)

    def step(self, step: int) -> StepData:
        """The data of optimiser step `step`, counted from 0."""
        data, seed = self._config.data, self._config.run.seed
        rng = random.Random(f"{seed}/{step}")
        drawn = [self._draw(rng) for _ in range(data.batch_size)]
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        batches, tasks = [], []
        for group in self._groups(drawn):
            examples = [example for _, example in group]
            batches.append(
                make_batch(examples, self._config.objective, self._block_length, self._mask_token_id, generator)
            )
            tasks.append(torch.tensor([task for task, _ in group]))
        num_text_tokens = sum(len(example.token_ids) for _, example in drawn)
        return StepData(tuple(batches), tuple(tasks), num_text_tokens)

    def _draw(self, rng: random.Random) -> tuple[int, Example]:
        for _ in range(100):
            index = rng.choices(range(len(self.names)), self._shares)[0]
            example = self._codec.encode(self._problem(index, rng))
            if self._row_length(example) <= self._config.data.max_positions:
                return index, example
        raise RelumeError(
            f"[data] max_positions is {self._config.data.max_positions}: hardly any problem is so short; raise it"
        )

    def _problem(self, index: int, rng: random.Random) -> Problem:
        if index < len(self._tasks):
            return self._tasks[index].sample(rng, "train")
        return rng.choice(self._file_problems)

    def _row_length(self, example: Example) -> int:
        return example.num_positions(self._block_length, self._config.objective.copies)

    def _groups(self, drawn: Sequence[tuple[int, Example]]) -> Iterator[list[tuple[int, Example]]]:
        """Cut the problems, longest first, into groups whose padded rows fit `micro_positions`.

        A group that is half full ends where the length changes, rather than pad what follows.
        """
        group: list[tuple[int, Example]] = []
        room = self._config.data.micro_positions
        for item in sorted(drawn, key=lambda item: -self._row_length(item[1])):
            if group:
                longest, size = self._row_length(group[0][1]), len(group)
                shorter = self._row_length(item[1]) < longest
                if (size + 1) * longest > room or (shorter and size * longest > room // 2):
                    yield group
                    group = []
            group.append(item)
        yield group
