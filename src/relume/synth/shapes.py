"""Shapes of published models, and smaller ones of the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relume.config import ModelConfig, ShapeOverrides, require
from relume.core import Registry, RelumeError
from relume.model import llada2, sdar
from relume.model.families import read_config
from relume.model.family import Family

_LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "rope_theta": 600000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_SHAPES: Registry[Mapping[str, Any]] = Registry(
    "shape",
    {
        "llada2-mini": _LLADA2
        | {
            "num_hidden_layers": 20,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
        },
        "llada2-flash": _LLADA2
        | {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 32,
        },
        "sdar-30b": {
            "architectures": ["SDARMoeForCausalLM"],
            "model_type": "sdar_moe",
            "vocab_size": 151936,
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "block_length": 4,
        },
    },
)
SHAPE_NAMES = tuple(_SHAPES)


_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "dense_size": "intermediate_size",
    "groups": "n_group",
    "kept_groups": "topk_group",
    "block_length": "block_length",
    "expert_capacity": "expert_capacity",
}


@dataclass(frozen=True)
class Shape:
    """A model to synthesise.

    Attributes:
        json: content of config.json.
        family: tells the tensors' names.
        config: the same as `json`, in relume's words.
        special: ids of the special tokens by text; `eos` and `mask` are two of the texts.
    """

    json: Mapping[str, Any]
    family: Family
    config: ModelConfig
    special: Mapping[str, int]
    eos: str
    mask: str


def make_shape(like: str, overrides: ShapeOverrides | None = None, dtype: str = "bfloat16") -> Shape:
    """The shape called `like`, changed by `overrides`.

    Raises:
        RelumeError: an unknown name, an option that the family lacks, or sizes that contradict each other.
    """
    overrides = overrides or ShapeOverrides()
    base = _SHAPES[like]
    given = {name: value for name in _KEYS if (value := getattr(overrides, name)) is not None}
    is_llada2 = base["model_type"] == "llada2_moe"
    for name in ("dense_size", "groups", "kept_groups", "expert_capacity"):
        require(is_llada2 or name not in given, f"{name} does not apply to {like}, which has none")
    values = dict(base) | _in_proportion(base, overrides) | {_KEYS[name]: value for name, value in given.items()}
    if is_llada2:
        values["rotary_dim"] = int(values["head_dim"] * values["partial_rotary_factor"])
        if overrides.expert_capacity:
            values |= {"expert_capacity_window": values.get("block_length", 32), "rope_theta": 3000000}
            values |= {"use_qk_norm": True, "max_position_embeddings": 131072}
        if overrides.groups and not overrides.kept_groups:
            values["topk_group"] = max(1, overrides.groups // 2)
    special, eos, mask = _special_tokens(values, is_llada2)
    values |= {"mask_token_id": special[mask], "eos_token_id": special[eos], "pad_token_id": special[eos]}
    if overrides.expert_capacity:
        values |= {"delete_token_id": special["<|delete|>"], "split_token_id": special["<|split|>"]}
    values |= {"dtype": dtype}
    try:
        family, config = read_config(Path(like), values, {})
    except RelumeError as error:
        raise RelumeError(f"these sizes make no model: {error}") from None
    require(
        len(config.moe_layers) > 0,
        f"{config.num_layers} layers hold no experts: the first {config.num_dense_layers} of {like} are dense",
    )
    return Shape(values, family, config, special, eos, mask)


def _in_proportion(base: Mapping[str, Any], overrides: ShapeOverrides) -> dict[str, int]:
    """Head counts and widths for another hidden size: whole heads, widths in steps of 16."""
    if overrides.hidden is None:
        return {}
    ratio = overrides.hidden / base["hidden_size"]
    kv_heads = overrides.kv_heads or max(1, round(base["num_key_value_heads"] * min(1.0, ratio)))
    heads = max(1, round(base["num_attention_heads"] * ratio / kv_heads)) * kv_heads
    widths = {
        key: max(16, round(base[key] * ratio / 16) * 16) for key in ("intermediate_size", "moe_intermediate_size")
    }
    return widths | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _special_tokens(values: Mapping[str, Any], is_llada2: bool) -> tuple[dict[str, int], str, str]:
    """Special tokens at their published ids, or at the end of a vocabulary that does not reach so far."""
    if is_llada2:
        ids = {
            "<|endoftext|>": llada2.EOS_TOKEN_ID,
            "<|mask|>": llada2.MASK_TOKEN_ID,
            "<|role_end|>": llada2.ROLE_END_TOKEN_ID,
            "<|delete|>": llada2.DELETE_TOKEN_ID,
            "<|split|>": llada2.SPLIT_TOKEN_ID,
        }
    else:
        ids = {"<|im_end|>": sdar.EOS_TOKEN_ID, "<|MASK|>": sdar.MASK_TOKEN_ID, "<|role_end|>": 151644}
    vocab_size = values["vocab_size"]
    require(
        vocab_size >= 256 + len(ids),
        f"a vocabulary of {vocab_size} is too small: 256 bytes and {len(ids)} special tokens need a place",
    )
    if max(ids.values()) >= vocab_size:
        ids = {text: vocab_size - len(ids) + index for index, text in enumerate(ids)}
    eos, mask, *_ = ids
    return ids, eos, mask
