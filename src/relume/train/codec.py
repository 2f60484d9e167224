"""Problems to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from relume.checkpoint.tokenizer import Tokenizer
from relume.config import ModelConfig, require
from relume.tasks import Problem
from relume.train.objective import Example

_PLACEHOLDER = "\x00"


@dataclass(frozen=True)
class Codec:
    """Encodes a problem as the chat that a user would have, and its answer as the model should give it."""

    tokenizer: Tokenizer
    block_length: int
    eos_token_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: ModelConfig) -> Codec:
        """For a model. Raises `RelumeError` if it names no end-of-text token."""
        require(bool(config.eos_token_ids), "the checkpoint names no end-of-text token: add eos_token_id")
        return cls(tokenizer, config.block_length, config.eos_token_ids[0])

    def encode(self, problem: Problem) -> Example:
        """Prompt, answer, end of text, and more of it up to the end of the last block.

        An answer that a model gave keeps its tokens: another cut of the same text is not what it decoded.
        """
        prompt = self.encode_prompt(problem.prompt)
        answer = problem.answer_ids or (*self.tokenizer.encode(problem.answer), self.eos_token_id)
        tokens = [*prompt, *answer]
        tokens += [self.eos_token_id] * (-len(tokens) % self.block_length)
        return Example(torch.tensor(tokens, dtype=torch.int64), len(prompt))

    def encode_prompt(self, text: str) -> list[int]:
        """A user's message in the chat template."""
        if self._frame is None:
            return self._encode_chat(text)
        before, after = self._frame
        return [*before, *self.tokenizer.encode(text), *after]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]] | None:
        """What the template puts around a message, if it is the same around any: templates are slow to fill in."""
        placeholder = self.tokenizer.encode(_PLACEHOLDER)
        ids = self._encode_chat(_PLACEHOLDER)
        if len(placeholder) != 1 or ids.count(placeholder[0]) != 1:
            return None
        index = ids.index(placeholder[0])
        before, after = ids[:index], ids[index + 1 :]
        probe = "Is 1 + 2 = 3?\nSay it."
        same = self._encode_chat(probe) == [*before, *self.tokenizer.encode(probe), *after]
        return (before, after) if same else None

    def _encode_chat(self, text: str) -> list[int]:
        return self.tokenizer.encode_chat([{"role": "user", "content": text}])
