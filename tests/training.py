"""Small trainings for the tests."""

from __future__ import annotations

from typing import Any

from relume.train.config import TrainConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1000.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "block_length": 8,
}


def small_config(**sections: dict[str, Any]) -> TrainConfig:
    """A training of a tiny model; keywords override values of the sections they name."""
    values: dict[str, Any] = {
        "model": {"shape": SHAPE},
        "data": {"tasks": {"uppercase_words": 1.0}, "batch_size": 8, "micro_positions": 384},
        "objective": {"copies": 2},
        "optimizer": {"lr": 3e-3, "warmup_steps": 5, "ema_decay": 0.9},
        "run": {"steps": 12, "log_steps": 1, "save_seconds": 0.0},
    }
    return TrainConfig.from_mapping(
        {name: {**section, **sections.get(name, {})} for name, section in values.items()}
    )
