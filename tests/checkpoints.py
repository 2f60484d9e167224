"""Small random checkpoints in the official layouts, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 60
MASK, EOS, DELETE, SPLIT = 59, 58, 57, 56

LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "dtype": "float32",
}
LLADA22 = LLADA2 | {
    "expert_capacity": 6,
    "expert_capacity_window": 8,
    "delete_token_id": DELETE,
    "split_token_id": SPLIT,
}
SDAR: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 20,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "block_length": 4,
    "torch_dtype": "float32",
}


def make_tensors(config: dict[str, Any], seed: int = 0, stacked: bool = False) -> dict[str, torch.Tensor]:
    """Random tensors under their official names; the head is scaled up so that confidences spread over 0..1."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head, experts, size = config["head_dim"], config["num_experts"], config["moe_intermediate_size"]
    llada2 = config["architectures"] == ["LLaDA2MoeModelLM"]
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, scale: float = 1.0) -> None:
        tensors[name] = torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

    def norm(name: str, length: int) -> None:
        tensors[name] = 1.0 + 0.1 * torch.randn(length, generator=generator)

    def swiglu(prefix: str, width: int) -> None:
        matrix(f"{prefix}.gate_proj.weight", width, hidden)
        matrix(f"{prefix}.up_proj.weight", width, hidden)
        matrix(f"{prefix}.down_proj.weight", hidden, width, scale=2.0)

    embeddings = "model.word_embeddings.weight" if llada2 else "model.embed_tokens.weight"
    matrix(embeddings, config["vocab_size"], hidden, scale=hidden**0.5)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, scale=4.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm.weight", hidden)
        norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        if llada2:
            matrix(f"{prefix}.attention.query_key_value.weight", (heads + 2 * kv_heads) * head, hidden)
            norm(f"{prefix}.attention.query_layernorm.weight", head)
            norm(f"{prefix}.attention.key_layernorm.weight", head)
            matrix(f"{prefix}.attention.dense.weight", hidden, heads * head)
        else:
            for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                matrix(f"{prefix}.self_attn.{part}_proj.weight", rows * head, hidden)
            norm(f"{prefix}.self_attn.q_norm.weight", head)
            norm(f"{prefix}.self_attn.k_norm.weight", head)
            matrix(f"{prefix}.self_attn.o_proj.weight", hidden, heads * head)
        if llada2 and layer < config["first_k_dense_replace"]:
            swiglu(f"{prefix}.mlp", config["intermediate_size"])
            continue
        matrix(f"{prefix}.mlp.gate.weight", experts, hidden, scale=2.0)
        if llada2 and config["moe_router_enable_expert_bias"]:
            tensors[f"{prefix}.mlp.gate.expert_bias"] = 0.2 * torch.randn(experts, generator=generator)
        if llada2 and config["num_shared_experts"]:
            swiglu(f"{prefix}.mlp.shared_experts", size * config["num_shared_experts"])
        for expert in range(experts):
            swiglu(f"{prefix}.mlp.experts.{expert}", size)
        if stacked:
            for part in ("gate_proj", "up_proj", "down_proj"):
                names = [f"{prefix}.mlp.experts.{expert}.{part}.weight" for expert in range(experts)]
                tensors[f"{prefix}.mlp.experts.{part}"] = torch.stack([tensors.pop(name) for name in names])
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    num_shards: int = 1,
    tokenizer: bool = False,
) -> Path:
    """Write a folder in the official layout: one file, or shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        names = list(tensors)
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::num_shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_letter_tokenizer(folder)
    return folder


def write_letter_tokenizer(folder: Path) -> None:
    """A tokenizer whose id i is one character; the ids of the special tokens are special."""
    special = {EOS: "<eos>", MASK: "<mask>", DELETE: "<delete>", SPLIT: "<split>"}
    vocab = {special.get(token, chr(ord("A") + token)): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
