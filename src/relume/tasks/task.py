"""What a task is, and how its problems fall into train and held-out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held_out"]

#: One problem in this many is held out.
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Problem:
    """A prompt with one right answer.

    Attributes:
        key: what is asked, whatever the wording: operands, the word, the date, the program's text. Two problems
            with one key differ only in names, phrases or the order in which something symmetric is given.
        prompt: the user's message.
        answer: the whole answer: worked steps, if any, one a line, then the final answer on the last line.
        answer_ids: the same as the tokens that a model gave it in, its end of text included; mostly unknown and
            empty. A text can often be cut into tokens in several ways.
    """

    key: str
    prompt: str
    answer: str
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Task:
    """A seeded generator of problems. `draw` takes every random number from the generator it is given."""

    name: str
    draw: Callable[[random.Random], Problem]

    def sample(self, rng: random.Random, split: Split) -> Problem:
        """A problem of one side of the split, drawn again until it falls there."""
        while True:
            problem = self.draw(rng)
            if split_of(self.name, problem.key) == split:
                return problem

    def stream(self, seed: int, split: Split) -> Iterator[Problem]:
        """Endless problems; the same seed gives the same ones."""
        rng = random.Random(f"{seed}/{self.name}/{split}")
        while True:
            yield self.sample(rng, split)


def split_of(task: str, key: str) -> Split:
    """Which side a problem falls on: a function of its content key alone.

    Train and held-out can therefore share no problem, whatever their seeds, wording or number.
    """
    digest = hashlib.blake2b(f"{task}\n{key}".encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0 else "train"


def final_answer(text: str) -> str:
    """The last line that is not blank, its white space normalised; empty if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " ".join(lines[-1].split()) if lines else ""


def is_exact(generated: str, expected: str) -> bool:
    """Whether a generated answer ends in exactly the final answer of `expected`."""
    return final_answer(generated) == final_answer(expected)
