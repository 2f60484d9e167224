"""What an evaluation varies: decoder, mode and threshold, written `decoder[:mode][:threshold]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, get_args

from relume.config import DecoderName, DecodingConfig, JointMode
from relume.core import RelumeError


@dataclass(frozen=True)
class Variant:
    """One way to decode, under the name that the user gave it."""

    name: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `threshold:0.9`, `joint:speed`, `joint:quality:0.8` or `indel`.

        Raises:
            RelumeError: a part that is neither a decoder, a mode nor a number in 0..1.
        """
        decoder, *rest = text.split(":")
        options: dict[str, Any] = {"decoder": decoder}
        for part in rest:
            if part in get_args(JointMode) and decoder == "joint":
                options["mode"] = part
                continue
            try:
                options["threshold"] = float(part)
            except ValueError:
                raise RelumeError(
                    f"variant {text!r}: {part!r} is neither a threshold nor a mode; write for example "
                    f"threshold:0.9 or joint:speed (decoders: {', '.join(get_args(DecoderName))})"
                ) from None
        DecodingConfig.from_mapping(options)  # refuses unknown decoders and thresholds outside 0..1
        return cls(text, options)

    def over(self, decoding: DecodingConfig) -> DecodingConfig:
        """`decoding` with the variant's decoder, mode and threshold."""
        return DecodingConfig.from_mapping({**vars(decoding), **self.options})
