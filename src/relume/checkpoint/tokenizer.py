"""The tokenizer and chat template of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from relume.core import RelumeError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE, "special_tokens_map.json")


class Tokenizer:
    """Text to token ids and back. No code from the folder is run.

    Raises:
        RelumeError: on opening, if the folder has no tokenizer or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER_FILE
        if not path.exists():
            raise RelumeError(
                f"{folder}: no tokenizer ({TOKENIZER_FILE}); add it to the folder, or pass token ids from Python"
            )
        from transformers import PreTrainedTokenizerFast  # slow to import, and not needed for token ids

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # the library raises many kinds for a damaged file
            raise RelumeError(f"{path}: cannot be read as a tokenizer ({str(error).splitlines()[0]})") from None

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. Raises `RelumeError` for a text that is no valid Unicode."""
        _require_text(text)
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ending where the model's answer begins.

        Raises:
            RelumeError: the tokenizer has no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise RelumeError("the tokenizer has no chat template: pass a plain prompt instead of messages")
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise RelumeError(f"message {message!r}: each needs role and content")
            _require_text(message["content"])
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever the template raises
            raise RelumeError(f"the chat template refuses these messages ({error})") from None
        return list(self._tokenizer.encode(str(text), add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _require_text(text: object) -> None:
    if not isinstance(text, str):
        raise RelumeError(f"a text was expected, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RelumeError(f"the text is no valid Unicode at character {error.start}: give it as UTF-8") from None
