"""A tokenizer for models without a trained vocabulary: one token a byte."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from relume.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from relume.config import require

NUM_BYTES = 256
_LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits

CHAT_TEMPLATE = """\
{%- set names = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT'} -%}
{%- if not messages or messages[0]['role'] != 'system' -%}
{{- '<role>SYSTEM</role>detailed thinking off<|role_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in names -%}
{{- raise_exception('unknown role ' ~ message['role']) -}}
{%- endif -%}
{{- '<role>' ~ names[message['role']] ~ '</role>' ~ message['content'] -}}
{%- if message['role'] == 'system' and loop.first -%}{{- '\\ndetailed thinking off' -}}{%- endif -%}
{{- '<|role_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<role>ASSISTANT</role>' -}}{%- endif -%}
"""


def byte_tokenizer_files(
    vocab_size: int, special: Mapping[str, int], eos: str, mask: str
) -> dict[str, str | dict[str, Any]]:
    """Tokenizer files by name, for a checkpoint folder.

    Ids 0 to 255 are the bytes, which is all that text encodes to. The ids from there on that are not special
    stand for two or three letters or digits each, so that whatever a model predicts has a text.

    Args:
        vocab_size: number of ids.
        special: ids of the special tokens, by text.
        eos, mask: which of `special` end a text and stand for a masked position.

    Raises:
        RelumeError: the vocabulary is too small, or a special id lies among the bytes or outside.
    """
    for name, token in special.items():
        require(
            NUM_BYTES <= token < vocab_size,
            f"the special token {name} has the id {token}: it must lie above the {NUM_BYTES} bytes and below the "
            f"vocabulary's size ({vocab_size})",
        )
    require(len(set(special.values())) == len(special), f"two special tokens share an id: {dict(special)}")
    texts = {token: text for text, token in special.items()}
    pieces = _pieces()
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    for token in range(NUM_BYTES, vocab_size):
        text = texts.get(token) or next(pieces, "")
        require(bool(text), f"a vocabulary of {vocab_size} is larger than the byte tokenizer can name")
        vocab[text] = token

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return {
        TOKENIZER_FILE: tokenizer.to_str(),
        TOKENIZER_CONFIG_FILE: {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "pad_token": eos,
            "mask_token": mask,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def _byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte: itself if printable, else one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(NUM_BYTES)]


def _pieces() -> Iterator[str]:
    for length in (2, 3):
        yield from map("".join, itertools.product(_LETTERS, repeat=length))
