"""Routings that use fewer experts: what they choose among, that it always suffices, and what they equal."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.config import RouterConfig
from relume.core import Phase, RelumeError, Routing
from relume.routing import route
from relume.routing.choice import NATIVE, RoutingChoice
from relume.routing.coreset import coreset, limit_groups, restrict
from relume.routing.expert_choice import tokens_per_expert
from relume.routing.guard import legal_guard
from relume.routing.team import hot_tokens
from relume.routing.token_choice import choose_experts, keep_groups
from relume.routing.tokens import RoutedTokens

MINI = RouterConfig(num_experts=256, top_k=8, num_groups=8, kept_groups=4, scale=2.5)
SMALL = RouterConfig(num_experts=32, top_k=4, num_groups=8, kept_groups=3, scale=2.5)
SETTINGS = [
    (8, 2, 4, 2),
    (8, 3, 4, 2),
    (8, 1, 2, 1),
    (8, 4, 2, 1),
    (8, 3, 2, 1),
    (8, 1, 4, 3),
    (8, 2, 1, 1),
    (6, 2, 6, 3),
    (9, 3, 3, 1),
    (9, 6, 3, 2),
    (10, 4, 5, 3),
    (12, 3, 4, 2),
    (12, 5, 4, 2),
    (12, 6, 4, 3),
    (12, 6, 6, 4),
    (12, 6, 6, 6),
    (12, 8, 3, 2),
]


def draw(seed: int, tokens: int, config: RouterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits and bias. Tokens share a liking, as real ones do, or no coreset would be small."""
    generator = torch.Generator().manual_seed(seed)
    shared = 2.0 * torch.randn(1, config.num_experts, generator=generator)
    logits = shared - 2.0 + torch.randn(tokens, config.num_experts, generator=generator)
    return logits, 0.2 * torch.randn(config.num_experts, generator=generator)


def published(rows: list[list[float]], top_k: int, p: float, guard: int, largest: bool = False) -> set[int]:
    """dMoE's coreset of one window of biased scores, by loops (arXiv 2605.30876, algorithm 1)."""
    total = [0.0] * len(rows[0])
    for row in rows:
        best = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]
        for expert in best:
            vote = max(0.0, row[expert])
            total[expert] = max(total[expert], vote) if largest else total[expert] + vote
    whole = sum(total) + 1e-20
    shares = [vote / whole for vote in total]
    order = sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert))
    kept, cumulative = [], 0.0
    for expert in order:
        cumulative += shares[expert]
        kept.append(expert)
        if cumulative > p:
            break
    return set(order[:guard] if len(kept) < guard else kept)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 70),
    window=st.sampled_from([4, 8, 16, 32]),
    p=st.floats(0.02, 0.99),
    aggregate=st.sampled_from(["sum", "max"]),
    config=st.sampled_from([MINI, SMALL]),
)
def test_the_coreset_is_the_published_one(
    seed: int, tokens: int, window: int, p: float, aggregate: str, config: RouterConfig
) -> None:
    logits, bias = draw(seed, tokens, config)
    biased = torch.sigmoid(logits) + bias
    choice = RoutingChoice("dmoe", p=p, aggregate=aggregate)
    found = coreset(biased, config, choice, window)
    assert len(found) == -(-tokens // window)
    for index, inside in enumerate(found):
        rows = biased[index * window : (index + 1) * window].tolist()
        expected = published(rows, config.top_k, p, choice.smallest(config), aggregate == "max")
        assert set(inside.nonzero().flatten().tolist()) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(1, 4),
    text=st.sampled_from(
        ["dmoe:p=0.3", "dmoe:p=0.01:aggregate=max", "dmoe:p=0.6:block=4", "des-seq:n=1", "des-vote:share=0.1"]
    ),
    config=st.sampled_from([MINI, SMALL]),
)
def test_every_token_gets_its_experts_out_of_the_coreset(
    seed: int, blocks: int, text: str, config: RouterConfig
) -> None:
    logits, bias = draw(seed, 8 * blocks, config)
    choice = RoutingChoice.parse(text)
    window = choice.window(8)
    routing = route(logits, bias, config, choice, RoutedTokens(8))
    inside = coreset(torch.sigmoid(logits) + bias, config, choice, window)
    assert int(inside.sum(dim=-1).min()) >= choice.smallest(config)
    for token, experts in enumerate(routing.expert_ids.tolist()):
        assert len(set(experts)) == config.top_k
        assert all(inside[token // window, expert] for expert in experts)
    scores = torch.sigmoid(logits).gather(-1, routing.expert_ids)
    torch.testing.assert_close(routing.weights, 2.5 * scores / scores.sum(dim=-1, keepdim=True))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), low=st.floats(0.01, 1.0), high=st.floats(0.01, 1.0))
def test_more_of_the_votes_never_takes_an_expert_away(seed: int, low: float, high: float) -> None:
    logits, bias = draw(seed, 32, MINI)
    low, high = min(low, high), max(low, high)
    fewer, more = (
        coreset(torch.sigmoid(logits) + bias, MINI, RoutingChoice("dmoe", p=p), 16) for p in (low, high)
    )
    assert bool((more | ~fewer).all())


def test_all_of_the_votes_is_the_model_s_own_routing() -> None:
    logits, bias = draw(3, 32, MINI)
    assert coreset(torch.sigmoid(logits) + bias, MINI, RoutingChoice("dmoe", p=1.0), 32).all()
    own, all_votes = (route(logits, bias, MINI, choice) for choice in (NATIVE, RoutingChoice("dmoe", p=1.0)))
    assert torch.equal(own.expert_ids, all_votes.expert_ids) and torch.equal(own.weights, all_votes.weights)


def test_a_negative_score_does_not_vote() -> None:
    config = RouterConfig(num_experts=6, top_k=2)
    biased = torch.tensor([[0.9, -0.5, -0.6, -0.7, -0.8, -0.9]] * 4)
    inside = coreset(biased, config, RoutingChoice("dmoe", p=0.5), 4)
    assert inside.tolist() == [[True, True, False, False, False, False]]  # a vote for 0 only; filled up to k


def brute_guard(num_experts: int, top_k: int, num_groups: int, kept_groups: int) -> int:
    """The least size that suffices for every coreset and every order of the groups, by trying them all."""
    size = num_experts // num_groups
    orders = torch.tensor(list(permutations(range(num_groups))))
    scores = 10.0 * orders.repeat_interleave(size, dim=1) + torch.arange(num_experts) / num_experts + 1.0
    fails = []
    for count in range(1, num_experts + 1):
        chosen = torch.tensor(list(combinations(range(num_experts), count)))
        sets = torch.zeros(len(chosen), num_experts, dtype=torch.bool).scatter_(1, chosen, True)
        least = num_experts
        for part in sets.split(max(1, 200_000 // len(orders))):
            masked = torch.where(part.unsqueeze(1), scores, float("-inf")).flatten(0, 1)
            legal = keep_groups(masked, num_groups, kept_groups).isfinite().sum(dim=-1)
            least = min(least, int(legal.min()))
        fails.append(least < top_k)
    assert fails == sorted(fails, reverse=True)  # no larger coreset fails again
    return sum(fails) + 1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_guard_is_the_smallest_that_always_suffices(setting: tuple[int, int, int, int]) -> None:
    assert legal_guard(*setting) == brute_guard(*setting)


def test_the_guard_of_published_models() -> None:
    assert legal_guard(256, 8, 8, 4) == 12
    assert legal_guard(128, 8, 1, 1) == 8


def test_eleven_experts_can_leave_a_token_seven() -> None:
    # Three groups hold two coreset experts each, the other five one. Those score -inf, so the fourth group that is
    # kept is the first of them.
    held = [0, 1, 32, 33, 64, 65, 96, 128, 160, 192, 224]
    logits, bias = draw(5, 1, MINI)
    biased = torch.sigmoid(logits) + bias

    def chosen(experts: list[int]) -> Routing:
        inside = torch.zeros(1, 256, dtype=torch.bool)
        inside[0, experts] = True
        return choose_experts(biased, limit_groups(restrict(biased, inside, 1), MINI), MINI)

    assert len(set(chosen(held).expert_ids[0].tolist()) - set(held)) == 1  # one that the coreset does not hold
    for extra in (2, 97, 255):
        assert set(chosen([*held, extra]).expert_ids[0].tolist()) <= {*held, extra}
    with pytest.raises(RelumeError, match=r"guard is 11, and only 12\.\.256 .* leave the guard out for 12"):
        RoutingChoice.parse("dmoe:guard=11").check(MINI)
    RoutingChoice.parse("dmoe:guard=12").check(MINI)


@pytest.mark.parametrize("window", [8, 16, 24, 32])
def test_a_partial_window_votes_for_itself(window: int) -> None:
    logits, bias = draw(6, 40, MINI)
    biased = torch.sigmoid(logits) + bias
    choice = RoutingChoice("dmoe", p=0.5)
    together = coreset(biased, MINI, choice, window)
    chosen = route(logits, bias, MINI, choice, RoutedTokens(window)).expert_ids
    assert together.repeat_interleave(window, dim=0)[: len(chosen)].gather(1, chosen).all()
    for index, part in enumerate(biased.split(window)):
        assert torch.equal(together[index : index + 1], coreset(part, MINI, choice, window))
        assert set(together[index].nonzero().flatten().tolist()) == published(part.tolist(), 8, 0.5, 12)


def test_windows_of_a_batch_of_blocks_are_those_of_each_block() -> None:
    logits, bias = draw(7, 96, MINI)
    choice = RoutingChoice.parse("dmoe:p=0.4:block=16")
    together = route(logits, bias, MINI, choice, RoutedTokens(32))
    for index in range(3):
        rows = slice(32 * index, 32 * index + 32)
        alone = route(logits[rows], bias, MINI, choice, RoutedTokens(32))
        assert torch.equal(alone.expert_ids, together.expert_ids[rows])
        assert torch.equal(alone.weights, together.weights[rows])


def test_residents_win_near_ties_and_no_more_experts_come_in() -> None:
    config = RouterConfig(num_experts=6, top_k=2, has_bias=False)
    scores = torch.tensor([[0.8, 0.7, 0.0, 0.0, 0.0, 0.0], [0.8, 0.0, 0.69, 0.0, 0.0, 0.0]])
    residents = torch.tensor([False, False, True, False, True, False])

    def inside(text: str) -> list[int]:
        return coreset(scores, config, RoutingChoice.parse(text), 2, residents)[0].nonzero().flatten().tolist()

    assert inside("dmoe:p=0.3") == inside("dmoe:p=0.3:residents=0") == [0, 1]
    assert inside("dmoe:p=0.3:residents=0.01") == [0, 2]  # 0.69 for 0.7, the resident one
    assert inside("dmoe:p=0.3:residents=100") == [2, 4]  # 4 has no vote, and is taken for 0's; never more experts


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), p=st.floats(0.05, 1.0))
def test_a_strength_of_0_is_the_published_coreset(seed: int, p: float) -> None:
    logits, bias = draw(seed, 32, MINI)
    biased = torch.sigmoid(logits) + bias
    residents = torch.rand(256, generator=torch.Generator().manual_seed(seed)) < 0.3
    without, none = RoutingChoice("dmoe", p=p), RoutingChoice("dmoe", p=p, residents=0.0)
    assert without == none and not none.uses_residents
    assert torch.equal(coreset(biased, MINI, without, 32), coreset(biased, MINI, none, 32, residents))


def test_forwards_that_do_not_denoise_may_route_natively() -> None:
    logits, bias = draw(8, 32, MINI)
    same, native = (RoutingChoice("dmoe", p=0.3, prefill=prefill) for prefill in ("same", "native"))
    own = route(logits, bias, MINI).expert_ids
    for phase in (Phase.PREFILL, Phase.COMMIT):
        assert torch.equal(route(logits, bias, MINI, native, RoutedTokens(32, phase)).expert_ids, own)
        assert not torch.equal(route(logits, bias, MINI, same, RoutedTokens(32, phase)).expert_ids, own)
    assert not torch.equal(route(logits, bias, MINI, native, RoutedTokens(32)).expert_ids, own)


def test_a_narrower_router_is_top_k() -> None:
    logits, bias = draw(9, 32, MINI)
    routing = route(logits, bias, MINI, RoutingChoice.parse("top-k:4"))
    assert torch.equal(routing.expert_ids, route(logits, bias, MINI).expert_ids[:, :4])
    torch.testing.assert_close(routing.weights.sum(dim=-1), torch.full((32,), 2.5))


def test_des_seq_unites_what_each_token_likes_best() -> None:
    logits, bias = draw(10, 64, MINI)
    biased = torch.sigmoid(logits) + bias
    inside = coreset(biased, MINI, RoutingChoice.parse("des-seq:n=2"), 32)
    for index in range(2):
        best = biased[32 * index : 32 * index + 32].topk(2).indices
        assert set(inside[index].nonzero().flatten().tolist()) >= set(best.flatten().tolist())
        assert int(inside[index].sum()) == max(12, len(best.unique()))


@pytest.mark.parametrize(("share", "size"), [(0.15, 38), (0.01, 12), (1.0, 256)])
def test_des_vote_takes_a_share_of_the_experts(share: float, size: int) -> None:
    logits, bias = draw(11, 64, MINI)
    inside = coreset(torch.sigmoid(logits) + bias, MINI, RoutingChoice("des-vote", share=share), 32)
    assert inside.sum(dim=-1).tolist() == [size, size]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    distance=st.integers(0, 20),
    masks=st.floats(0.0, 1.0),
    config=st.sampled_from([MINI, SMALL]),
)
def test_cold_tokens_use_what_hot_ones_use(seed: int, distance: int, masks: float, config: RouterConfig) -> None:
    logits, bias = draw(seed, 32, config)
    generator = torch.Generator().manual_seed(seed)
    masked = torch.rand(32, generator=generator) < masks
    confidences = torch.rand(32, generator=generator)
    confidences[::5] = float("nan")
    choice = RoutingChoice("team", distance=distance, confidence=0.8)
    tokens = RoutedTokens(16, Phase.DENOISE, masked, confidences)
    hot = hot_tokens(32, choice, tokens, logits.device).tolist()
    own, routing = (route(logits, bias, config, each, tokens).expert_ids.tolist() for each in (NATIVE, choice))
    guard = legal_guard(config.num_experts, config.top_k, config.num_groups, config.kept_groups)
    for start in (0, 16):
        block = range(start, start + 16)
        first = next((token for token in block if masked[token]), start + 16)
        for token in block:
            near = 0 <= token - first < distance
            assert hot[token] == (not masked[token] or near or float(confidences[token]) > 0.8)
        shared = {expert for token in block if hot[token] for expert in own[token]}
        used = {expert for token in block for expert in routing[token]}
        assert len(used | shared) <= max(len(shared), guard)
        assert all(routing[token] == own[token] for token in block if hot[token])
        assert all(len(set(routing[token])) == config.top_k for token in block)


@pytest.mark.parametrize("masked", [0, 16, 32])
def test_each_expert_takes_as_many_tokens(masked: int) -> None:
    config = RouterConfig(num_experts=16, top_k=4, num_groups=4, kept_groups=2, scale=2.5)
    logits, bias = draw(12, 64, config)
    choice = RoutingChoice("expert-choice")
    states = (torch.arange(64) % 32) < masked
    routing = route(logits, bias, config, choice, RoutedTokens(32, masked=states))
    assert routing.used is not None
    per_expert = round((2.0 + 2.0 * (1 - masked / 32)) * 32 / 16)
    for start in (0, 32):
        rows = slice(start, start + 32)
        taken = routing.expert_ids[rows][routing.used[rows]]
        assert torch.bincount(taken, minlength=16).tolist() == [per_expert] * 16
        best = logits[rows].topk(per_expert, dim=0).indices  # the bias is the same for all tokens
        for expert in range(16):
            holds = ((routing.expert_ids[rows] == expert) & routing.used[rows]).any(dim=-1)
            assert set(holds.nonzero().flatten().tolist()) == set(best[:, expert].tolist())
    assert (routing.weights[~routing.used] == 0.0).all()
    has_any = routing.used.any(dim=-1)
    torch.testing.assert_close(routing.weights[has_any].sum(dim=-1), torch.full((int(has_any.sum()),), 2.5))


def test_an_expert_takes_a_token_at_least_and_no_more_than_there_are() -> None:
    choice = RoutingChoice("expert-choice", least=4.0, most=8.0)
    sizes, masked = torch.tensor([32, 4, 1]), torch.tensor([0, 4, 0])
    assert tokens_per_expert(sizes, masked, choice, 256).tolist() == [1, 1, 1]
    assert tokens_per_expert(sizes, masked, choice, 4).tolist() == [32, 4, 1]
