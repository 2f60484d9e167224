"""What a caller asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relume.config import DecodingConfig, require

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Request:
    """What to answer, in exactly one of three forms, and how to decode it.

    Attributes:
        prompt: plain text, not wrapped in a chat template.
        messages: a conversation of `{"role": ..., "content": ...}`, through the model's chat template.
        input_ids: token ids.
        decoding: see `DecodingConfig`.
    """

    prompt: str | None = None
    messages: Messages | None = None
    input_ids: Sequence[int] | None = None
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        given = sum(part is not None for part in (self.prompt, self.messages, self.input_ids))
        require(given == 1, f"give exactly one of prompt, messages and input_ids, not {given}")
