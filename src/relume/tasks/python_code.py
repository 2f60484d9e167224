"""What a few lines of Python print."""

from __future__ import annotations

import random

from relume.tasks.task import Problem
from relume.tasks.words import draw_word

_VARIABLES = ("ab", "xy", "pq", "mn", "st")


def python_output(rng: random.Random) -> Problem:
    """Two variables, one condition, or one call; worked steps where something is computed twice."""
    code, steps = rng.choice((_two_variables, _two_variables, _condition, _word, _largest))(rng)
    phrase = rng.choice(("What does this print?\n{}", "What is the output?\n{}", "Run this:\n{}"))
    return Problem(code, phrase.format(code), "\n".join(steps))


def _operation(rng: random.Random, left: int) -> tuple[str, int, int]:
    operator = rng.choice("+-*") if left <= 9 else rng.choice("+-")
    right = rng.randint(2, 9)
    if operator == "-":
        right = rng.randint(0, min(left, 9))
    result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return operator, right, result


def _two_variables(rng: random.Random) -> tuple[str, list[str]]:
    first, second = tuple(rng.choice(_VARIABLES))
    value = rng.randint(2, 12)
    operator, right, middle = _operation(rng, value)
    last_operator, last_right, result = _operation(rng, middle)
    code = (
        f"{first} = {value}\n{second} = {first} {operator} {right}\nprint({second} {last_operator} {last_right})"
    )
    return code, [
        f"{value}{operator}{right}={middle}",
        f"{middle}{last_operator}{last_right}={result}",
        str(result),
    ]


def _condition(rng: random.Random) -> tuple[str, list[str]]:
    name = rng.choice(_VARIABLES)[0]
    value, bound = rng.randint(1, 20), rng.randint(1, 20)
    yes, no = rng.sample(("yes", "no", "big", "small", "red", "blue"), 2)
    operator = rng.choice("<>")
    holds = value < bound if operator == "<" else value > bound
    code = f'{name} = {value}\nprint("{yes}" if {name} {operator} {bound} else "{no}")'
    return code, [f"{value}{operator}{bound} {holds}", yes if holds else no]


def _word(rng: random.Random) -> tuple[str, list[str]]:
    word = draw_word(rng, 3, 6)
    if rng.random() < 0.5:
        return f'print(len("{word}"))', [" ".join(f"{c}{i}" for i, c in enumerate(word, 1)), str(len(word))]
    index = rng.randrange(len(word))
    steps = [" ".join(f"{c}{i}" for i, c in enumerate(word)), word[index]]
    return f'w = "{word}"\nprint(w[{index}])', steps


def _largest(rng: random.Random) -> tuple[str, list[str]]:
    numbers = rng.sample(range(1, 100), 3)
    function = rng.choice(("max", "min"))
    code = f"n = [{', '.join(map(str, numbers))}]\nprint({function}(n))"
    return code, [str(max(numbers) if function == "max" else min(numbers))]
