"""The tasks: right answers, seeds, the split, and the importer."""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relume.core import RelumeError
from relume.tasks import TASKS, Problem, Split, final_answer, is_exact, split_of
from relume.tasks.jsonl import read_problems

NUM_CHECKED = 400
all_tasks = pytest.mark.parametrize("name", list(TASKS))


def take(name: str, count: int, seed: int = 0, split: Split = "train") -> list[Problem]:
    return list(itertools.islice(TASKS[name].stream(seed, split), count))


@all_tasks
def test_train_and_held_out_share_no_problem(name: str) -> None:
    train = {problem.key for problem in take(name, 1500)}
    held_out = {problem.key for seed in (0, 1) for problem in take(name, 150, seed, "held_out")}
    assert not train & held_out
    assert all(split_of(name, key) == "held_out" for key in held_out)


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(TASKS)))
def test_any_seed_keeps_to_its_side(seed: int, name: str) -> None:
    rng = random.Random(seed)
    assert split_of(name, TASKS[name].sample(rng, "train").key) == "train"
    assert split_of(name, TASKS[name].sample(rng, "held_out").key) == "held_out"


@all_tasks
def test_a_tenth_is_held_out(name: str) -> None:
    rng = random.Random(0)
    keys = {TASKS[name].draw(rng).key for _ in range(6000)}
    share = sum(split_of(name, key) == "held_out" for key in keys) / len(keys)
    # Seven days times five offsets are few keys; the other tasks have thousands.
    assert 0.07 < share < 0.13


@all_tasks
def test_a_seed_gives_the_same_problems_and_another_seed_others(name: str) -> None:
    assert take(name, 20) == take(name, 20)
    assert take(name, 20) != take(name, 20, seed=1)


@all_tasks
def test_a_prompt_has_one_answer(name: str) -> None:
    answers: dict[str, str] = {}
    for problem in take(name, 3000):
        assert answers.setdefault(problem.prompt, problem.answer) == problem.answer


@all_tasks
def test_wording_varies_and_text_is_short_ascii(name: str) -> None:
    problems = take(name, NUM_CHECKED)
    assert len({problem.prompt.split()[0] for problem in problems}) > 1 or name == "compare"
    assert len({len(problem.prompt) for problem in problems}) > 3
    assert all(len(p.prompt) <= 150 and len(p.answer) <= 60 for p in problems)
    assert all((p.prompt + p.answer).isascii() for p in problems)


def test_answers_of_several_blocks_occur() -> None:
    lengths = {name: max(len(problem.answer) for problem in take(name, 200)) for name in TASKS}
    assert sum(length > 16 for length in lengths.values()) >= 5


def arithmetic_holds(line: str) -> bool:
    left, _, right = line.rpartition("=")
    return bool(eval(left) == int(right))


def check_add_subtract(problem: Problem) -> None:
    operator = "+" if "+" in problem.key else "-"
    a, b = map(int, problem.key.split(operator))
    *steps, last = problem.answer.splitlines()
    assert int(last) == (a + b if operator == "+" else a - b)
    assert all(arithmetic_holds(step) for step in steps)
    assert {str(a), str(b)} <= set(problem.prompt.replace("?", " ").replace(".", " ").split())


def check_compare(problem: Problem) -> None:
    a, b = map(int, problem.key.split())
    larger = any(word in problem.prompt for word in ("larger", "bigger", "greater"))
    assert problem.answer == str(max(a, b) if larger else min(a, b))


def check_count_letter(problem: Problem) -> None:
    letter, word = problem.key.split()
    marked, total = problem.answer.splitlines()
    assert int(total) == word.count(letter)
    assert len(marked) == len(word) and set(marked) <= {letter, "-"}
    assert all((mark == letter) == (c == letter) for mark, c in zip(marked, word, strict=True))


def check_date(problem: Problem) -> None:
    start, offset = problem.key.split(" + ")
    for form in ("%d %B", "%A"):
        with contextlib.suppress(ValueError):
            if form == "%A":
                days = [datetime.date(2023, 5, 1) + datetime.timedelta(i) for i in range(7)]
                day = next(d for d in days if d.strftime("%A") == start)
            else:
                day = datetime.datetime.strptime(f"{start} 2023", f"{form} %Y").date()
            day += datetime.timedelta(int(offset))
            break
    else:
        raise AssertionError(start)
    assert final_answer(problem.answer) == day.strftime(form).lstrip("0")


def check_python_output(problem: Problem) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(problem.key, {})
    assert final_answer(problem.answer) == printed.getvalue().strip()
    assert problem.prompt.endswith(problem.key)


def check_reverse_word(problem: Problem) -> None:
    assert problem.answer == "".join(reversed(problem.key)) and problem.key in problem.prompt


def check_simple_list(problem: Problem) -> None:
    kind, listed = problem.key.split(": ")
    items = listed.split(", ")
    ordinals = {"first": 0, "second": 1, "third": 2, "fourth": 3, "last": -1}
    if kind == "length":
        assert problem.answer == str(len(items))
    elif kind in ordinals:
        assert problem.answer == items[ordinals[kind]]
    else:
        items.remove(kind.removeprefix("without "))
        assert problem.answer.split(", ") == items


def check_sort_numbers(problem: Problem) -> None:
    falling = "large to small" in problem.prompt or "falling" in problem.prompt
    numbers = sorted(map(int, problem.key.split()), reverse=falling)
    assert problem.answer == ", ".join(map(str, numbers))


def check_uppercase_words(problem: Problem) -> None:
    assert problem.answer == problem.key.upper() and problem.key in problem.prompt


def check_word_problem(problem: Problem) -> None:
    *steps, last = problem.answer.splitlines()
    assert steps and all(arithmetic_holds(step) for step in steps)
    assert steps[-1].endswith(f"={last}")
    for step, following in itertools.pairwise(steps):
        assert following.startswith(step.partition("=")[2])


CHECKS: dict[str, Callable[[Problem], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


@all_tasks
def test_answers_are_right(name: str) -> None:
    for problem in take(name, NUM_CHECKED):
        CHECKS[name](problem)


@pytest.mark.parametrize(
    ("generated", "expected", "exact"),
    [
        ("7+5=12\n12", "12", True),
        ("12 \n\n", "1+11=12\n12", True),
        ("3,  4", "3, 4", True),
        ("112", "12", False),
        ("12.", "12", False),
        ("", "12", False),
    ],
)
def test_only_the_whole_last_line_counts(generated: str, expected: str, exact: bool) -> None:
    assert is_exact(generated, expected) is exact


def test_the_importer_reads_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [
        {"question": "6*7?", "answer": "6*7=<<6*7=42>>42\n#### 42"},
        {"prompt": "Say a.", "answer": "a"},
        {"prompt": "2?", "answer": 2},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    found = read_problems(path)
    assert [(p.prompt, final_answer(p.answer)) for p in found] == [("6*7?", "42"), ("Say a.", "a"), ("2?", "2")]
    assert found[0].answer == "6*7=<<6*7=42>>42\n42"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
        ('{"prompt": "a"}', "has the keys 'prompt'"),
        ('{"prompt": "a", "answer": null}', "answer is None"),
        ('{"question": " ", "answer": "a"}', "question is ' '"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line, encoding="utf-8")
    with pytest.raises(RelumeError) as caught:
        read_problems(path)
    assert f"{path}:2: " in str(caught.value) and complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RelumeError, match=r"missing\.jsonl: cannot be read"):
        read_problems(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RelumeError, match="holds no problem"):
        read_problems(tmp_path / "empty.jsonl")
