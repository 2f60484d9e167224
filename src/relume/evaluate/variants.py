"""What an evaluation varies of the decoding, written `decoder[:mode][:threshold][:post=iterations]`."""

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
        """From `threshold:0.9`, `joint:speed`, `joint:quality:0.8`, `joint:speed:post=0` or `indel`.

        `post` is `max_post_iterations`.

        Raises:
            RelumeError: a part that is neither a decoder, a mode, a number in 0..1 nor `post` with a whole number.
        """
        decoder, *rest = text.split(":")
        options: dict[str, Any] = {"decoder": decoder}
        for part in rest:
            if part in get_args(JointMode) and decoder == "joint":
                options["mode"] = part
                continue
            name, equals, number = part.rpartition("=")
            try:
                if equals and name == "post":
                    options["max_post_iterations"] = int(number)
                else:
                    options["threshold"] = float(part)
            except ValueError:
                raise RelumeError(
                    f"variant {text!r}: {part!r} is neither a threshold nor a mode; write for example "
                    "threshold:0.9, joint:speed or joint:speed:post=0 (decoders: "
                    f"{', '.join(get_args(DecoderName))})"
                ) from None
        DecodingConfig.from_mapping(options)  # refuses unknown decoders and thresholds outside 0..1
        return cls(text, options)

    def over(self, decoding: DecodingConfig) -> DecodingConfig:
        """`decoding` with what the variant says."""
        return DecodingConfig.from_mapping({**vars(decoding), **self.options})
