"""Which prompts are answered: of a file, or of the tasks, on one side of their split."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from relume.config import require
from relume.tasks import TASKS, Problem
from relume.tasks.jsonl import read_problems, read_prompts
from relume.tasks.task import Split

_MOST_REPEATS = 1000  # in a row, after which a task has hardly anything new
_NUM_TO_LEARN = 20_000
_NUM_TO_EVALUATE = 1000


def problems_for(
    prompts: Path | None, tasks: str | None, num_prompts: int | None, seed: int, split: Split = "held_out"
) -> dict[str, list[Problem]]:
    """Problems of a JSONL file (all by default), or of the tasks named, separated by commas (all by default)."""
    if prompts is None:
        return sample_problems(tasks.split(",") if tasks else list(TASKS), num_prompts, seed, split)
    _require_one_source(tasks)
    return {prompts.stem: read_problems(prompts)[:num_prompts]}


def sample_problems(
    names: Sequence[str], num_prompts: int | None, seed: int, split: Split = "held_out"
) -> dict[str, list[Problem]]:
    """Problems of the named tasks, different prompts, as equally many of each as possible.

    `None` asks for 1,000, or as many of them as there are.

    Raises:
        RelumeError: no such task, or one that does not have that many.
    """
    chosen, names = {}, list(dict.fromkeys(names))
    count = _NUM_TO_EVALUATE if num_prompts is None else num_prompts
    for index, name in enumerate(names):
        wanted = count // len(names) + (index < count % len(names))
        found = list(itertools.islice(_different(TASKS[name].stream(seed, split)), wanted))
        require(
            num_prompts is None or len(found) == wanted,
            f"--num-prompts {num_prompts}: the task {name} has {len(found)} different ones, {wanted} are its part",
        )
        chosen[name] = found
    return {name: problems for name, problems in chosen.items() if problems}


def prompts_to_learn(prompts: Path | None, tasks: str | None, num_prompts: int | None, seed: int) -> list[str]:
    """Prompts of a JSONL file (all by default), or of the training side of the tasks named (20,000 by default).

    Tasks take turns, by their shares (`date=2,compare` has two of dates for each comparison), until they have
    nothing new: a part of the list has as much of each, and a longer list begins with the shorter one.

    Raises:
        RelumeError: a senseless share, no such task or file, or fewer different prompts than were asked for.
    """
    if prompts is not None:
        _require_one_source(tasks)
        return read_prompts(prompts)[:num_prompts]
    shares = _shares(tasks)
    streams = {name: _different(TASKS[name].stream(seed, "train")) for name in shares}
    turns = [(1.0 / share, place, name) for place, (name, share) in enumerate(shares.items())]
    heapq.heapify(turns)
    chosen: list[str] = []
    while turns and len(chosen) < (num_prompts or _NUM_TO_LEARN):
        due, place, name = heapq.heappop(turns)
        if (problem := next(streams[name], None)) is not None:
            chosen.append(problem.prompt)
            heapq.heappush(turns, (due + 1.0 / shares[name], place, name))
    require(
        num_prompts is None or len(chosen) == num_prompts,
        f"--num-prompts {num_prompts}: the tasks have {len(chosen)} different prompts",
    )
    return chosen


def _shares(tasks: str | None) -> dict[str, float]:
    """`name` or `name=share`, separated by commas; all tasks alike by default."""
    if not tasks:
        return dict.fromkeys(TASKS, 1.0)
    shares = {}
    for text in tasks.split(","):
        name, equals, share = text.partition("=")
        try:
            shares[name] = float(share) if equals else 1.0
        except ValueError:
            shares[name] = math.nan
        require(0.0 < shares[name] < math.inf, f"--tasks: {text!r}: a share is a positive number, as {name}=2")
    return shares


def _different(problems: Iterable[Problem]) -> Iterator[Problem]:
    """Each prompt once; ends where nothing new comes for long, as a task has only so many."""
    seen: set[str] = set()
    repeats = 0
    for problem in problems:
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            repeats = 0
            yield problem
        elif (repeats := repeats + 1) == _MOST_REPEATS:
            return


def _require_one_source(tasks: str | None) -> None:
    require(tasks is None, "give --tasks or --prompts, not both")
