"""The model, tokenizer and files that a configuration starts from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from relume.checkpoint.byte_tokenizer import NUM_BYTES, byte_tokenizer_files
from relume.checkpoint.hub import resolve_model
from relume.checkpoint.tokenizer import TOKENIZER_FILES, Tokenizer
from relume.config import ModelConfig
from relume.core import RelumeError
from relume.model import llada2
from relume.model.families import read_config
from relume.model.family import Family
from relume.train.config import ModelSection
from relume.train.initial import random_weights, read_weights

_EOS, _MASK = "<|endoftext|>", "<|mask|>"
#: What the chat template repeats is one token each, so that short prompts stay short.
SPECIAL_TOKENS = (
    "<role>SYSTEM</role>",
    "<role>HUMAN</role>",
    "<role>ASSISTANT</role>",
    "<|role_end|>",
    "detailed thinking off",
    _EOS,
    _MASK,
)
_FIXED = {"architectures": list(llada2.FAMILY.architectures), "model_type": "llada2_moe"}
#: Keys that [model.shape] may hold: those of the official config.json that describe a shape.
SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "partial_rotary_factor",
    "rope_theta",
    "rms_norm_eps",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "norm_topk_prob",
    "score_function",
    "moe_router_enable_expert_bias",
    "expert_capacity",
    "expert_capacity_window",
    "max_position_embeddings",
    "tie_word_embeddings",
    "block_length",
)


@dataclass(frozen=True)
class StartingPoint:
    """What training begins with.

    Attributes:
        weights: float32, by relume's names, experts stacked.
        config_json, files: what an exported folder holds besides tensors.
    """

    family: Family
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    config_json: Mapping[str, Any]
    files: Mapping[str, str | Mapping[str, Any]]


def starting_point(section: ModelSection, seed: int) -> StartingPoint:
    """Random weights with the byte tokenizer, or a checkpoint's weights with its own.

    Raises:
        RelumeError: an unknown or contradictory shape, or a checkpoint that cannot be read.
    """
    return (
        _from_checkpoint(resolve_model(section.init, None, False)) if section.init else _from_shape(section, seed)
    )


def _from_shape(section: ModelSection, seed: int) -> StartingPoint:
    for key in section.shape:
        if key not in SHAPE_KEYS:
            raise RelumeError(f"[model.shape] unknown key {key!r}: known are {', '.join(SHAPE_KEYS)}")
    special = {text: NUM_BYTES + index for index, text in enumerate(SPECIAL_TOKENS)}
    vocab_size = -(-(NUM_BYTES + len(special)) // 8) * 8
    values = _FIXED | {
        **section.shape,
        "vocab_size": vocab_size,
        "mask_token_id": special[_MASK],
        "eos_token_id": special[_EOS],
        "pad_token_id": special[_EOS],
    }
    family, config = read_config(Path("[model.shape]"), values, {})
    files = byte_tokenizer_files(vocab_size, special, _EOS, _MASK)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (Path(folder) / name).write_text(text, encoding="utf-8")
        tokenizer = Tokenizer(Path(folder))
    weights = random_weights(family, config, torch.Generator().manual_seed(seed))
    return StartingPoint(family, config, weights, tokenizer, values, files)


def _from_checkpoint(folder: Path) -> StartingPoint:
    checkpoint, family, config, weights = read_weights(folder)
    kept = (*TOKENIZER_FILES, "generation_config.json")
    files = {name: (folder / name).read_text(encoding="utf-8") for name in kept if (folder / name).exists()}
    return StartingPoint(family, config, weights, Tokenizer(folder), dict(checkpoint.config), files)
