"""LLaDA2.0, 2.1 and 2.2: sigmoid router with bias, group-limited or with an expert capacity, shared expert.

Names and shapes follow the published checkpoints (`LLaDA2MoeModelLM`); 2.0 and 2.1 have the same
configuration, 2.2 adds `expert_capacity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relume.config import ModelConfig, RouterConfig
from relume.model.family import ConfigReader, Family, Parts

MASK_TOKEN_ID, EOS_TOKEN_ID = 156895, 156892
ROLE_END_TOKEN_ID, DELETE_TOKEN_ID, SPLIT_TOKEN_ID = 156900, 156930, 156931  # 2.2 only


def read_config(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Translate config.json. Raises `RelumeError` that names a missing or contradictory key."""
    reader = ConfigReader(values, generation)
    common = reader.common(MASK_TOKEN_ID, EOS_TOKEN_ID)
    vocab_size, eos_token_ids = common["vocab_size"], common["eos_token_ids"]
    capacity = reader.integer("expert_capacity", 0)
    if capacity and EOS_TOKEN_ID in eos_token_ids and vocab_size > ROLE_END_TOKEN_ID:
        common["eos_token_ids"] = tuple(dict.fromkeys((*eos_token_ids, ROLE_END_TOKEN_ID)))
    rotary_dim = int(common["head_dim"] * reader.rotary("partial_rotary_factor", 0.5))
    return ModelConfig(
        family="llada2",
        **common,
        rotary_dim=reader.integer("rotary_dim", rotary_dim),
        rope_theta=reader.rotary("rope_theta", 600_000.0),
        num_dense_layers=reader.integer("first_k_dense_replace", 0),
        dense_size=reader.integer("intermediate_size"),
        shared_size=common["expert_size"] * reader.integer("num_shared_experts", 0),
        router=RouterConfig(
            num_experts=reader.integer("num_experts"),
            top_k=reader.integer("num_experts_per_tok"),
            score_function=reader.text("score_function", "sigmoid"),
            has_bias=reader.flag("moe_router_enable_expert_bias", True),
            num_groups=reader.integer("n_group", 1),
            kept_groups=reader.integer("topk_group", 1),
            normalise=reader.flag("norm_topk_prob", True),
            scale=reader.number("routed_scaling_factor", 1.0),
            capacity=capacity,
            capacity_window=reader.integer("expert_capacity_window", 32),
        ),
        block_length=reader.integer("block_length", 32),
        delete_token_id=reader.token_id("delete_token_id", DELETE_TOKEN_ID if capacity else None, vocab_size),
        split_token_id=reader.token_id("split_token_id", SPLIT_TOKEN_ID if capacity else None, vocab_size),
    )


def weights(config: ModelConfig) -> dict[str, Parts]:
    """Official tensors of every weight but the routed experts."""
    hidden, head = config.hidden_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head
    found: dict[str, Parts] = {
        "embeddings": (("model.word_embeddings.weight", (config.vocab_size, hidden)),),
        "final_norm": (("model.norm.weight", (hidden,)),),
    }
    if not config.tie_embeddings:
        found["lm_head"] = (("lm_head.weight", (config.vocab_size, hidden)),)
    for layer in range(config.num_layers):
        official, own = f"model.layers.{layer}", f"layers.{layer}"
        attention, mlp = f"{official}.attention", f"{official}.mlp"
        found |= {
            f"{own}.attention_norm": ((f"{official}.input_layernorm.weight", (hidden,)),),
            f"{own}.qkv": ((f"{attention}.query_key_value.weight", (qkv_rows, hidden)),),
            f"{own}.query_norm": ((f"{attention}.query_layernorm.weight", (head,)),),
            f"{own}.key_norm": ((f"{attention}.key_layernorm.weight", (head,)),),
            f"{own}.attention_out": ((f"{attention}.dense.weight", (hidden, config.num_heads * head)),),
            f"{own}.mlp_norm": ((f"{official}.post_attention_layernorm.weight", (hidden,)),),
        }
        if layer < config.num_dense_layers:
            found |= _swiglu(f"{own}.dense", mlp, hidden, config.dense_size)
            continue
        found[f"{own}.router"] = ((f"{mlp}.gate.weight", (config.router.num_experts, hidden)),)
        if config.router.has_bias:
            found[f"{own}.router_bias"] = ((f"{mlp}.gate.expert_bias", (config.router.num_experts,)),)
        if config.shared_size:
            found |= _swiglu(f"{own}.shared", f"{mlp}.shared_experts", hidden, config.shared_size)
    return found


def _swiglu(own: str, official: str, hidden: int, size: int) -> dict[str, Parts]:
    return {
        f"{own}_gate_up": (
            (f"{official}.gate_proj.weight", (size, hidden)),
            (f"{official}.up_proj.weight", (size, hidden)),
        ),
        f"{own}_down": ((f"{official}.down_proj.weight", (hidden, size)),),
    }


FAMILY = Family(
    name="llada2",
    architectures=("LLaDA2MoeModelLM",),
    read_config=read_config,
    weights=weights,
    experts_prefix="model.layers.{layer}.mlp.experts",
)
