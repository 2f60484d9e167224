"""One optimiser step: forwards side by side, gradients in a fixed order, one update."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from relume.config import ModelConfig
from relume.core import RelumeError
from relume.routing.choice import RoutingChoice
from relume.train.balancing import active_share, balance, expert_loads
from relume.train.config import TrainConfig
from relume.train.data import StepData
from relume.train.metrics import Counts, count_right
from relume.train.network import Network
from relume.train.objective import Batch, divergence
from relume.train.optim import Optimizer, learning_rate_scale


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes:
        loss: weighted mean over the predicted tokens, and what `kl_weight` adds.
        grad_norm: before clipping.
        learning_rate: the one that was applied.
        loads: `[moe layers, experts]` int64, tokens per expert.
        active: `[moe layers]`, mean share of distinct experts in a noisy block.
        counts: of right predictions, by task.
        kl: KL(start || trained) in nats, weighted mean over the masked tokens; 0 if nothing asks for it.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    loads: torch.Tensor
    active: torch.Tensor
    counts: Counts
    kl: float = 0.0


@dataclass(frozen=True)
class _Part:
    loss: torch.Tensor
    kl: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    loads: torch.Tensor
    active: torch.Tensor
    counts: Counts


class Trainer:
    """Weights, their average and the optimiser; `step` advances all of them.

    Args:
        config: what to train.
        model: its shape.
        weights: to start from; with `kl_weight` a frozen copy of them is kept to compare with.
        num_tasks: that data are counted by.

    Raises:
        RelumeError: a shape or a routing that cannot be trained.
    """

    def __init__(
        self, config: TrainConfig, model: ModelConfig, weights: dict[str, torch.Tensor], num_tasks: int
    ) -> None:
        self.config, self.model = config, model
        self.device = torch.device(config.run.device)
        self.weights = {name: weight.to(self.device) for name, weight in weights.items()}
        self.averaged = (
            {name: weight.clone() for name, weight in self.weights.items()} if config.optimizer.ema_decay else {}
        )
        dtype = getattr(torch, config.run.dtype)
        self._teacher: Network | None = None
        if config.objective.kl_weight:
            frozen = {name: weight.clone() for name, weight in self.weights.items()}
            self._teacher = Network(model, frozen, dtype, RoutingChoice.parse(model.routing))
        self.optimizer = Optimizer(self.weights, config.optimizer)
        for weight in self.optimizer.weights:
            weight.requires_grad_()
        self._network = Network(model, self.weights, dtype, config.routing(model))
        self._num_tasks = num_tasks
        self._workers = config.run.workers if self.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._workers, initializer=self._start_worker)

    @property
    def result(self) -> dict[str, torch.Tensor]:
        """The weights to export: the averaged ones if there are any."""
        return self.averaged or self.weights

    def close(self) -> None:
        """Stop the workers."""
        self._pool.shutdown()

    def step(self, step: int, data: StepData) -> StepReport:
        """Train on the data of step `step`.

        Raises:
            RelumeError: the loss or a gradient is not finite; the weights are those before the step.
        """
        gradients: tuple[torch.Tensor, ...] = ()
        parts = []
        for part in self._parts(data):
            if gradients:
                torch._foreach_add_(gradients, part.gradients)
            else:
                gradients = part.gradients
            parts.append(dataclasses.replace(part, gradients=()))
            del part  # or its gradients would wait for the next one's
        for weight, gradient in zip(self.optimizer.weights, gradients, strict=True):
            weight.grad = gradient
        loss = float(torch.stack([part.loss for part in parts]).sum())
        scale = learning_rate_scale(step, self.config.optimizer, self.config.run)
        norm = self.optimizer.step(scale) if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            raise RelumeError(
                f"step {step}: the loss is {loss} and its gradient's norm {norm}; the last saved state is kept: "
                "resume from it with a lower learning rate"
            )
        loads = torch.stack([part.loads for part in parts]).sum(dim=0)
        self._balance(loads)
        self._average()
        counts = parts[0].counts
        for part in parts[1:]:
            counts = counts + part.counts
        active = torch.stack([part.active for part in parts]).mean(dim=0)
        kl = float(torch.stack([part.kl for part in parts]).sum())
        return StepReport(loss, norm, scale * self.config.optimizer.lr, loads, active, counts, kl)

    def _parts(self, data: StepData) -> Iterator[_Part]:
        """In the order of the batches; few are under way at once, as each has gradients of all weights."""
        under_way: deque[Future[_Part]] = deque()
        for batch, tasks in zip(data.batches, data.tasks, strict=True):
            under_way.append(self._pool.submit(self._part, batch, tasks, data.total_weight))
            if len(under_way) > self._workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _part(self, batch: Batch, tasks: torch.Tensor, total: float) -> _Part:
        batch = batch.to(self.device)
        output = self._network.forward(batch)
        predicted = batch.loss_weights > 0
        losses = F.cross_entropy(output.logits, batch.targets[predicted], reduction="none")
        loss = (losses * batch.loss_weights[predicted]).sum() / total
        kl = torch.zeros_like(loss)
        if self._teacher is not None:
            with torch.no_grad():
                expected = self._teacher.forward(batch).logits
            distances = divergence(expected, output.logits) * batch.masked[predicted]
            kl = (distances * batch.loss_weights[predicted]).sum() / total
            loss = loss + self.config.objective.kl_weight * kl
        gradients = torch.autograd.grad(loss, self.optimizer.weights)
        experts = self.model.router.num_experts
        return _Part(
            loss.detach(),
            kl.detach(),
            gradients,
            expert_loads(output.expert_ids, batch, experts),
            active_share(output.expert_ids, batch, self.model.block_length, experts),
            count_right(output.logits.detach(), batch, tasks, self._num_tasks),
        )

    def _balance(self, loads: torch.Tensor) -> None:
        rate = self.config.optimizer.balance_rate
        if rate and self.model.router.has_bias and self.config.optimizer.parameters != "experts":
            for layer, load in zip(self.model.moe_layers, loads, strict=True):
                balance(self.weights[f"layers.{layer}.router_bias"], load, rate)

    @torch.no_grad()
    def _average(self) -> None:
        if self.averaged:
            names = list(self.averaged)
            torch._foreach_lerp_(
                [self.averaged[name] for name in names],
                [self.weights[name] for name in names],
                1.0 - self.config.optimizer.ema_decay,
            )

    def _start_worker(self) -> None:
        if self.device.type == "cpu":
            torch.set_num_threads(1)
