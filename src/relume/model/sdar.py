"""SDAR-MoE: the Qwen3-MoE architecture with block diffusion; softmax router, no bias, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relume.config import ModelConfig, RouterConfig, require
from relume.model.family import ConfigReader, Family, Parts

MASK_TOKEN_ID, EOS_TOKEN_ID = 151669, 151645


def read_config(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Translate config.json. Raises `RelumeError` that names a missing or contradictory key."""
    reader = ConfigReader(values, generation)
    common = reader.common(MASK_TOKEN_ID, EOS_TOKEN_ID)
    require(not values.get("mlp_only_layers"), "config.json: mlp_only_layers is set, which relume does not know")
    require(
        reader.integer("decoder_sparse_step", 1) == 1,
        "config.json: decoder_sparse_step is not 1, which relume does not know",
    )
    return ModelConfig(
        family="sdar",
        **common,
        rotary_dim=common["head_dim"],
        rope_theta=reader.rotary("rope_theta", 1_000_000.0),
        num_dense_layers=0,
        dense_size=0,
        shared_size=0,
        router=RouterConfig(
            num_experts=reader.integer("num_experts"),
            top_k=reader.integer("num_experts_per_tok"),
            score_function="softmax",
            has_bias=False,
            normalise=reader.flag("norm_topk_prob", False),
        ),
        block_length=reader.integer("block_length", reader.integer("block_size", 4)),
    )


def weights(config: ModelConfig) -> dict[str, Parts]:
    """Official tensors of every weight but the routed experts; query, key and value are fused on loading."""
    hidden, head = config.hidden_size, config.head_dim
    query_rows, key_rows = config.num_heads * head, config.num_kv_heads * head
    found: dict[str, Parts] = {
        "embeddings": (("model.embed_tokens.weight", (config.vocab_size, hidden)),),
        "final_norm": (("model.norm.weight", (hidden,)),),
    }
    if not config.tie_embeddings:
        found["lm_head"] = (("lm_head.weight", (config.vocab_size, hidden)),)
    for layer in range(config.num_layers):
        official, own = f"model.layers.{layer}", f"layers.{layer}"
        attention = f"{official}.self_attn"
        found |= {
            f"{own}.attention_norm": ((f"{official}.input_layernorm.weight", (hidden,)),),
            f"{own}.qkv": (
                (f"{attention}.q_proj.weight", (query_rows, hidden)),
                (f"{attention}.k_proj.weight", (key_rows, hidden)),
                (f"{attention}.v_proj.weight", (key_rows, hidden)),
            ),
            f"{own}.query_norm": ((f"{attention}.q_norm.weight", (head,)),),
            f"{own}.key_norm": ((f"{attention}.k_norm.weight", (head,)),),
            f"{own}.attention_out": ((f"{attention}.o_proj.weight", (hidden, query_rows)),),
            f"{own}.mlp_norm": ((f"{official}.post_attention_layernorm.weight", (hidden,)),),
            f"{own}.router": ((f"{official}.mlp.gate.weight", (config.router.num_experts, hidden)),),
        }
    return found


FAMILY = Family(
    name="sdar",
    architectures=("SDARMoeForCausalLM",),
    read_config=read_config,
    weights=weights,
    experts_prefix="model.layers.{layer}.mlp.experts",
)
