"""The model as a differentiable function of a batch, with the weights that inference loads.

The mathematics is that of `relume.model.transformer`; only the batching differs: rows of equal length with a
mask, instead of ragged segments with a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig, require
from relume.core import Phase, Routing
from relume.experts.kernels import swiglu
from relume.model.layers import rotary_table, rotate
from relume.routing import route
from relume.routing.choice import NATIVE, RoutingChoice
from relume.routing.tokens import RoutedTokens
from relume.train.expert_compute import expert_output
from relume.train.norm import trained_rms_norm
from relume.train.objective import CLEAN, Batch, attention_mask


@dataclass(frozen=True)
class Output:
    """What a forward gives.

    Attributes:
        logits: `[predicted, vocab]` float32, of the positions with a loss weight, row by row.
        expert_ids: `[moe layers, rows * length, top_k]` int64: the routing of every position.
    """

    logits: torch.Tensor
    expert_ids: torch.Tensor


class Network:
    """Weights and the forward over them.

    Args:
        config: the model's shape.
        weights: float32, by the names of `Family.weights` and `layers.N.expert_gate_up`, `layers.N.expert_down`.
        dtype: in which matrices are multiplied; routing, norms' sums and the softmax are float32 throughout.
        routing: with which tokens choose experts. A window never reaches beyond a block, so that padding votes
            with padding only; nothing is resident, and no candidate has been seen.

    Raises:
        RelumeError: a shape or a routing that cannot be trained.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype,
        routing: RoutingChoice = NATIVE,
    ) -> None:
        require(
            not config.router.capacity or config.block_length % config.router.capacity_window == 0,
            f"block_length {config.block_length} is no multiple of the capacity window "
            f"{config.router.capacity_window}",
        )
        require(
            bool(config.moe_layers), f"all {config.num_layers} layers are dense: one at least must hold experts"
        )
        for name in ("hidden_size", "expert_size"):
            width = getattr(config, name)
            require(width % 8 == 0, f"{name} is {width}: grouped matrix products need a multiple of 8")
        routing.check(config.router)
        routing.check_block_length(config.block_length)
        require(not routing.is_ragged, f"routing {routing}: tokens must have as many experts each to be trained")
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.routing = routing

    def forward(self, batch: Batch) -> Output:
        """Logits of the positions that `batch` gives a loss weight."""
        config, weights = self.config, self._cast()
        num_rows, length = batch.token_ids.shape
        mask = attention_mask(batch.blocks, batch.copies).unsqueeze(1)
        table = rotary_table(config, 0, int(batch.positions.max()) + 1, self.dtype, batch.token_ids.device)
        rotary = (table[0][batch.positions].unsqueeze(1), table[1][batch.positions].unsqueeze(1))
        x = F.embedding(batch.token_ids.flatten(), weights["embeddings"])
        chosen = []
        for layer in range(config.num_layers):
            own = {role: weights[f"layers.{layer}.{role}"] for role in self._roles(layer)}
            normed = trained_rms_norm(x, own["attention_norm"], config.rms_norm_eps)
            x = x + self._attention(normed.view(num_rows, length, -1), own, rotary, mask).flatten(0, 1)
            normed = trained_rms_norm(x, own["mlp_norm"], config.rms_norm_eps)
            if layer < config.num_dense_layers:
                x = x + swiglu(normed, own["dense_gate_up"], own["dense_down"])
                continue
            routing = self.route(normed, own["router"], own.get("router_bias"), batch)
            routed = expert_output(normed, routing, own["expert_gate_up"], own["expert_down"])
            if config.shared_size:
                routed = routed + swiglu(normed, own["shared_gate_up"], own["shared_down"])
            x = x + routed
            chosen.append(routing.expert_ids)
        wanted = x[batch.loss_weights.flatten() > 0]
        wanted = trained_rms_norm(wanted, weights["final_norm"], config.rms_norm_eps)
        head = weights.get("lm_head", weights["embeddings"])
        return Output(F.linear(wanted, head).float(), torch.stack(chosen))

    def route(
        self, normed: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, batch: Batch
    ) -> Routing:
        """Routing of the batch's `[rows * length, hidden]`, whole blocks one after the other, in float32."""
        logits = F.linear(normed.float(), router)
        length, masked = self.config.block_length, batch.masked.flatten()
        chosen = route(logits, bias, self.config.router, self.routing, RoutedTokens(length, Phase.DENOISE, masked))
        if self.routing.prefill != "native":
            return chosen
        own = route(logits, bias, self.config.router)
        clean = (batch.copies.flatten() == CLEAN).unsqueeze(1)  # what inference sees in prefills and commits
        return Routing(
            torch.where(clean, own.expert_ids, chosen.expert_ids), torch.where(clean, own.weights, chosen.weights)
        )

    def _attention(
        self,
        normed: torch.Tensor,
        own: dict[str, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Attention output `[rows, length, hidden]`."""
        config = self.config
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        qkv = F.linear(normed, own["qkv"]).view(*normed.shape[:2], -1, config.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
        query = rotate(trained_rms_norm(query, own["query_norm"], eps).transpose(1, 2), rotary)
        key = rotate(trained_rms_norm(key, own["key_norm"], eps).transpose(1, 2), rotary)
        out = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), attn_mask=mask, enable_gqa=heads != kv_heads
        )
        return F.linear(out.transpose(1, 2).flatten(2), own["attention_out"])

    def _roles(self, layer: int) -> list[str]:
        prefix = f"layers.{layer}."
        return [name.removeprefix(prefix) for name in self.weights if name.startswith(prefix)]

    def _cast(self) -> dict[str, torch.Tensor]:
        """Weights in the compute type; the router stays float32, as at inference."""
        return {
            name: weight if name.endswith((".router", ".router_bias")) else weight.to(self.dtype)
            for name, weight in self.weights.items()
        }
