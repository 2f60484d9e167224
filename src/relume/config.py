"""Frozen configurations that validate themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from relume.core import RelumeError

DecoderName = Literal["threshold", "joint", "indel"]
JointMode = Literal["quality", "speed"]
DTypeName = Literal["auto", "float32", "bfloat16"]
ReadMode = Literal["auto", "direct", "buffered"]
ShapeName = Literal["llada2-mini", "llada2-flash", "sdar-30b"]
PackedFormatName = Literal["bf16", "int8", "int4"]
GroupSize = Literal[32, 64, 128]

#: Inputs that share a scale in `int4` experts, unless told otherwise.
DEFAULT_GROUP_SIZE = 64
#: Tokens of a prompt in one forward unless told otherwise.
PREFILL_TOKENS = 512


def require(condition: bool, message: str) -> None:
    """Raise `RelumeError(message)` unless `condition` holds."""
    if not condition:
        raise RelumeError(message)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `RelumeError` that lists the choices unless `value` is one of them."""
    names = ", ".join(str(choice) for choice in choices if choice is not None)
    require(value in choices, f"unknown {name} {value!r}: choose one of {names}")


def require_known(kind: str, keys: Iterable[str], config: type[Any]) -> None:
    """Raise `RelumeError` that lists the fields of a configuration class unless all keys are among them."""
    known = [field.name for field in fields(config)]
    for key in keys:
        require(key in known, f"unknown {kind} {key!r}: known are {', '.join(known)}")


def require_types(config: Any) -> None:
    """Raise `RelumeError` for a field of a configuration whose value is not of its annotated type."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = get_args(hints[field.name]) if _is_union(hints[field.name]) else (hints[field.name],)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(
                "null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds
            )
            raise RelumeError(f"{field.name} is {value!r}: {wanted} was expected")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in {Union, UnionType}


def _is_a(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str)  # which one is for `require_choice` to say
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(part, get_args(kind)[0]) for part in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


@dataclass(frozen=True)
class RouterConfig:
    """How one MoE layer chooses experts.

    Attributes:
        score_function: `sigmoid` (LLaDA2) or `softmax` (SDAR).
        has_bias: a per-expert bias is added to the scores for selection only, never to the weights.
        num_groups, kept_groups: group-limited top-k; 1 and 1 mean no groups.
        normalise: divide the chosen scores by their sum; `scale` multiplies afterwards.
        capacity: experts admitted per window of `capacity_window` tokens (LLaDA2.2); 0 means no such limit.
            It takes precedence over the groups, which 2.2 checkpoints still declare.
    """

    num_experts: int
    top_k: int
    score_function: str = "sigmoid"
    has_bias: bool = True
    num_groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    capacity: int = 0
    capacity_window: int = 32

    def __post_init__(self) -> None:
        require(
            self.score_function in {"sigmoid", "softmax"},
            f"score_function is {self.score_function!r}; known are sigmoid and softmax",
        )
        require(
            1 <= self.top_k <= self.num_experts,
            f"num_experts_per_tok is {self.top_k}, which must lie in 1..num_experts ({self.num_experts})",
        )
        require(
            self.num_groups >= 1 and self.num_experts % self.num_groups == 0,
            f"n_group is {self.num_groups}, which must divide num_experts ({self.num_experts})",
        )
        require(
            1 <= self.kept_groups <= self.num_groups,
            f"topk_group is {self.kept_groups}, which must lie in 1..n_group ({self.num_groups})",
        )
        require(self.capacity_window >= 1, f"the capacity window is {self.capacity_window}: it must be at least 1")
        if self.capacity:
            require(
                self.top_k <= self.capacity <= self.num_experts,
                f"expert_capacity is {self.capacity}, which must lie in num_experts_per_tok..num_experts "
                f"({self.top_k}..{self.num_experts})",
            )
        else:
            reachable = self.kept_groups * (self.num_experts // self.num_groups)
            require(
                self.top_k <= reachable,
                f"num_experts_per_tok is {self.top_k} but the {self.kept_groups} kept groups hold only "
                f"{reachable} experts",
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, in relume's words; a family translates its `config.json` into one.

    `shared_size` is the width of the shared expert (0: none); `dense_size` that of the first
    `num_dense_layers` feed-forward layers. Token ids that a checkpoint lacks are `None`. `routing` is the one that
    the model is made for, as `routing.choice.RoutingChoice.parse` reads it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_dense_layers: int
    dense_size: int
    expert_size: int
    shared_size: int
    router: RouterConfig
    max_context: int
    block_length: int
    tie_embeddings: bool = False
    mask_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    delete_token_id: int | None = None
    split_token_id: int | None = None
    routing: str = "native"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "expert_size",
            "max_context",
            "block_length",
        ):
            require(getattr(self, name) >= 1, f"config: {name} is {getattr(self, name)}, which must be positive")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"config: num_attention_heads ({self.num_heads}) is no multiple of num_key_value_heads "
            f"({self.num_kv_heads})",
        )
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0,
            f"config: the rotary dimension is {self.rotary_dim}; it must be even and at most head_dim "
            f"({self.head_dim})",
        )
        require(
            isfinite(self.rope_theta) and self.rope_theta > 0,
            f"config: rope_theta is {self.rope_theta}: it must be positive",
        )
        for name in ("mask_token_id", "delete_token_id", "split_token_id"):
            token = getattr(self, name)
            require(
                token is None or 0 <= token < self.vocab_size,
                f"config: {name} is {token}, outside the vocabulary of {self.vocab_size}",
            )

    @property
    def moe_layers(self) -> range:
        """Indices of the layers that hold experts."""
        return range(self.num_dense_layers, self.num_layers)

    @property
    def parameters_per_expert(self) -> int:
        """Weights in one routed expert (gate, up and down projections)."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def kv_values_per_token(self) -> int:
        """Key and value elements that one token adds to the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DecodingConfig:
    """How one request is decoded. `None` leaves a choice to the model or the decoder.

    An option that the decoder does not have is refused, never ignored.

    Attributes:
        decoder: `threshold` (LLaDA2.0), `joint` (2.1) or `indel` (2.2).
        mode: of `joint`, which it implies: `quality` or `speed`, the published thresholds (.7/.5 and .5/.0).
        threshold: a masked position commits when its confidence is greater.
        edit_threshold: of `joint` and `indel`: a committed token changes when another is predicted with a
            greater confidence.
        block_length: positions decoded together.
        iterations: of `threshold` and `indel`: iterations over which a block's quota of commits is spread; by
            default `block_length`, at least one commit an iteration.
        max_post_iterations: of `joint` and `indel`: iterations after the last mask is gone; by default 16.
        max_tokens: the longest answer.
        temperature: 0 is argmax, ties to the lowest id. `top_k` 0 and `top_p` 1 filter nothing.
        seed: of this request's own random draws.
        stop: strings that end the answer; they are not part of it.
        ignore_eos: decode `max_tokens` whatever the model says (for measurements).
        eos_early_stop: of `threshold`, by default on: leave a block as soon as nothing before a committed end
            of text is masked. The answer is the same, with fewer iterations.
    """

    decoder: DecoderName | None = None
    mode: JointMode | None = None
    threshold: float | None = None
    edit_threshold: float | None = None
    block_length: int | None = None
    iterations: int | None = None
    max_post_iterations: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_early_stop: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, (str, list, type(None))):
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            object.__setattr__(self, "stop", stop)
        require_types(self)
        require_choice("decoder", self.decoder, (None, *get_args(DecoderName)))
        require_choice("mode", self.mode, (None, *get_args(JointMode)))
        if self.decoder is None and self.mode is not None:
            object.__setattr__(self, "decoder", "joint")
        require(all(self.stop), "a stop string is empty: leave it out")
        for name in ("threshold", "edit_threshold"):
            value = getattr(self, name)
            require(value is None or 0.0 <= value <= 1.0, f"{name} is {value}: it must lie in 0..1")
        for name, least in (
            ("block_length", 1),
            ("iterations", 1),
            ("max_tokens", 1),
            ("max_post_iterations", 0),
            ("top_k", 0),
        ):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} is {value}: it must be at least {least}")
        require(
            isfinite(self.temperature) and self.temperature >= 0.0,
            f"temperature is {self.temperature}: it must be 0 (argmax) or a positive number",
        )
        require(0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}: it must be above 0 and at most 1")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}: it must lie in 0..2^63-1")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from keyword values. Raises `RelumeError` that lists the known keys for an unknown one."""
        require_known("decoding option", values, cls)
        return cls(**values)


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        dtype: `auto` (the checkpoint's), `float32` or `bfloat16`.
        device: a torch device, `cpu` or `cuda`.
        prefill_blocks: blocks of a prompt in one forward, which bounds the activations that a long prompt takes;
            `None` for as many as hold `PREFILL_TOKENS`.
        max_batch: requests that decode together; more wait their turn. Memory is planned for so many, each of
            `context` positions, and is then missing for experts.
        exact_batches: compute each request's rows apart, so that its tokens do not depend on its company. Off, a
            batch reads the dense weights once, and rounding may then change a token.
        strategy: which experts stay near the compute, and more: as `strategy.strategies.Strategy.parse` reads it,
            or `auto`.
        expert_memory: of resident experts: `auto` (as many as fit), a share as `40%`, a size as `8GiB`, or experts
            of each layer as `100`.
        layer_slots: resident experts of each MoE layer instead, separated by commas.
        shared_pool: let all layers share the slots.
        profile: a file of `relume trace profile`, which some strategies need.
        memory: what the whole engine may take, as `8GiB`; by default what this process may use.
        context: positions of each request that are planned for; by default what fits easily.
        reads: experts from disk `direct` (past the page cache), `buffered`, or `auto`: direct unless all of them
            are resident.
        host_memory: experts that are held in RAM besides, as `expert_memory`: beside a GPU, to spare the disk.
        num_threads: that compute; by default one a core.
        hardware: a machine to charge the time of, instead of taking this one's: a name of
            `machine.hardware.HARDWARE`, `this`, or the path of a profile.
        routing: how tokens choose experts, as `routing.choice.RoutingChoice.parse` reads it; by default as the
            model's checkpoint says, which is `native` unless it was trained for another. Any other is lossy.
    """

    dtype: DTypeName = "auto"
    device: str = "cpu"
    prefill_blocks: int | None = None
    max_batch: int = 4
    exact_batches: bool = True
    strategy: str = "auto"
    expert_memory: str = "auto"
    layer_slots: str | None = None
    shared_pool: bool = False
    profile: str | None = None
    memory: str | None = None
    context: int | None = None
    reads: ReadMode = "auto"
    host_memory: str | None = None
    num_threads: int | None = None
    hardware: str | None = None
    routing: str | None = None

    def __post_init__(self) -> None:
        require_types(self)
        kind = self.device.partition(":")[0]
        require(kind in {"cpu", "cuda"}, f"device {self.device!r} cannot be used: choose cpu or cuda")
        require_choice("dtype", self.dtype, get_args(DTypeName))
        require(
            self.prefill_blocks is None or self.prefill_blocks >= 1,
            f"prefill_blocks is {self.prefill_blocks}: it must be at least 1",
        )
        require_choice("reads", self.reads, get_args(ReadMode))
        for name in ("max_batch", "context", "num_threads"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} is {value}: it must be at least 1")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from keyword values. Raises `RelumeError` that lists the known keys for an unknown one."""
        require_known("engine option", values, cls)
        return cls(**values)


@dataclass(frozen=True)
class PackConfig:
    """How `relume pack` stores experts.

    Attributes:
        experts: `bf16`, `int8` or `int4`.
        group_size: of `int4`: inputs that share a scale, by default `DEFAULT_GROUP_SIZE`.
    """

    experts: PackedFormatName = "bf16"
    group_size: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        require_choice("expert format", self.experts, get_args(PackedFormatName))
        if self.experts == "int4":
            if self.group_size is None:
                object.__setattr__(self, "group_size", DEFAULT_GROUP_SIZE)
            require_choice("group size", self.group_size, get_args(GroupSize))
        else:
            require(self.group_size is None, f"{self.experts} has no groups: leave the group size out")


@dataclass(frozen=True)
class ShapeOverrides:
    """Sizes that differ from the named shape's; `None` keeps them.

    With another `hidden` size, the numbers of heads and the widths that are not given shrink or grow with it.

    Attributes:
        layers: layers in all, the first of LLaDA2 being dense.
        experts, top_k, expert_size: routed experts of a layer, how many a token uses, and their width.
        heads, kv_heads, head_dim: of attention.
        dense_size: width of a dense layer (LLaDA2).
        groups, kept_groups: of group-limited routing (LLaDA2).
        block_length: tokens of a block.
        expert_capacity: experts that a block admits, as in LLaDA2.2.
    """

    layers: int | None = None
    hidden: int | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_size: int | None = None
    vocab: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dense_size: int | None = None
    groups: int | None = None
    kept_groups: int | None = None
    block_length: int | None = None
    expert_capacity: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value is None or value >= 1, f"{field.name} is {value}: it must be at least 1")
