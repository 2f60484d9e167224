"""The whole job: a folder in the official layout, drawn, fitted, measured and written layer by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from relume.checkpoint.byte_tokenizer import byte_tokenizer_files
from relume.checkpoint.folder import PROJECTIONS
from relume.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter, TensorSpec, refuse_existing
from relume.config import ShapeOverrides, require
from relume.core import Progress, Routing
from relume.machine.threads import effective_cores
from relume.synth.attention import shape_attention
from relume.synth.canvases import Canvas, make_canvases
from relume.synth.feed_forward import LayerExperts, dense_swiglu
from relume.synth.head import fit_head
from relume.synth.measure import RoutingStatistics, measure_routing
from relume.synth.probe import Probe, RoutedOutput
from relume.synth.random_weights import WeightSource
from relume.synth.report import SynthReport, make_report
from relume.synth.routers import bias_dtype, shape_router
from relume.synth.shapes import Shape, make_shape
from relume.synth.vocabulary import Piece, Vocabulary

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def synthesise(
    out: Path,
    like: str,
    seed: int = 0,
    overrides: ShapeOverrides | None = None,
    *,
    stacked: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> SynthReport:
    """Make a random checkpoint whose routing looks like that of a trained model.

    The same arguments give the same bytes. At most one shard is in memory.

    Args:
        out: the folder to make; it may exist if it is empty.
        like: `llada2-mini`, `llada2-flash` or `sdar-30b`.
        seed: of all random draws.
        overrides: sizes that differ.
        stacked: store a layer's experts as three tensors, as training tools do, instead of one by one.
        dtype: bfloat16 or float32.
        max_shard_bytes: a shard's largest size; a larger tensor is a shard of its own.
        progress: called with (bytes since the last call, bytes in all).

    Returns:
        What was made and measured.

    Raises:
        RelumeError: sizes that make no model, `out` exists, no room on the disk.
    """
    started = time.perf_counter()
    require(dtype in _DTYPES, f"dtype is {dtype}: choose one of {', '.join(map(str, _DTYPES))}")
    shape = make_shape(like, overrides, _DTYPES[dtype])
    refuse_existing(out)
    source = WeightSource(seed, dtype)
    canvases = make_canvases(shape.config, tuple(shape.special.values()), source.generator("canvases"))
    files = byte_tokenizer_files(shape.config.vocab_size, shape.special, shape.eos, shape.mask)
    specs = list(tensor_specs(shape, dtype, stacked))
    with (
        CheckpointWriter(out, specs, shape.json, files, max_shard_bytes, progress) as writer,
        torch.inference_mode(),
    ):
        synthesis = _Synthesis(shape, source, canvases, writer, stacked)
        layers, tokens_per_iteration = synthesis.run()
    return make_report(
        out,
        like,
        seed,
        shape.config,
        (writer.num_bytes, writer.num_tensors),
        time.perf_counter() - started,
        (len(canvases), sum(len(canvas.blocks) for canvas in canvases)),
        layers,
        tokens_per_iteration,
    )


def tensor_specs(shape: Shape, dtype: torch.dtype, stacked: bool) -> Iterator[TensorSpec]:
    """All official tensors in the order in which they are written: embeddings, layer by layer, norm, head."""
    config = shape.config
    weights = shape.family.weights(config)

    def specs(names: Iterable[str]) -> Iterator[TensorSpec]:
        for name in names:
            kept = bias_dtype(config.router, dtype) if name.endswith(".router_bias") else dtype
            yield from (TensorSpec(official, size, kept) for official, size in weights[name])

    yield from specs(["embeddings"])
    for layer in range(config.num_layers):
        yield from specs(name for name in weights if name.startswith(f"layers.{layer}."))
        if layer in config.moe_layers:
            prefix = shape.family.experts_prefix.format(layer=layer)
            sizes = dict.fromkeys(PROJECTIONS, (config.expert_size, config.hidden_size))
            sizes["down_proj"] = (config.hidden_size, config.expert_size)
            if stacked:
                for name, size in sizes.items():
                    yield TensorSpec(f"{prefix}.{name}", (config.router.num_experts, *size), dtype)
            else:
                for expert in range(config.router.num_experts):
                    for name, size in sizes.items():
                        yield TensorSpec(f"{prefix}.{expert}.{name}.weight", size, dtype)
    yield from specs(["final_norm", "lm_head"])


class _Synthesis:
    """Walks through the model once; the sample canvases' states go along."""

    def __init__(
        self,
        shape: Shape,
        source: WeightSource,
        canvases: list[Canvas],
        writer: CheckpointWriter,
        stacked: bool,
    ) -> None:
        self._shape, self._config, self._source = shape, shape.config, source
        self._canvases, self._writer, self._stacked = canvases, writer, stacked
        self._official = shape.family.weights(shape.config)
        self._vocabulary = Vocabulary(shape.config, source, tuple(shape.special.values()))
        self._probe = Probe(shape.config, canvases, source.dtype)

    def run(self) -> tuple[list[RoutingStatistics], float]:
        """Write everything; return the statistics of each MoE layer and the tokens per iteration."""
        config, probe = self._config, self._probe
        self._write_pieces("embeddings", self._vocabulary.embeddings(), embed=True)
        layers = [found for layer in range(config.num_layers) if (found := self._layer(layer)) is not None]
        norm = self._source.norm("final_norm", config.hidden_size)
        self._write("final_norm", norm)
        head, tokens_per_iteration = fit_head(self._vocabulary, probe, self._canvases, norm)
        self._write_pieces("lm_head", self._vocabulary.head(head))
        return layers, tokens_per_iteration

    def _layer(self, layer: int) -> RoutingStatistics | None:
        config, source, probe, prefix = self._config, self._source, self._probe, f"layers.{layer}"
        own = shape_attention(config, source, probe, layer, self._vocabulary.common)
        own["mlp_norm"] = source.norm(f"{prefix}.mlp_norm", config.hidden_size)
        normed = probe.normed(own["mlp_norm"])
        scale = probe.scale()
        is_moe = layer in config.moe_layers
        name, size = ("shared", config.shared_size) if is_moe else ("dense", config.dense_size)
        output = torch.zeros_like(normed)
        if size:
            fitted = dense_swiglu(config, source, probe, f"{prefix}.{name}", normed, size)
            own[f"{name}_gate_up"], own[f"{name}_down"], output = fitted
        routing = None
        if is_moe:
            own["router"], bias = shape_router(config, source, probe, layer, normed, self._vocabulary.common)
            if bias is not None:
                own["router_bias"] = bias
            routing = probe.route(normed, own["router"], bias)
        for official in self._official:
            if official.startswith(f"{prefix}."):
                self._write(official, own[official.removeprefix(f"{prefix}.")])
        if routing is None:
            probe.x = probe.x + output
            return None
        probe.x = probe.x + (
            self._experts(layer, LayerExperts(config, source, layer, scale), normed, routing) + output
        )
        return measure_routing(probe.snapshots(routing.expert_ids), self._canvases, config.router.num_experts)

    def _experts(self, layer: int, experts: LayerExperts, normed: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Write a layer's experts; return their output on the sample canvases."""
        prefix = self._shape.family.experts_prefix.format(layer=layer)
        routed = RoutedOutput(normed, routing)
        num_experts = self._config.router.num_experts
        # Drawing is most of the work; each tensor has its own seed, so threads change nothing.
        with ThreadPoolExecutor(effective_cores()) as pool:
            for expert in range(num_experts):
                gate, up, down = pool.map(partial(experts.draw, expert), PROJECTIONS)
                routed.add(expert, gate, up, down)
                if not self._stacked:
                    for projection, weight in zip(PROJECTIONS, (gate, up, down), strict=True):
                        self._writer.write(f"{prefix}.{expert}.{projection}.weight", weight)
        if self._stacked:  # drawn a second time, so that no more than a shard is in memory
            for projection in PROJECTIONS:
                stack = self._writer.reserve(f"{prefix}.{projection}")
                for expert in range(num_experts):
                    stack[expert] = experts.draw(expert, projection)
        return routed.total()

    def _write(self, name: str, weight: torch.Tensor) -> None:
        """Write one of relume's weights as the official tensors that it consists of."""
        parts = self._official[name]
        for (official, size), rows in zip(parts, weight.split([size[0] for _, size in parts]), strict=True):
            assert math.prod(size) == rows.numel()
            self._writer.write(official, rows)

    def _write_pieces(self, name: str, pieces: Iterable[Piece], embed: bool = False) -> None:
        """Write a matrix that comes in pieces; the embeddings also start the sample canvases' states."""
        ((official, _),) = self._official[name]
        whole = self._writer.reserve(official)
        for first, rows in pieces:
            whole[first : first + len(rows)] = rows
            if embed:
                self._probe.embed(first, rows)
