"""Tasks about the calendar of a common year (February has 28 days)."""

from __future__ import annotations

import random

from relume.tasks.task import Problem

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = {
    "January": 31,
    "February": 28,
    "March": 31,
    "April": 30,
    "May": 31,
    "June": 30,
    "July": 31,
    "August": 31,
    "September": 30,
    "October": 31,
    "November": 30,
    "December": 31,
}


def date(rng: random.Random) -> Problem:
    """A day some days after a date (three times in four) or after a day of the week."""
    return _date_after(rng) if rng.random() < 0.75 else _weekday_after(rng)


def _date_after(rng: random.Random) -> Problem:
    """Add the days; if the month is over, take its length away."""
    months = list(_MONTHS)
    index = rng.randrange(12)
    month, length = months[index], _MONTHS[months[index]]
    # The end of the month is where something happens.
    day = rng.randint(1, length) if rng.random() < 0.6 else rng.randint(length - 8, length)
    offset = rng.randint(1, 9)
    total = day + offset
    steps = [f"{day}+{offset}={total}"]
    if total > length:
        steps.append(f"{total}-{length}={total - length}")
        total, month = total - length, months[(index + 1) % 12]
    days = "1 day" if offset == 1 else f"{offset} days"
    prompt = rng.choice(
        (
            "What date is {days} after {date}?",
            "Today is {date}. What date is it in {days}?",
            "Which date comes {days} after {date}?",
        )
    ).format(days=days, date=f"{day} {months[index]}")
    return Problem(f"{day} {months[index]} + {offset}", prompt, "\n".join((*steps, f"{total} {month}")))


def _weekday_after(rng: random.Random) -> Problem:
    """Name the days on the way."""
    start, offset = rng.randrange(7), rng.randint(1, 5)
    way = [_DAYS[(start + step) % 7] for step in range(1, offset + 1)]
    days = "1 day" if offset == 1 else f"{offset} days"
    prompt = rng.choice(
        (
            "What day is {days} after {day}?",
            "Today is {day}. What day is it in {days}?",
            "Which day comes {days} after {day}?",
        )
    ).format(days=days, day=_DAYS[start])
    return Problem(f"{_DAYS[start]} + {offset}", prompt, " ".join(day[:2] for day in way) + f"\n{way[-1]}")
