"""The trained network is the one that the engine runs, and its gradients are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relume import Engine
from relume.core import RelumeError, Routing
from relume.experts.kernels import swiglu
from relume.model.layers import rms_norm
from relume.routing.choice import RoutingChoice
from relume.train.balancing import balance
from relume.train.codec import Codec
from relume.train.data import DataSource
from relume.train.expert_compute import expert_output
from relume.train.export import export_checkpoint, restore_export
from relume.train.initial import read_weights
from relume.train.network import Network
from relume.train.norm import trained_rms_norm
from relume.train.objective import Batch
from relume.train.starting_point import StartingPoint, starting_point
from training import small_config


@pytest.fixture
def start() -> StartingPoint:
    """A tiny model with spread-out weights, so that routing and attention matter."""
    point = starting_point(small_config().model, seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, weight in point.weights.items():
        if name.endswith("router_bias"):
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        elif name.endswith("norm"):
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
        elif name.endswith((".router", "qkv")):
            weight.mul_(2.0)
    return point


def make_batch(start: StartingPoint) -> Batch:
    source = DataSource(small_config(), start.config, Codec.of(start.tokenizer, start.config))
    return source.step(0).batches[0]


@pytest.mark.parametrize(
    ("dtype", "routing"),
    [
        (torch.float32, "native"),
        (torch.bfloat16, "native"),
        (torch.float32, "dmoe:p=0.3"),
        (torch.float32, "dmoe:p=0.2:block=4"),
        (torch.float32, "team:distance=2:confidence=0.9"),
    ],
)
def test_logits_are_the_engines(start: StartingPoint, tmp_path: Path, dtype: torch.dtype, routing: str) -> None:
    batch = make_batch(start)
    export_checkpoint(
        tmp_path / "model", start.family, start.config, start.weights, start.config_json, start.files, dtype
    )
    engine = Engine.load(tmp_path / "model", dtype="float32", routing=routing)
    # In bfloat16 the network takes the rounded weights: rounding may move a token to another expert.
    weights = start.weights if dtype == torch.float32 else read_weights(tmp_path / "model")[3]
    network = Network(start.config, weights, torch.float32, RoutingChoice.parse(routing))
    logits = network.forward(batch).logits
    predicted = batch.loss_weights > 0
    row_of = torch.arange(len(batch.blocks)).unsqueeze(1).expand_as(batch.blocks)[predicted]
    found = 0
    for row in range(2):
        clean = batch.token_ids[row][batch.copies[row] == 0].tolist()
        for copy in (1, 2):
            for block in batch.blocks[row][batch.copies[row] == copy].unique().tolist():
                inside = (batch.copies[row] == copy) & (batch.blocks[row] == block)
                # The canvas as inference has it: finished blocks, then this one under decoding.
                canvas = clean[: block * 8] + batch.token_ids[row][inside].tolist()
                rows = engine.logits(canvas)[-8:][predicted[row][inside]]
                here = (predicted[row] & inside)[predicted[row]]
                torch.testing.assert_close(logits[row_of == row][here], rows, atol=2e-5, rtol=2e-5)
                found += len(rows)
    assert found > 20


def test_the_exported_router_bias_stays_float32_and_files_are_readable(
    start: StartingPoint, tmp_path: Path
) -> None:
    for _ in range(2):  # the second replaces the first
        export_checkpoint(
            tmp_path / "m", start.family, start.config, start.weights, start.config_json, start.files
        )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    checkpoint, _, config, weights = read_weights(tmp_path / "m")
    assert checkpoint.config["dtype"] == "bfloat16" and config == start.config
    for name, weight in start.weights.items():
        exact = weight if name.endswith("router_bias") else weight.bfloat16().float()
        assert torch.equal(weights[name], exact), name


def test_an_export_that_was_killed_while_replacing_is_put_right(start: StartingPoint, tmp_path: Path) -> None:
    args = (tmp_path / "m", start.family, start.config, start.weights, start.config_json, start.files)
    export_checkpoint(*args)
    (tmp_path / "m").rename(tmp_path / "m.old")
    (tmp_path / "m.new").mkdir()
    restore_export(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert read_weights(tmp_path / "m")[2] == start.config


def naive_experts(x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = []
    for token in range(len(x)):
        chosen = zip(routing.expert_ids[token].tolist(), routing.weights[token], strict=True)
        rows.append(sum(weight * swiglu(x[token], gate_up[e], down[e]) for e, weight in chosen))
    return torch.stack(rows)


def test_grouped_experts_are_a_plain_loop_with_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_()

    x, gate_up, down, weights = leaf(17, 8), leaf(6, 32, 8), leaf(6, 8, 16), leaf(17, 2)
    ids = torch.rand(17, 5, generator=generator).topk(2).indices  # the sixth expert gets nothing
    direction = torch.randn(17, 8, generator=generator)
    leaves = (x, weights, gate_up, down)
    results = []
    for compute in (expert_output, naive_experts):
        output = compute(x, Routing(ids, weights), gate_up, down)
        results.append((output, *torch.autograd.grad((output * direction).sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not results[0][3][5].any()


def test_the_norm_is_that_of_inference_with_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 12, generator=generator).requires_grad_()
    weight = torch.randn(12, generator=generator).requires_grad_()
    direction = torch.randn(3, 5, 12, generator=generator)
    results = []
    for compute in (trained_rms_norm, rms_norm):
        output = compute(x, weight, 1e-6)
        results.append((output, *torch.autograd.grad((output * direction).sum(), (x, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_balancing_feeds_a_starving_expert(start: StartingPoint) -> None:
    name = "layers.1.router_bias"
    start.weights[name].zero_()[0] = -5.0
    network, batch = Network(start.config, start.weights, torch.float32), make_batch(start)

    def loads() -> torch.Tensor:
        with torch.no_grad():
            return torch.bincount(network.forward(batch).expert_ids[0].flatten(), minlength=8)

    assert loads()[0] == 0
    for _ in range(150):
        balance(start.weights[name], loads(), rate=0.05)
    share = loads() / loads().float().mean()
    assert share.min() > 0.5 and share.max() < 2.0


def test_balancing_moves_the_bias_only_by_its_rate() -> None:
    bias = torch.zeros(4)
    balance(bias, torch.tensor([0, 10, 5, 5]), rate=0.01)
    torch.testing.assert_close(bias, torch.tensor([0.01, -0.01, 0.0, 0.0]))


def test_clean_blocks_may_route_natively_as_prefills_do(start: StartingPoint) -> None:
    batch = make_batch(start)
    normed = torch.randn(
        batch.token_ids.numel(), start.config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    router = (start.weights["layers.1.router"], start.weights["layers.1.router_bias"])
    ids = {
        text: Network(start.config, start.weights, torch.float32, RoutingChoice.parse(text))
        .route(normed, *router, batch)
        .expert_ids
        for text in ("native", "dmoe:p=0.1", "dmoe:p=0.1:prefill=native")
    }
    clean = batch.copies.flatten() == 0
    assert torch.equal(ids["dmoe:p=0.1:prefill=native"][clean], ids["native"][clean])
    assert torch.equal(ids["dmoe:p=0.1:prefill=native"][~clean], ids["dmoe:p=0.1"][~clean])
    assert not torch.equal(ids["dmoe:p=0.1"][clean], ids["native"][clean])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert-choice", "as many experts each"),
        ("dmoe:block=16", "no whole windows of 16"),
        ("dmoe:guard=1", "leave the guard out for"),
    ],
)
def test_a_routing_that_cannot_be_trained_is_refused(start: StartingPoint, text: str, message: str) -> None:
    with pytest.raises(RelumeError, match=message):
        Network(start.config, start.weights, torch.float32, RoutingChoice.parse(text))
