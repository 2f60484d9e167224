"""The sample canvases' true hidden states, carried through a model that exists one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig
from relume.core import Routing
from relume.experts.kernels import combine, swiglu
from relume.model.attention import attention, segment_context
from relume.model.batch import Segment
from relume.model.kv_cache import KVCache
from relume.model.layers import rms_norm
from relume.routing import route_requests
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
        self._config = dataclasses.replace(config, num_layers=1)  # whose experts come from elsewhere
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
        outputs = []
        begin = 0
        block = self._config.block_length
        for canvas in self._canvases:
            prompt = len(canvas.prompt)
            cache = KVCache(self._config, prompt + block, self.x.dtype, _CPU)
            for length in (prompt, *[block] * len(canvas.blocks)):
                segment = Segment(torch.empty(length, dtype=torch.int64), cache, torch.empty(0), block)
                context = segment_context(self._config, segment, self.x.dtype)
                rows = self.x[begin : begin + length]
                outputs.append(attention(self._config, 0, weights, rows, [context], F.linear))
                begin += length
                if not cache.length:
                    cache.commit(prompt)
        return torch.cat(outputs)

    def route(
        self, normed: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, free: bool = False
    ) -> Routing:
        """Routing of all rows as the model does it, block by block; `free`: as if it had no expert capacity."""
        weights = {"router": router.float()}
        if bias is not None:
            weights["router_bias"] = bias.float()
        config = self._config.router
        return route_requests(
            weights, normed, self._lengths, dataclasses.replace(config, capacity=0) if free else config
        )

    def snapshots(self, expert_ids: torch.Tensor) -> list[torch.Tensor]:
        """Expert ids `[tokens, k]` of all rows as `[snapshots, block_length, k]` of each canvas."""
        found, begin = [], 0
        for canvas in self._canvases:
            begin += len(canvas.prompt)
            rows = canvas.blocks.numel()
            found.append(expert_ids[begin : begin + rows].view(*canvas.blocks.shape, -1))
            begin += rows
        return found


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
