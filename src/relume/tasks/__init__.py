"""Tasks with one right answer each, for training and for evaluation."""

from __future__ import annotations

from relume.core import Registry
from relume.tasks.dates import date
from relume.tasks.numbers import add_subtract, compare, simple_list, sort_numbers
from relume.tasks.python_code import python_output
from relume.tasks.stories import word_problem
from relume.tasks.task import Problem, Split, Task, final_answer, is_exact, split_of
from relume.tasks.text import count_letter, reverse_word, uppercase_words

__all__ = ["TASKS", "Problem", "Split", "Task", "final_answer", "is_exact", "split_of"]

TASKS = Registry(
    "task",
    {
        task.__name__: Task(task.__name__, task)
        for task in (
            add_subtract,
            compare,
            count_letter,
            date,
            python_output,
            reverse_word,
            simple_list,
            sort_numbers,
            uppercase_words,
            word_problem,
        )
    },
)
