"""Prompts and answers from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relume.core import RelumeError
from relume.tasks.task import Problem

#: Pairs of keys that are read, in this order of preference.
KEY_PAIRS = (("prompt", "answer"), ("question", "answer"))
_PROMPT_WANTED = " or ".join(keys[0] for keys in KEY_PAIRS)
_FINAL_MARK = "####"  # GSM8K writes the final answer behind it


def read_problems(path: Path) -> list[Problem]:
    """Problems of a file with one JSON object a line, `prompt` and `answer` or GSM8K's `question` and `answer`.

    A line `#### 42` at an answer's end becomes the last line `42`. Blank lines are skipped. `answer_ids`, a list,
    are the answer's tokens where a model wrote the file.

    Raises:
        RelumeError: the file cannot be read or holds no problem, or a line is wrong; names file and line.
    """
    return [_problem(place, value) for place, value in _objects(path, _wanted())]


def read_prompts(path: Path) -> list[str]:
    """The prompts alone of such a file; its lines need no answer. Raises as `read_problems`."""
    return [_prompt(place, value) for place, value in _objects(path, _PROMPT_WANTED)]


def _objects(path: Path, wanted: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of all lines, each with its place."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise RelumeError(f"{path}: not UTF-8 text (byte {error.start})") from None
    numbered = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RelumeError(f"{path}: holds no problem; each line needs {wanted}")
    return [(place, _object(place, line, wanted)) for place, line in numbered]


def _object(place: str, line: str, wanted: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RelumeError(f"{place}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise RelumeError(f"{place}: holds a {type(value).__name__}; an object with {wanted} is needed")
    return value


def _problem(place: str, value: dict[str, Any]) -> Problem:
    pair = next((keys for keys in KEY_PAIRS if all(key in value for key in keys)), None)
    if pair is None:
        raise RelumeError(
            f"{place}: has the keys {', '.join(map(repr, value)) or '(none)'}; {_wanted()} are needed"
        )
    prompt, answer = (_text(place, key, value[key]) for key in pair)
    return Problem(prompt, prompt, _without_mark(answer), _token_ids(place, value.get("answer_ids", [])))


def _prompt(place: str, value: dict[str, Any]) -> str:
    key = next((keys[0] for keys in KEY_PAIRS if keys[0] in value), None)
    if key is None:
        raise RelumeError(
            f"{place}: has the keys {', '.join(map(repr, value)) or '(none)'}; {_PROMPT_WANTED} is needed"
        )
    return _text(place, key, value[key])


def _token_ids(place: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise RelumeError(f"{place}: answer_ids is {value!r}; a list of token ids is needed")
    return tuple(value)


def _text(place: str, key: str, value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and key == "answer":
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise RelumeError(f"{place}: {key} is {value!r}; a text is needed")
    return value.strip()


def _without_mark(answer: str) -> str:
    head, mark, last = answer.rpartition("\n")
    if last.startswith(_FINAL_MARK):
        return f"{head}{mark}{last.removeprefix(_FINAL_MARK).strip()}"
    return answer


def _wanted() -> str:
    return " or ".join(" and ".join(keys) for keys in KEY_PAIRS)
