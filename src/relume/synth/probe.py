"""The sample canvases' true hidden states, carried through a model that exists one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from relume.config import ModelConfig
from relume.core import Routing
from relume.experts.executor import ExpertExecutor
from relume.experts.kernels import combine, swiglu
from relume.experts.store import ResidentExperts
from relume.model.batch import Segment
from relume.model.kv_cache import KVCache
from relume.model.layers import block_causal_mask, rms_norm, rotary_table
from relume.model.transformer import SegmentContext, Transformer
from relume.synth.canvases import Canvas

_CPU = torch.device("cpu")


class Probe:
    """Rows `[tokens, hidden]`: for each canvas its prompt, then its snapshots' blocks.

    Attributes:
        x: the residual stream, in the checkpoint's dtype.
        masked: `[tokens]` bool, whether the row is a masked position.
        in_block: `[tokens]` bool, whether the row belongs to a snapshot.
    """

    def __init__(self, config: ModelConfig, canvases: Sequence[Canvas], dtype: torch.dtype) -> None:
        # One MoE layer whose experts come from elsewhere: declared dense, so that none is allocated.
        self._config = dataclasses.replace(config, num_layers=1, num_dense_layers=1)
        self._canvases = canvases
        self._lengths = [
            length
            for canvas in canvases
            for length in (len(canvas.prompt), *[config.block_length] * len(canvas.blocks))
        ]
        self.token_ids = torch.cat([torch.cat((c.prompt, c.blocks.flatten())) for c in canvases])
        self.masked = torch.cat(
            [torch.cat((torch.zeros(len(c.prompt)), c.masked.flatten())) for c in canvases]
        ).bool()
        self.in_block = torch.cat(
            [torch.cat((torch.zeros(len(c.prompt)), torch.ones(c.blocks.numel()))) for c in canvases]
        ).bool()
        self.x = torch.zeros(len(self.token_ids), config.hidden_size, dtype=dtype)

    def embed(self, first: int, rows: torch.Tensor) -> None:
        """Fill in the states of the tokens `first..` from their embeddings `[n, hidden]`."""
        here = (self.token_ids >= first) & (self.token_ids < first + len(rows))
        self.x[here] = rows[self.token_ids[here] - first]

    def normed(self, norm: torch.Tensor) -> torch.Tensor:
        """The states after a norm with this weight."""
        return rms_norm(self.x, norm, self._config.rms_norm_eps)

    def scale(self) -> float:
        """Root mean square of the states of committed tokens."""
        return rms(self.x[~self.masked])

    def attention(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Attention output of all rows; `weights` by role, as in `model.family`."""
        model = self._transformer(weights)
        outputs = []
        begin = 0
        block = self._config.block_length
        for canvas in self._canvases:
            prompt = len(canvas.prompt)
            cache = KVCache(self._config, prompt + block, self.x.dtype, _CPU)
            for length in (prompt, *[block] * len(canvas.blocks)):
                segment = Segment(torch.empty(length, dtype=torch.int64), cache, torch.empty(0), block)
                start = cache.length
                context = SegmentContext(
                    segment,
                    rotary_table(self._config, start, length, self.x.dtype, _CPU),
                    block_causal_mask(start, length, block, _CPU),
                )
                outputs.append(model.attention(0, self.x[begin : begin + length], [context]))
                begin += length
                if not start:
                    cache.commit(prompt)
        return torch.cat(outputs)

    def route(
        self, normed: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, free: bool = False
    ) -> Routing:
        """Routing of all rows as the model does it, block by block; `free`: as if it had no expert capacity."""
        weights = {"router": router.float()}
        if bias is not None:
            weights["router_bias"] = bias.float()
        return self._transformer(weights, free).route(0, normed, self._lengths)

    def snapshots(self, expert_ids: torch.Tensor) -> list[torch.Tensor]:
        """Expert ids `[tokens, k]` of all rows as `[snapshots, block_length, k]` of each canvas."""
        found, begin = [], 0
        for canvas in self._canvases:
            begin += len(canvas.prompt)
            rows = canvas.blocks.numel()
            found.append(expert_ids[begin : begin + rows].view(*canvas.blocks.shape, -1))
            begin += rows
        return found

    def _transformer(self, weights: Mapping[str, torch.Tensor], free: bool = False) -> Transformer:
        config = self._config
        if free:
            config = dataclasses.replace(config, router=dataclasses.replace(config.router, capacity=0))
        own = {f"layers.0.{role}": weight for role, weight in weights.items()}
        own["embeddings"] = self.x[:1]
        experts = ResidentExperts(config, self.x.dtype, _CPU)
        return Transformer(config, own, ExpertExecutor(experts, config.router.num_experts))


class RoutedOutput:
    """Collects a layer's MoE output while its experts are drawn one after the other.

    Args:
        normed: `[tokens, hidden]`.
        routing: of all rows.
    """

    def __init__(self, normed: torch.Tensor, routing: Routing) -> None:
        self._normed = normed
        self._routing = routing
        self._outputs = torch.zeros(routing.expert_ids.numel(), normed.shape[1])

    def add(self, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Compute one expert over the rows that chose it."""
        pairs = (self._routing.expert_ids.flatten() == expert).nonzero().flatten()
        if len(pairs):
            rows = self._normed[pairs // self._routing.expert_ids.shape[1]]
            self._outputs[pairs] = swiglu(rows, torch.cat((gate, up)), down).float()

    def total(self) -> torch.Tensor:
        """`[tokens, hidden]`, summed in routing order."""
        outputs = self._outputs.view(*self._routing.expert_ids.shape, -1)
        return combine(outputs, self._routing.weights).to(self._normed.dtype)


def rms(x: torch.Tensor) -> float:
    """Root mean square of all entries."""
    return float(x.float().square().mean().sqrt())
