"""A slow, obvious forward pass of LLaDA2.x and SDAR-MoE, used by the tests only.

It was written from the description of the checkpoints alone, by somebody who did not look at the engine, and
imports nothing from it: when the two agree, they do not agree because they share a mistake. It keeps every
weight in float32, has no cache, runs over the whole window each time and makes its choices with plain loops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

LLADA2 = "LLaDA2MoeModelLM"
SDAR = "SDARMoeForCausalLM"


def best_first(values: list[float]) -> list[int]:
    """All indices, largest value first; equal values keep the order of their indices."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def top_indices(values: list[float], count: int) -> list[int]:
    return best_first(values)[:count]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return x / torch.sqrt(mean_square + eps) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def block_causal_mask(length: int, block_length: int) -> torch.Tensor:
    """[T, T] of bool: may the query (row) see the key (column)?"""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        end_of_block = (query // block_length + 1) * block_length
        mask[query, : min(end_of_block, length)] = True
    return mask


def rotate(x: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    """Rotary embedding of x [T, heads, head_dim], positions from 0, on the first `rotary_dim` dimensions."""
    half = rotary_dim // 2
    out = x.clone()
    positions = torch.arange(x.shape[0], dtype=torch.float32)
    for i in range(half):
        angle = positions * (1.0 / theta ** (2 * i / rotary_dim))
        cos = torch.cos(angle)[:, None]
        sin = torch.sin(angle)[:, None]
        out[:, :, i] = x[:, :, i] * cos - x[:, :, i + half] * sin
        out[:, :, i + half] = x[:, :, i + half] * cos + x[:, :, i] * sin
    return out


@dataclass
class NaiveModel:
    """A checkpoint as it lies on disk, with its forward pass."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def open(cls, folder: Path) -> NaiveModel:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            for key, tensor in load_file(folder / name).items():
                tensors[key] = tensor.to(torch.float32)
        return cls(config, tensors)

    @property
    def family(self) -> str:
        name = str(self.config["architectures"][0])
        if name not in {LLADA2, SDAR}:
            raise ValueError(f"unknown architecture {name}")
        return name

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    def logits(self, tokens: list[int], block_length: int) -> torch.Tensor:
        """Float32 logits [T, vocab] of one full forward with the strict block-causal mask."""
        embedding_name = "model.embed_tokens.weight" if self.family == SDAR else "model.word_embeddings.weight"
        embedding = self.tensors[embedding_name]
        mask = block_causal_mask(len(tokens), block_length)
        x = embedding[torch.tensor(tokens, dtype=torch.long)]
        for layer in range(int(self.config["num_hidden_layers"])):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(prefix, self.norm(f"{prefix}.input_layernorm", x), mask)
            normed = self.norm(f"{prefix}.post_attention_layernorm", x)
            if self.family == LLADA2 and layer < int(self.config.get("first_k_dense_replace", 0)):
                x = x + self.feed_forward(f"{prefix}.mlp", normed)
            else:
                x = x + self.mixture(f"{prefix}.mlp", normed)
        x = self.norm("model.norm", x)
        head = embedding if self.config.get("tie_word_embeddings") else self.tensors["lm_head.weight"]
        return x @ head.T

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], float(self.config.get("rms_norm_eps", 1e-6)))

    # Attention

    def queries_keys_values(self, prefix: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, heads, head_dim] three times, the first two normalised per head."""
        heads = int(self.config["num_attention_heads"])
        kv_heads = int(self.config["num_key_value_heads"])
        dim = self.head_dim
        if self.family == LLADA2:
            fused = x @ self.tensors[f"{prefix}.attention.query_key_value.weight"].T
            q = fused[:, : heads * dim]
            k = fused[:, heads * dim : (heads + kv_heads) * dim]
            v = fused[:, (heads + kv_heads) * dim :]
            q_norm, k_norm = f"{prefix}.attention.query_layernorm", f"{prefix}.attention.key_layernorm"
        else:
            q = x @ self.tensors[f"{prefix}.self_attn.q_proj.weight"].T
            k = x @ self.tensors[f"{prefix}.self_attn.k_proj.weight"].T
            v = x @ self.tensors[f"{prefix}.self_attn.v_proj.weight"].T
            q_norm, k_norm = f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm"
        q = q.reshape(-1, heads, dim)
        k = k.reshape(-1, kv_heads, dim)
        v = v.reshape(-1, kv_heads, dim)
        if self.family == SDAR or self.config.get("use_qk_norm", True):
            q = self.norm(q_norm, q)
            k = self.norm(k_norm, k)
        return q, k, v

    def rotary(self) -> tuple[int, float]:
        """How many dimensions turn, and the base."""
        parameters: dict[str, Any] = self.config.get("rope_parameters") or {}
        theta = self.config.get("rope_theta", parameters.get("rope_theta"))
        if theta is None:
            raise ValueError("the config has no rope_theta")
        if self.family == SDAR:
            return self.head_dim, float(theta)
        factor = self.config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))
        return int(self.config.get("rotary_dim") or self.head_dim * float(factor)), float(theta)

    def attention(self, prefix: str, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.queries_keys_values(prefix, x)
        rotary_dim, theta = self.rotary()
        q = rotate(q, rotary_dim, theta)
        k = rotate(k, rotary_dim, theta)
        heads, kv_heads = q.shape[1], k.shape[1]
        outputs: list[torch.Tensor] = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, shared].T / self.head_dim**0.5
            scores = torch.where(mask, scores, torch.tensor(float("-inf")))
            outputs.append(torch.softmax(scores, dim=-1) @ v[:, shared])
        name = "attention.dense" if self.family == LLADA2 else "self_attn.o_proj"
        return torch.cat(outputs, dim=-1) @ self.tensors[f"{prefix}.{name}.weight"].T

    # Feed-forward

    def feed_forward(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = x @ self.tensors[f"{prefix}.gate_proj.weight"].T
        up = x @ self.tensors[f"{prefix}.up_proj.weight"].T
        return (silu(gate) * up) @ self.tensors[f"{prefix}.down_proj.weight"].T

    def expert(self, prefix: str, number: int, x: torch.Tensor) -> torch.Tensor:
        """One routed expert, whether the experts are stored one by one or stacked."""
        if f"{prefix}.experts.gate_proj" not in self.tensors:
            return self.feed_forward(f"{prefix}.experts.{number}", x)
        gate = x @ self.tensors[f"{prefix}.experts.gate_proj"][number].T
        up = x @ self.tensors[f"{prefix}.experts.up_proj"][number].T
        return (silu(gate) * up) @ self.tensors[f"{prefix}.experts.down_proj"][number].T

    def mixture(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        routes = self.route(prefix, x)
        out = torch.zeros_like(x)
        for number in range(int(self.config["num_experts"])):
            rows = [row for row, route in enumerate(routes) if number in route]
            if not rows:
                continue
            weights = torch.tensor([routes[row][number] for row in rows], dtype=torch.float32)
            out[rows] += self.expert(prefix, number, x[rows]) * weights[:, None]
        if self.family == LLADA2 and int(self.config.get("num_shared_experts") or 0) > 0:
            out = out + self.feed_forward(f"{prefix}.shared_experts", x)
        return out

    def route(self, prefix: str, x: torch.Tensor) -> list[dict[int, float]]:
        """For every token: chosen expert -> weight."""
        router_logits = x @ self.tensors[f"{prefix}.gate.weight"].T
        if self.family == SDAR:
            return self.route_softmax(torch.softmax(router_logits, dim=-1))
        scores = torch.sigmoid(router_logits)
        bias = self.tensors.get(f"{prefix}.gate.expert_bias")
        biased = scores if bias is None else scores + bias
        return self.route_sigmoid(scores.tolist(), biased.tolist())

    def route_softmax(self, probabilities: torch.Tensor) -> list[dict[int, float]]:
        routes: list[dict[int, float]] = []
        for row in probabilities.tolist():
            chosen = top_indices(row, int(self.config["num_experts_per_tok"]))
            total = sum(row[e] for e in chosen) if self.config.get("norm_topk_prob") else 1.0
            routes.append({e: row[e] / total for e in chosen})
        return routes

    def route_sigmoid(self, scores: list[list[float]], biased: list[list[float]]) -> list[dict[int, float]]:
        scaling = float(self.config.get("routed_scaling_factor", 1.0))
        capacity = int(self.config.get("expert_capacity") or 0)
        window = int(self.config.get("expert_capacity_window") or 32)
        routes: list[dict[int, float]] = []
        allowed: set[int] = set()
        for token, row in enumerate(biased):
            if capacity == 0:
                allowed = self.allowed_by_groups(row)
            elif token % window == 0:
                allowed = self.admitted(biased[token : token + window], capacity)
            ranked = [value if e in allowed else float("-inf") for e, value in enumerate(row)]
            chosen = top_indices(ranked, int(self.config["num_experts_per_tok"]))
            total = 1.0
            if self.config.get("norm_topk_prob", True):
                total = sum(scores[token][e] for e in chosen) + 1e-20
            routes.append({e: scores[token][e] / total * scaling for e in chosen})
        return routes

    def allowed_by_groups(self, row: list[float]) -> set[int]:
        """The experts of the groups whose two best biased scores have the largest sums."""
        groups = int(self.config.get("n_group") or 1)
        kept = int(self.config.get("topk_group") or groups)
        size = len(row) // groups
        sums: list[float] = []
        for group in range(groups):
            members = sorted(row[group * size : (group + 1) * size], reverse=True)
            sums.append(sum(members[:2]))
        allowed: set[int] = set()
        for group in top_indices(sums, kept):
            allowed.update(range(group * size, (group + 1) * size))
        return allowed

    @staticmethod
    def admitted(rows: list[list[float]], capacity: int) -> set[int]:
        """Block routing: the experts that some token of the window wants most."""
        wanted = [max(row[e] for row in rows) for e in range(len(rows[0]))]
        return set(top_indices(wanted, capacity))
