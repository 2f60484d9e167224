"""Tasks about numbers and lists."""

from __future__ import annotations

import random

from relume.tasks.task import Problem
from relume.tasks.words import ANIMALS, COLOURS, FRUITS

_ORDINALS = ("first", "second", "third", "fourth")


def add_subtract(rng: random.Random) -> Problem:
    """Add or subtract numbers of up to three digits, digit by digit from the right."""
    digits = rng.choice((1, 2, 2, 2, 3, 3))
    a, b = rng.randrange(10**digits), rng.randrange(10 ** rng.randint(max(1, digits - 1), digits))
    if rng.random() < 0.5:
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        key = f"{max(a, b)}+{min(a, b)}"
        phrases = ("What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "What is {} plus {}?")
        answer = "\n".join((*_sum_steps(a, b), str(a + b)))
    else:
        a, b = max(a, b), min(a, b)
        key = f"{a}-{b}"
        phrases = ("What is {} - {}?", "{} - {} = ?", "Compute {} - {}.", "What is {} minus {}?")
        answer = "\n".join((*_difference_steps(a, b), str(a - b)))
    return Problem(key, rng.choice(phrases).format(a, b), answer)


def _sum_steps(a: int, b: int) -> list[str]:
    """One line a digit: `7+5=12`, and `4+8+1=13` where one is carried."""
    steps: list[str] = []
    carry = 0
    while a or b or not steps:
        total = a % 10 + b % 10 + carry
        steps.append(f"{a % 10}+{b % 10}" + "+1" * carry + f"={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return steps


def _difference_steps(a: int, b: int) -> list[str]:
    """One line a digit: `14-8=6` where ten is borrowed, `4-2-1=1` where one was lent."""
    steps: list[str] = []
    lent = 0
    while a or b or not steps:
        borrow = int(a % 10 - b % 10 - lent < 0)
        steps.append(f"{a % 10 + 10 * borrow}-{b % 10}" + "-1" * lent + f"={a % 10 + 10 * borrow - b % 10 - lent}")
        a, b, lent = a // 10, b // 10, borrow
    return steps


def sort_numbers(rng: random.Random) -> Problem:
    """Sort three to five different numbers below 100."""
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    rising = rng.random() < 0.7
    phrases = (
        ("Sort {} from small to large.", "Put {} in rising order.", "Sort these numbers: {}")
        if rising
        else ("Sort {} from large to small.", "Put {} in falling order.")
    )
    key = " ".join(map(str, sorted(numbers)))
    ordered = sorted(numbers, reverse=not rising)
    return Problem(key, rng.choice(phrases).format(_listed(numbers)), _listed(ordered))


def compare(rng: random.Random) -> Problem:
    """The larger or smaller of two different numbers."""
    digits = rng.choice((1, 2, 2, 3, 3))
    a = rng.randrange(1, 10**digits)
    near = rng.random() < 0.4  # numbers of one length that begin alike are the hard ones
    b = a
    while b == a or b < 1:
        b = a + rng.randint(-9, 9) if near else rng.randrange(1, 10 ** rng.randint(max(1, digits - 1), digits))
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    larger = rng.random() < 0.5
    word = rng.choice(("larger", "bigger", "greater") if larger else ("smaller", "less"))
    phrase = rng.choice(("Which is {}, {} or {}?", "Which number is {}: {} or {}?"))
    return Problem(f"{min(a, b)} {max(a, b)}", phrase.format(word, a, b), str(max(a, b) if larger else min(a, b)))


def simple_list(rng: random.Random) -> Problem:
    """An item of a list, its length, its last item, or the list without one."""
    items = rng.sample(rng.choice((FRUITS, COLOURS, ANIMALS)), rng.randint(3, 5))
    listed = _listed(items)
    kind = rng.choice(("item", "item", "last", "length", "without"))
    if kind == "item":
        index = rng.randrange(min(len(items), len(_ORDINALS)))
        prompt, answer = f"What is the {_ORDINALS[index]} item of {listed}?", items[index]
        kind = _ORDINALS[index]
    elif kind == "last":
        prompt, answer = f"What is the last item of {listed}?", items[-1]
    elif kind == "length":
        prompt, answer = f"How many items are in {listed}?", str(len(items))
    else:
        dropped = rng.choice(items)
        prompt = rng.choice(("Remove {} from {}.", "Leave {} out of {}.")).format(dropped, listed)
        answer = _listed([item for item in items if item != dropped])
        kind = f"without {dropped}"
    return Problem(f"{kind}: {listed}", prompt, answer)


def _listed(items: list[int] | list[str]) -> str:
    return ", ".join(map(str, items))
