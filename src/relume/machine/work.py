"""What a forward has to compute and to move, from a model's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

from relume.config import ModelConfig, require


@dataclass(frozen=True)
class WorkShape:
    """The sizes that take time; norms, biases and the embedding, read a row a token, take next to none.

    Attributes:
        hidden_size, expert_size: of a token, and of a routed expert's inner layer.
        num_layers, num_dense_layers: in all, and those at the start without experts.
        attention_parameters: of a layer's four projections.
        query_group: query heads that share a key and value head.
        shared_parameters: of an MoE layer's shared expert; 0 if there is none.
        dense_parameters: of the feed-forward part of a layer without experts.
        router_parameters: of an MoE layer.
        head_parameters: of the vocabulary's projection.
        kv_bytes_per_position: of a layer.
        expert_bytes: of one routed expert as it lies in a slot, quantised or not.
        itemsize: bytes of a number of everything but the experts, and of what is computed: 2 or 4.
    """

    hidden_size: int
    expert_size: int
    num_layers: int
    num_dense_layers: int
    attention_parameters: int
    query_group: int
    shared_parameters: int
    dense_parameters: int
    router_parameters: int
    head_parameters: int
    kv_bytes_per_position: int
    expert_bytes: int
    itemsize: int

    def __post_init__(self) -> None:
        may_be_zero = {"num_dense_layers", "shared_parameters", "dense_parameters"}
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name not in may_be_zero)
            require(value >= least, f"{field.name} is {value}: it must be at least {least}")
        require(self.itemsize in {2, 4}, f"itemsize is {self.itemsize}: known are 2 (bfloat16) and 4 (float32)")
        require(
            self.num_dense_layers < self.num_layers,
            f"num_dense_layers is {self.num_dense_layers} of {self.num_layers}: no layer holds experts",
        )

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int, expert_bytes: int) -> Self:
        """Of a model that computes in numbers of `itemsize` bytes and whose slots are of `expert_bytes`."""
        hidden, queries = config.hidden_size, config.num_heads * config.head_dim
        kv_values = 2 * config.num_kv_heads * config.head_dim
        return cls(
            hidden_size=hidden,
            expert_size=config.expert_size,
            num_layers=config.num_layers,
            num_dense_layers=config.num_dense_layers,
            attention_parameters=hidden * (2 * queries + kv_values),
            query_group=config.num_heads // config.num_kv_heads,
            shared_parameters=3 * hidden * config.shared_size,
            dense_parameters=3 * hidden * config.dense_size,
            router_parameters=hidden * config.router.num_experts,
            head_parameters=hidden * config.vocab_size,
            kv_bytes_per_position=kv_values * itemsize,
            expert_bytes=expert_bytes,
            itemsize=itemsize,
        )

    def with_moe_layers(self, number: int) -> Self:
        """The same model with another number of layers that hold experts."""
        return replace(self, num_layers=self.num_dense_layers + number)

    @property
    def num_moe_layers(self) -> int:
        """Layers that hold experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert: gate, up and down projections."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def kv_values_per_position(self) -> int:
        """Numbers that a position's keys and values take in a layer."""
        return self.kv_bytes_per_position // self.itemsize
