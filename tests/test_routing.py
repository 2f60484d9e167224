from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.config import RouterConfig
from relume.routing import route

LLADA2_MINI = RouterConfig(num_experts=256, top_k=8, num_groups=8, kept_groups=4, scale=2.5)


def random_scores(seed: int, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator), 0.1 * torch.randn(experts, generator=generator)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 40), groups=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_group_limited_choice_equals_plain_python(
    seed: int, tokens: int, groups: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(8, kept * 32 // groups)))
    config = RouterConfig(num_experts=32, top_k=top_k, num_groups=groups, kept_groups=kept, scale=2.5)
    logits, bias = random_scores(seed, tokens, 32)
    routing = route(logits, bias, config)
    scores = torch.sigmoid(logits)
    for token in range(tokens):
        biased = (scores[token] + bias).tolist()
        size = 32 // groups
        by_group = [biased[g * size : (g + 1) * size] for g in range(groups)]
        sums = [sum(sorted(group)[-2:]) for group in by_group]
        best = sorted(range(groups), key=lambda g: -sums[g])[:kept]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:top_k]
        assert routing.expert_ids[token].tolist() == chosen
        raw = scores[token, chosen]
        torch.testing.assert_close(routing.weights[token], raw / raw.sum() * 2.5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 70))
def test_a_window_admits_no_more_experts_than_its_capacity(seed: int, tokens: int) -> None:
    # A 2.2 configuration still declares groups; the capacity takes precedence.
    config = RouterConfig(256, 8, num_groups=8, kept_groups=4, capacity=48, capacity_window=32, scale=2.5)
    logits, bias = random_scores(seed, tokens, 256)
    routing = route(logits, bias, config)
    biased = torch.sigmoid(logits) + bias
    for start in range(0, tokens, 32):
        window = biased[start : start + 32]
        admitted = set(window.amax(0).sort(descending=True, stable=True).indices[:48].tolist())
        for token, experts in zip(window, routing.expert_ids[start : start + 32].tolist(), strict=True):
            assert experts == sorted(admitted, key=lambda e: -float(token[e]))[:8]


def test_ties_go_to_the_lower_expert() -> None:
    config = RouterConfig(num_experts=8, top_k=3)
    routing = route(torch.zeros(1, 8), torch.zeros(8), config)
    assert routing.expert_ids.tolist() == [[0, 1, 2]]


def test_softmax_router_weighs_by_probability() -> None:
    config = RouterConfig(8, 2, score_function="softmax", has_bias=False, normalise=False)
    logits, _ = random_scores(0, 5, 8)
    routing = route(logits, None, config)
    assert torch.equal(routing.weights, logits.softmax(-1).sort(descending=True).values[:, :2])


def test_bias_selects_but_does_not_weigh() -> None:
    config = RouterConfig(num_experts=4, top_k=1)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    logits = torch.tensor([[2.0, 0.0, 0.0, -1.0]])
    routing = route(logits, bias, config)
    assert routing.expert_ids.tolist() == [[3]]
    assert routing.weights.tolist() == [[1.0]]


def test_a_token_routes_alone_as_among_others() -> None:
    logits, bias = random_scores(4, 32, 256)
    together = route(logits, bias, LLADA2_MINI)
    for token in range(32):
        alone = route(logits[token : token + 1], bias, LLADA2_MINI)
        assert torch.equal(alone.expert_ids[0], together.expert_ids[token])
        assert torch.equal(alone.weights[0], together.weights[token])
