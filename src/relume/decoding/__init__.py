"""From logits to commits: pure functions of a block's state. docs/decoding.md has the rules."""

from __future__ import annotations

from relume.config import DecodingConfig, ModelConfig
from relume.core import Registry
from relume.decoding.block import Decoder
from relume.decoding.indel import IndelDecoder
from relume.decoding.joint import JointDecoder
from relume.decoding.threshold import ThresholdDecoder

DECODERS: Registry[type[Decoder]] = Registry(
    "decoder", {kind.name: kind for kind in (ThresholdDecoder, JointDecoder, IndelDecoder)}
)


def make_decoder(decoding: DecodingConfig, model: ModelConfig) -> Decoder:
    """The decoder that `decoding` asks for; by default `indel` for checkpoints made for it, else `threshold`."""
    default = "indel" if model.router.capacity and model.delete_token_id is not None else "threshold"
    return DECODERS[decoding.decoder or default](decoding, model)
