"""Answers on disk, so that a kill at any moment costs one batch at most.

`answers.jsonl` is what trainings read. `answers.json` beside it says of which model and options it is, how many
prompts are done, and how long the file was then: what lies behind that is cut off and answered again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relume.checkpoint.copying import replace_file
from relume.checkpoint.json_file import read_json
from relume.config import require
from relume.core import RelumeError
from relume.engine.result import GenerationResult

ANSWERS_FILE = "answers.jsonl"
PROGRESS_FILE = "answers.json"
_FORMAT = 1


@dataclass(frozen=True)
class AnswerCounts:
    """What became of the prompts.

    Attributes:
        done: prompts that were answered.
        kept: answers in the file.
        unterminated: dropped, for they reached the longest length.
        empty: dropped, for they hold no text.
    """

    done: int = 0
    kept: int = 0
    unterminated: int = 0
    empty: int = 0

    def to_dict(self) -> dict[str, int]:
        """As plain values, for JSON."""
        return dataclasses.asdict(self)


class AnswerFile:
    """The two files, changed in an order that leaves a consistent pair after a kill.

    Args:
        folder: that holds them.
        identity: all that answers depend on besides the prompts: model and options, by name.
        prompts: all that are to be answered, in order.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], prompts: Sequence[str]) -> None:
        self._path, self._progress_path = folder / ANSWERS_FILE, folder / PROGRESS_FILE
        self._identity, self._prompts = identity, prompts
        self._num_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)  # of the prompts that are done
        self.counts = AnswerCounts()

    def resume(self, note: Callable[[str], None]) -> None:
        """Take over what is there, cut to the last batch that was finished, or begin.

        Raises:
            RelumeError: it is of another model, other options or other prompts, or part of it is lost.
        """
        if not self._progress_path.exists():
            known = not self._path.exists() or self._path.stat().st_size == 0
            require(known, f"{self._path}: exists without {PROGRESS_FILE}; choose another folder")
            self._save(b"")
            return
        saved = read_json(self._progress_path)
        try:
            identity, counts = dict(saved["of"]), AnswerCounts(**saved["counts"])
            digest, num_bytes = str(saved["prompts"]), int(saved["num_bytes"])
            known = saved["format"] == _FORMAT
        except (KeyError, TypeError, ValueError):
            known = False
        require(known, f"{self._progress_path}: not of this version; choose another folder")
        if not counts.done:  # no answer is lost, so that it may be of anything
            if self._path.exists():
                os.truncate(self._path, 0)
            self._save(b"")
            return
        changed = [name for name, value in self._identity.items() if identity.get(name) != value]
        require(
            not changed,
            f"{self._path}: holds answers with another {' and '.join(changed)}; choose another folder",
        )
        self._pass(counts.done)
        same = counts.done <= len(self._prompts) and digest == self._digest.hexdigest()
        require(same, f"{self._path}: holds answers to other prompts; choose another folder")
        self.counts, self._num_bytes = counts, num_bytes
        size = self._path.stat().st_size if self._path.exists() else 0
        require(
            size >= num_bytes,
            f"{self._path}: has {size} of {num_bytes} bytes: part of it is lost; remove it and {PROGRESS_FILE}",
        )
        if size > num_bytes:
            note(f"{self._path}: {size - num_bytes} bytes of an unfinished batch are cut off")
            os.truncate(self._path, num_bytes)
        if counts.done:
            note(f"{self._path}: continues after {counts.done} of {len(self._prompts)} prompts")

    def append(self, results: Sequence[GenerationResult]) -> None:
        """Add the answers to the next prompts. Raises `RelumeError` if the disk is full or fails."""
        kept = list(self._lines(results))
        self._pass(len(results))
        unterminated = sum(result.finish_reason != "eos" for result in results)
        self.counts = AnswerCounts(
            self.counts.done + len(results),
            self.counts.kept + len(kept),
            self.counts.unterminated + unterminated,
            self.counts.empty + len(results) - len(kept) - unterminated,
        )
        self._save("".join(kept).encode())

    def _lines(self, results: Sequence[GenerationResult]) -> Iterator[str]:
        prompts = self._prompts[self.counts.done : self.counts.done + len(results)]
        for prompt, result in zip(prompts, results, strict=True):
            answer = (result.text or "").strip()
            if result.finish_reason == "eos" and answer:
                line = {"prompt": prompt, "answer": answer, "answer_ids": result.token_ids}
                yield json.dumps(line, ensure_ascii=False) + "\n"

    def _save(self, added: bytes) -> None:
        """Answers first, then that they are there: a kill in between leaves bytes that the next run cuts off."""
        try:
            with self._path.open("r+b" if self._path.exists() else "wb") as file:
                file.seek(self._num_bytes)
                file.write(added)
                file.flush()
                os.fsync(file.fileno())
            values = {
                "format": _FORMAT,
                "of": self._identity,
                "prompts": self._digest.hexdigest(),
                "counts": self.counts.to_dict(),
                "num_bytes": self._num_bytes + len(added),
            }
            replace_file(self._progress_path, json.dumps(values).encode())
        except OSError as error:
            raise RelumeError(
                f"{self._path}: cannot be written ({error.strerror}); what was answered before is kept"
            ) from None
        self._num_bytes += len(added)

    def _pass(self, count: int) -> None:
        for prompt in self._prompts[self.counts.done : self.counts.done + count]:
            self._digest.update(f"{len(prompt)} {prompt}".encode())
