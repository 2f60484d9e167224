"""What a caller asks for."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from relume.config import DecodingConfig, require
from relume.core import RelumeError

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Request:
    """What to answer, in exactly one of three forms, and how to decode it.

    Attributes:
        prompt: plain text, not wrapped in a chat template.
        messages: a conversation of `{"role": ..., "content": ...}`, through the model's chat template.
        input_ids: token ids: a sequence of integers, or a one-dimensional tensor or array of them.
        decoding: see `DecodingConfig`.

    Raises:
        RelumeError: none or several of the three are given, or one is of another type.
    """

    prompt: str | None = None
    messages: Messages | None = None
    input_ids: Iterable[int] | None = None
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        given = sum(part is not None for part in (self.prompt, self.messages, self.input_ids))
        require(given == 1, f"give exactly one of prompt, messages and input_ids, not {given}")
        require(
            self.prompt is None or isinstance(self.prompt, str),
            f"prompt is a {type(self.prompt).__name__}: one text is needed (generate_batch takes several)",
        )
        require(
            self.messages is None or (isinstance(self.messages, Sequence) and not isinstance(self.messages, str)),
            "messages must be a list of {role, content}",
        )
        if self.input_ids is not None:
            object.__setattr__(self, "input_ids", whole_numbers(self.input_ids))


def whole_numbers(values: Iterable[int]) -> tuple[int, ...]:
    """Token ids as plain integers. Raises `RelumeError` for anything else."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError("a text")
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise RelumeError(f"input_ids must be a flat sequence of integers ({error})") from None
