"""What a family of checkpoints has to tell: how its config.json reads and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relume.checkpoint.folder import Checkpoint
from relume.config import ModelConfig
from relume.core import RelumeError
from relume.experts.packed import pack_problems
from relume.routing.choice import RoutingChoice

#: One weight of the model: official tensors with their shapes, joined along the first dimension.
Parts = tuple[tuple[str, tuple[int, ...]], ...]


class WeightNames(Protocol):
    """Official tensors of each weight that the transformer asks for."""

    def __call__(self, config: ModelConfig) -> dict[str, Parts]:
        """Parts by relume's name: `embeddings`, `final_norm`, `lm_head`, `layers.N.ROLE`."""
        ...


#: Tensors that old checkpoints carry and nobody reads.
_INERT = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Family:
    """A family is one file that fills this in, and a line in `families`.

    Attributes:
        architectures: values of `architectures` in config.json.
        read_config: translates config.json (and generation_config.json) into a `ModelConfig`.
        weights: names of everything but the routed experts.
        experts_prefix: official name of a layer's experts up to `.experts`, with `{layer}`.
    """

    name: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], Mapping[str, Any]], ModelConfig]
    weights: WeightNames
    experts_prefix: str


class ConfigReader:
    """Typed access to a config.json; every complaint names the key."""

    def __init__(self, values: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        self._values = values
        self._generation = generation

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer; required unless there is a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RelumeError(f"config.json: {key} is {value!r}, an integer was expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """An integer or a float; required unless there is a default."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RelumeError(f"config.json: {key} is {value!r}, a number was expected")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; null counts as absent."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise RelumeError(f"config.json: {key} is {value!r}, true or false was expected")
        return value

    def text(self, key: str, default: str) -> str:
        """A string; null counts as absent."""
        return str(self._get(key, default))

    def rotary(self, key: str, default: float) -> float:
        """A rotary-embedding number, at the top level or in `rope_parameters` (transformers 5)."""
        nested = self._mapping("rope_parameters")
        return ConfigReader(nested if nested.get(key) is not None else self._values, {}).number(key, default)

    def refuse(self, key: str, *known: object) -> None:
        """Raise unless `key` is absent, null, or one of the `known` values: relume computes nothing else."""
        value = self._values.get(key)
        if value is not None and value not in known:
            raise RelumeError(f"config.json: {key} is {value!r}, which relume does not compute")

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise RelumeError(f"config.json: {key} is {value!r}, an object was expected")
        return value

    def common(self, mask_token_id: int, eos_token_id: int) -> dict[str, Any]:
        """The fields of `ModelConfig` that every family writes alike; the token ids are its published ones.

        Raises:
            RelumeError: a key is missing, or a rotary scaling is asked for, which relume does not compute.
        """
        self._refuse_rope_scaling()
        self.refuse("hidden_act", "silu")
        for key in ("use_bias", "use_qkv_bias", "attention_bias"):
            self.refuse(key, False)
        self.refuse("use_qk_norm", True)
        vocab_size, num_heads = self.integer("vocab_size"), self.integer("num_attention_heads")
        hidden_size = self.integer("hidden_size")
        return {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": num_heads,
            "num_kv_heads": self.integer("num_key_value_heads", num_heads),
            "head_dim": self.integer("head_dim", hidden_size // max(1, num_heads)),
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "expert_size": self.integer("moe_intermediate_size"),
            "max_context": self.integer("max_position_embeddings", 32768),
            "tie_embeddings": self.flag("tie_word_embeddings", False),
            "mask_token_id": self.token_id("mask_token_id", mask_token_id, vocab_size),
            "eos_token_ids": self._eos_token_ids(eos_token_id, vocab_size),
            "routing": self.routing(),
        }

    def routing(self) -> str:
        """The routing that the model was trained for: ours by its text, or dMoE's published key, a share of votes.

        Raises:
            RelumeError: there is no such routing.
        """
        text = self.text("routing", "native")
        if self._values.get("routing") is None and self._values.get("core_threshold") is not None:
            text = f"dmoe:p={self.number('core_threshold')}"
        try:
            return str(RoutingChoice.parse(text))
        except RelumeError as error:
            raise RelumeError(f"config.json: {error}") from None

    def _refuse_rope_scaling(self) -> None:
        for key in ("rope_scaling", "rope_parameters"):
            scaling = self._mapping(key)
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind != "default":
                raise RelumeError(
                    f"config.json: {key} asks for the rotary scaling {kind!r}, which relume does not know"
                )

    def token_id(self, key: str, default: int | None, vocab_size: int) -> int | None:
        """A token id, or the family's published one if the vocabulary reaches that far."""
        if self._values.get(key) is not None:
            return self.integer(key)
        return default if default is not None and default < vocab_size else None

    def _eos_token_ids(self, default: int, vocab_size: int) -> tuple[int, ...]:
        """End-of-text ids from both files, else the family's published one."""
        found: list[int] = []
        for file, source in (("config.json", self._values), ("generation_config.json", self._generation)):
            value = source.get("eos_token_id")
            tokens = value if isinstance(value, list) else [value] if value is not None else []
            self._check_tokens(file, tokens, vocab_size)
            found += tokens
        return tuple(dict.fromkeys(found)) or ((default,) if default < vocab_size else ())

    @staticmethod
    def _check_tokens(file: str, tokens: list[Any], vocab_size: int) -> None:
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RelumeError(f"{file}: eos_token_id {token!r} is no token of a vocabulary of {vocab_size}")

    def _get(self, key: str, default: float | str | None) -> object:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise RelumeError(f"config.json: {key} is missing")
            return default
        return value


def tensor_problems(family: Family, config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Every tensor that is missing, misshapen, or there although the configuration has no place for it."""
    expected = {name: shape for parts in family.weights(config).values() for name, shape in parts}
    if checkpoint.pack is None:
        expected |= expert_tensors(family, config, checkpoint)
    beyond = [name for name in checkpoint.tensors if name not in expected and not name.endswith(_INERT)]
    packed = [] if checkpoint.pack is None else pack_problems(checkpoint.pack, config)
    strangers = [f"{name} has no place in the configuration" for name in sorted(beyond)]
    return packed + checkpoint.problems(expected) + strangers


def expert_tensors(family: Family, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all routed experts, in the layout that the checkpoint uses."""
    expected: dict[str, tuple[int, ...]] = {}
    for layer in config.moe_layers:
        prefix = family.experts_prefix.format(layer=layer)
        expected |= checkpoint.expert_shapes(
            prefix, config.router.num_experts, config.hidden_size, config.expert_size
        )
    return expected
