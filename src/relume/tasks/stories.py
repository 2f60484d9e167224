"""Arithmetic word problems with worked steps."""

from __future__ import annotations

import random

from relume.tasks.task import Problem
from relume.tasks.words import ITEMS, NAMES

_GAINS = ("buys {n} more", "finds {n} more", "gets {n} more", "wins {n}")
_LOSSES = ("loses {n}", "sells {n}", "breaks {n}", "gives {n} away", "gives {n} to {friend}")
_ENDINGS = ("How many {items} are left?", "How many {items} does {name} have now?", "How many {items} now?")


def word_problem(rng: random.Random) -> Problem:
    """Two or three steps over a number of things; one step a line, then the number that is asked for."""
    name, friend = rng.sample(NAMES, 2)
    items = rng.choice(ITEMS)
    steps: list[str] = []
    if rng.random() < 0.5:
        boxes, each = rng.randint(2, 6), rng.randint(2, 9)
        container = rng.choice(("boxes", "bags", "packs"))
        total = boxes * each
        opening = rng.choice(
            (
                f"{name} has {boxes} {container} of {each} {items}.",
                f"{name} buys {boxes} {container} with {each} {items} each.",
            )
        )
        steps.append(f"{boxes}*{each}={total}")
        num_changes = 1
    else:
        total = rng.randint(5, 40)
        opening = rng.choice(
            (f"{name} has {total} {items}.", f"There are {total} {items} on the table of {name}.")
        )
        steps.append(f"{total}")
        num_changes = 2
    changes = []
    for _ in range(num_changes):
        gains = total < 2 or rng.random() < 0.5
        amount = rng.randint(2, 12) if gains else rng.randint(1, min(total, 12))
        after = total + amount if gains else total - amount
        changes.append(rng.choice(_GAINS if gains else _LOSSES).format(n=amount, friend=friend))
        steps.append(f"{total}{'+' if gains else '-'}{amount}={after}")
        total = after
    middle = changes[0] if len(changes) == 1 else rng.choice(("{} and then {}", "{} and {}")).format(*changes)
    ending = rng.choice(_ENDINGS).format(items=items, name=name)
    pronoun = f"{name} {middle}."
    worked = [step for step in steps if "=" in step]  # the first number of a story without boxes is no step
    return Problem(" ".join(steps), f"{opening} {pronoun} {ending}", "\n".join((*worked, str(total))))
