"""The naive reference against the published module's outputs, and against small cases worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from naive_decode import (
    STEPS,
    Block,
    Cell,
    Logits,
    NaiveResult,
    Rules,
    Step,
    draw,
    filtered,
    generate,
    quota,
)
from naive_model import LLADA2, SDAR, NaiveModel, block_causal_mask

ORACLE = Path(__file__).parent / "oracle"
CHECKPOINTS = ["llada2-tiny-a", "llada2-tiny-b"]

VOCAB = 12
MASK, DELETE, SPLIT, EOS = 11, 10, 9, 8
Wish = tuple[int, float]


def oracle(name: str) -> tuple[NaiveModel, dict[str, torch.Tensor], dict[str, str]]:
    folder = ORACLE / name
    with safe_open(folder / "expected.safetensors", "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return NaiveModel.open(folder), load_file(folder / "expected.safetensors"), metadata


def rows(*wishes: Wish) -> torch.Tensor:
    """Logits that give each position's wished token the wished probability; the rest is spread evenly."""
    table = torch.empty(len(wishes), VOCAB)
    for i, (token, confidence) in enumerate(wishes):
        table[i] = math.log((1 - confidence) / (VOCAB - 1))
        table[i, token] = math.log(confidence)
    return table


def block_of(tokens: list[int], fixed: int = 0, introduced: tuple[int, ...] = ()) -> Block:
    """A block in which MASK stands for a masked position."""
    cells = [Cell(t, t == MASK, t == MASK and i not in introduced) for i, t in enumerate(tokens)]
    return Block(cells, fixed)


def rules_of(length: int, **changes: Any) -> Rules:
    settings: dict[str, Any] = {"threshold": 0.5, "delete_id": DELETE, "split_id": SPLIT, **changes}
    return Rules(length, MASK, frozenset({EOS}), **settings)


def take(decoder: str, block: Block, rules: Rules, *wishes: Wish) -> Step:
    return STEPS[decoder](block, rows(*wishes), rules, [0.0] * len(wishes))


def run(prompt: list[int], script: Logits, **changes: Any) -> NaiveResult:
    settings: dict[str, Any] = {
        "decoder": "threshold",
        "block_length": 4,
        "mask_id": MASK,
        "eos_ids": {EOS},
        "threshold": 0.5,
        "edit_threshold": 0.5,
        "iterations": None,
        "max_post_iterations": 16,
        "max_tokens": 8,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        **changes,
    }
    return generate(None, prompt, logits=script, **settings)


# The model


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_forward_agrees_with_the_published_module(name: str) -> None:
    model, expected, metadata = oracle(name)
    logits = model.logits(expected["forward.input_ids"][0].tolist(), int(metadata["block_length"]))
    assert torch.allclose(logits, expected["forward.logits"][0], rtol=0, atol=1e-4)
    assert torch.equal(logits.argmax(-1), expected["forward.logits"][0].argmax(-1))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_threshold_agrees_with_the_published_module(name: str) -> None:
    model, expected, metadata = oracle(name)
    lengths = [int(key.split(".")[1]) for key in expected if key.endswith(".prompt")]
    assert len(lengths) >= 4
    for length in lengths:
        result = generate(
            model,
            expected[f"generate.{length}.prompt"].tolist(),
            decoder="threshold",
            block_length=int(metadata["block_length"]),
            mask_id=int(metadata["mask_token_id"]),
            eos_ids={int(metadata["eos_token_id"])},
            threshold=float(metadata["threshold"]),
            edit_threshold=0.0,
            iterations=None,
            max_post_iterations=0,
            max_tokens=int(metadata["gen_length"]),
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            seed=0,
        )
        canvas: list[int] = expected[f"generate.{length}.canvas"].tolist()
        assert result.canvas == canvas[: len(result.canvas)]
        assert set(canvas[len(result.canvas) :]) <= {int(metadata["mask_token_id"])}
        assert result.commits == expected[f"generate.{length}.committed_per_iteration"].tolist()


def test_stacked_experts_single_file_and_tied_head(tmp_path: Path) -> None:
    model, _, _ = oracle("llada2-tiny-b")
    stacked = {key: t for key, t in model.tensors.items() if ".experts." not in key and key != "lm_head.weight"}
    for layer in range(1, int(model.config["num_hidden_layers"])):
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = [model.tensors[f"{prefix}.{e}.{part}.weight"] for e in range(model.config["num_experts"])]
            stacked[f"{prefix}.{part}"] = torch.stack(parts)
    save_file(stacked, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**model.config, "tie_word_embeddings": True}))
    tied = {**model.tensors, "lm_head.weight": model.tensors["model.word_embeddings.weight"]}
    tokens = list(range(40))
    assert torch.equal(
        NaiveModel.open(tmp_path).logits(tokens, 16), NaiveModel(model.config, tied).logits(tokens, 16)
    )


def test_sdar_with_blocks_of_one_is_qwen3_moe(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    config = Qwen3MoeConfig(**shape, initializer_range=0.3)
    official = Qwen3MoeForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    official.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**shape, "architectures": [SDAR]}))
    tokens = torch.randint(50, (1, 20))
    with torch.no_grad():
        expected = official(tokens).logits[0]
    assert torch.allclose(NaiveModel.open(tmp_path).logits(tokens[0].tolist(), 1), expected, atol=1e-4)


def test_mask_lets_a_block_see_itself_and_earlier_ones() -> None:
    assert block_causal_mask(5, 2).int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


def router(**changes: Any) -> NaiveModel:
    config = {"architectures": [LLADA2], "num_experts_per_tok": 2, "routed_scaling_factor": 2.0, **changes}
    return NaiveModel(config, {})


def test_groups_are_chosen_by_their_two_best() -> None:
    row = [0.9, 0.1, 0.6, 0.5, 0.2, 0.2]  # groups: 1.0, 1.1, 0.4
    assert router(n_group=3, topk_group=1).route_sigmoid([[0.5] * 6], [row]) == [{2: 1.0, 3: 1.0}]


def test_ties_in_the_router_go_to_the_lower_id() -> None:
    assert list(router(n_group=2, topk_group=1).route_sigmoid([[0.5] * 4], [[0.5] * 4])[0]) == [0, 1]
    assert list(router().route_softmax(torch.full((1, 4), 0.25))[0]) == [0, 1]


def test_block_routing_admits_by_window_and_ignores_groups() -> None:
    model = router(n_group=2, topk_group=1, expert_capacity=2, expert_capacity_window=2)
    biased = [[0.9, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.8], [0.1, 0.4, 0.4, 0.4]]
    routes = model.route_sigmoid([[0.25] * 4] * 3, biased)
    assert [set(route) for route in routes] == [{0, 3}, {0, 3}, {1, 2}]
    assert routes[0][0] == 1.0


# Proposals, quota, threshold


def test_quota() -> None:
    assert [quota(rules_of(10, iterations=4), s) for s in range(6)] == [3, 3, 2, 2, 10, 10]
    assert [quota(rules_of(4), s) for s in range(5)] == [1, 1, 1, 1, 4]


def test_the_mask_is_no_candidate_but_takes_probability() -> None:
    block = block_of([MASK, MASK])
    table = torch.full((2, VOCAB), -100.0)
    table[:, MASK] = 0.0
    table[0, 3] = table[1, 4] = table[1, 5] = 0.0
    step = STEPS["threshold"](block, table, rules_of(2, threshold=0.3), [0.0, 0.0])
    assert step == Step([0, 1], [], finished=True)
    assert block.tokens() == [3, 4]
    block = block_of([MASK, MASK])
    assert STEPS["threshold"](block, table, rules_of(2, threshold=0.4), [0.0, 0.0]).commits == [0]


def test_filters_and_draw() -> None:
    row = torch.tensor([math.log(p) for p in (0.1, 0.2, 0.2, 0.4, 0.1)])

    def kept(**changes: Any) -> list[float]:
        return [round(p, 4) for p in filtered(row, Rules(5, 4, temperature=1.0, **changes), {4})]

    assert kept(top_k=2) == [0, 0.25, 0.25, 0.5, 0]
    assert kept(top_p=0.5) == [0, 0.3333, 0, 0.6667, 0]
    assert kept(top_p=0.0) == [0, 0, 0, 1, 0]
    # top_p looks at what top_k left: 0.5 + 0.25 lie before the third token, not 4/9 + 2/9.
    assert kept(top_k=3, top_p=0.7) == [0, 0.3333, 0, 0.6667, 0]
    assert [draw([0.0, 0.25, 0.0, 0.75], u) for u in (0.0, 0.24, 0.25, 0.999)] == [1, 1, 3, 3]


def test_sampling_is_reproducible_and_never_draws_the_mask() -> None:
    def flat(tokens: list[int]) -> torch.Tensor:
        table = torch.zeros(len(tokens), VOCAB)
        table[:, MASK] = 3.0
        return table

    first, again, other = (
        run([1, 2], flat, temperature=1.0, threshold=0.05, seed=seed, ignore_eos=True) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.canvas != other.canvas
    assert MASK not in first.canvas
    assert first.commits == [2, 4, 4]
    assert len(first.canvas) == 12
    assert len(first.token_ids) == 8


def test_a_mask_id_in_the_prompt_is_text() -> None:
    result = run([MASK, MASK], lambda tokens: rows(*[(3, 0.9)] * len(tokens)), max_tokens=2)
    assert result.canvas == [MASK, MASK, 3, 3]
    assert result.commits == [2]


def eos_second(tokens: list[int]) -> torch.Tensor:
    return rows(*[[(1, 0.9), (EOS, 0.8), (2, 0.4), (3, 0.3)][i % 4] for i in range(len(tokens))])


def test_end_of_text_with_and_without_early_stop() -> None:
    late = run([], eos_second)
    assert (late.canvas, late.token_ids, late.commits) == ([1, EOS, 2, 3], [1, EOS], [2, 1, 1])
    early = run([], eos_second, eos_early_stop=True)
    assert (early.canvas, early.token_ids, early.commits) == ([1, EOS, MASK, MASK], [1, EOS], [2])
    ignored = run([], eos_second, eos_early_stop=True, ignore_eos=True, max_tokens=6)
    assert (ignored.token_ids, ignored.commits) == ([1, EOS, 2, 3, 1, EOS], [2, 1, 1, 2, 1, 1])
    prompted = run([1, EOS, 5], lambda tokens: rows(*[(3, 0.9)] * len(tokens)), max_tokens=3)
    assert prompted.token_ids == [3, 3, 3]


def letters(ids: list[int]) -> str:
    return "".join("" if token == EOS else "abcdefghijkl"[token] for token in ids)


def counting(tokens: list[int]) -> torch.Tensor:
    return rows(*[(i % 8, 0.9) for i in range(len(tokens))])


def test_stop_strings() -> None:
    result = run([], counting, stop=("fg", "cd"), decode=letters, max_tokens=20)
    assert (result.token_ids, result.text, result.iterations) == ([0, 1, 2, 3], "ab", 1)
    across = run([], counting, stop=("de",), decode=letters, max_tokens=20)
    assert (across.token_ids, across.text, across.iterations) == ([0, 1, 2, 3, 4], "abc", 2)
    past_the_budget = run([], counting, stop=("de",), decode=letters, max_tokens=4)
    assert (past_the_budget.token_ids, past_the_budget.text) == ([0, 1, 2, 3], "abcd")
    after_the_end = run([], eos_second, stop=("c",), decode=letters)
    assert (after_the_end.token_ids, after_the_end.text) == ([1, EOS], "b")


# Joint


def test_joint_commits_and_edits_from_one_forward() -> None:
    rules = rules_of(4, threshold=0.7, edit_threshold=0.5)
    block = block_of([5, 2, MASK, MASK], fixed=1)
    # The prompt's 5 stays, 2 is edited, one mask is too unsure.
    assert take("joint", block, rules, (6, 0.9), (3, 0.6), (4, 0.8), (1, 0.6)) == Step([2], [1], finished=False)
    assert block.tokens() == [5, 3, 4, MASK]
    # No mask is sure enough: the best one goes all the same. An edit needs more than its threshold.
    assert take("joint", block, rules, (6, 0.9), (7, 0.4), (4, 0.8), (1, 0.6)) == Step([3], [], finished=False)
    assert block.tokens() == [5, 3, 4, 1]
    assert take("joint", block, rules, (6, 0.9), (3, 0.9), (2, 0.6), (1, 0.6)) == Step([], [2], finished=False)
    assert take("joint", block, rules, (6, 0.9), (3, 0.9), (2, 0.6), (1, 0.6)) == Step([], [], finished=True)
    assert block.tokens() == [5, 3, 2, 1]


def flip(tokens: list[int]) -> torch.Tensor:
    """Wants every position to change between 1 and 2 in each iteration."""
    return rows(*[(2 if token == 1 else 1, 0.9) for token in tokens])


@pytest.mark.parametrize(
    ("budget", "commits", "canvas"), [(0, [2], [1, 1]), (1, [2, 0], [2, 2]), (2, [2, 0, 0], [1, 1])]
)
def test_joint_post_budget(budget: int, commits: list[int], canvas: list[int]) -> None:
    result = run([], flip, decoder="joint", block_length=2, max_tokens=2, max_post_iterations=budget)
    assert (result.commits, result.canvas) == (commits, canvas)


def test_joint_edit_threshold_zero_edits_everything() -> None:
    block = block_of([1, MASK])
    assert take("joint", block, rules_of(2, edit_threshold=0.0), (2, 0.2), (3, 0.2)) == Step(
        [1], [0], finished=False
    )
    assert block.tokens() == [2, 3]


# Insertions and deletions


def test_indel_delete_pads_with_introduced_masks() -> None:
    block = block_of([1, 2, 3, MASK], fixed=1)
    step = take("indel", block, rules_of(4), (DELETE, 0.9), (DELETE, 0.9), (3, 0.9), (4, 0.9))
    assert step == Step([3], [1], finished=False)
    assert block.cells == [Cell(1), Cell(3), Cell(4), Cell(MASK, masked=True, original=False)]


def test_indel_split_inserts_a_mask_and_cuts_the_end() -> None:
    block = block_of([1, 2, 3, MASK], fixed=1)
    step = take("indel", block, rules_of(4), (1, 0.9), (SPLIT, 0.9), (3, 0.9), (4, 0.9))
    assert step == Step([3], [1], finished=False)
    assert block.cells == [Cell(1), Cell(MASK, masked=True, original=False), Cell(2), Cell(3)]


def test_indel_masks_take_delete_and_split_too() -> None:
    block = block_of([MASK, MASK, MASK, MASK])
    step = take("indel", block, rules_of(4), (DELETE, 0.9), (SPLIT, 0.8), (3, 0.9), (4, 0.4))
    assert step == Step([0, 1, 2], [], finished=False)
    introduced, original = Cell(MASK, masked=True, original=False), Cell(MASK, masked=True, original=True)
    assert block.cells == [introduced, original, Cell(3), original]
    block = block_of([MASK, 5], introduced=(0,))
    take("indel", block, rules_of(2), (SPLIT, 0.9), (5, 0.9))
    assert block.cells == [introduced, introduced]


def test_indel_floor_counts_introduced_masks() -> None:
    block = block_of([MASK, MASK, MASK, MASK], introduced=(0,))
    step = take("indel", block, rules_of(4), (1, 0.2), (2, 0.3), (3, 0.4), (4, 0.1))
    assert step.commits == [1, 2]  # quota 1 and one introduced mask
    block = block_of([MASK, MASK, MASK, 7], introduced=(0, 1, 2))
    assert take("indel", block, rules_of(4), (1, 0.2), (2, 0.3), (3, 0.4), (7, 0.9)).commits == [0, 1, 2]
    block = block_of([MASK, MASK, MASK, 7])
    block.iteration = 2
    step = take("indel", block, rules_of(4, iterations=2), (1, 0.2), (2, 0.3), (3, 0.4), (7, 0.9))
    assert step.commits == [0, 1, 2]


def test_indel_stops_when_nothing_changes() -> None:
    result = run([], counting, decoder="indel", max_tokens=4)
    assert (result.canvas, result.commits) == ([0, 1, 2, 3], [4, 0])


def test_indel_loop_guard() -> None:
    rules = rules_of(2)
    block = block_of([1, 5])

    def flipped(first: float, second: float) -> Step:
        table = rows(
            (2 if block.cells[0].token == 1 else 1, first), (6 if block.cells[1].token == 5 else 5, second)
        )
        table[1, 7] += 0.1  # the best of the rest at position 1
        return STEPS["indel"](block, table, rules, [0.0, 0.0])

    assert flipped(0.9, 0.8) == Step([], [0, 1], finished=False)
    assert block.tokens() == [2, 6]
    flipped(0.9, 0.8)
    assert block.tokens() == [1, 5]  # now the guard: 6 and 5 were written at position 1
    flipped(0.9, 0.8)
    assert block.tokens() == [2, 7]


def test_indel_loop_guard_tells_masks_from_text_and_takes_the_lowest_position() -> None:
    rules = rules_of(2)
    block = block_of([MASK, 5], introduced=(0,))
    take("indel", block, rules, (DELETE, 0.9), (5, 0.9))
    assert block.tokens() == [5, MASK]
    take("indel", block, rules, (5, 0.9), (DELETE, 0.9))
    take("indel", block, rules, (SPLIT, 0.9), (SPLIT, 0.9))
    assert block.cells == [Cell(MASK, masked=True), Cell(5)]  # seen: the guard turns position 0
    # SPLIT and DELETE were taken at position 0 before, and 0 is then the lowest of the equal rest.
    take("indel", block, rules, (DELETE, 0.9), (6, 0.9))
    assert block.tokens() == [0, 6]


def test_indel_final_iteration_bans_delete_and_split() -> None:
    table = rows((DELETE, 0.9), (SPLIT, 0.9))
    table[:, 4] += 0.1
    block = block_of([1, MASK], introduced=(1,))
    rules = rules_of(2, max_post_iterations=2)
    assert STEPS["indel"](block, table, rules, [0.0, 0.0]) == Step([1], [0], finished=False)
    assert block.tokens() == [MASK, MASK]
    assert STEPS["indel"](block, table, rules, [0.0, 0.0]) == Step([0, 1], [], finished=True)
    assert block.tokens() == [4, 4]


@pytest.mark.parametrize(("budget", "canvas"), [(0, [2, 2]), (1, [2, 2]), (2, [1, 1])])
def test_indel_post_budget(budget: int, canvas: list[int]) -> None:
    result = run([], flip, decoder="indel", block_length=2, max_tokens=2, max_post_iterations=budget)
    assert result.canvas == canvas
    assert result.iterations == 1 + max(budget, 1)


def test_indel_is_final_by_its_number_while_an_original_mask_lives_on() -> None:
    calls: list[int] = []

    def script(tokens: list[int]) -> torch.Tensor:
        number = len(calls)
        calls.append(number)
        if number == 0:
            return rows((0, 0.9), (0, 0.3), (0, 0.2))
        if number == 1:
            return rows((1, 0.9), (SPLIT, 0.4), (0, 0.2))
        # From here on the block is: text that changes, an introduced mask, the original mask of position 1.
        return rows((number, 0.9), (DELETE, 0.9), (SPLIT, 0.9))

    result = run(
        [],
        script,
        decoder="indel",
        block_length=3,
        max_tokens=3,
        max_post_iterations=1,
        delete_id=DELETE,
        split_id=SPLIT,
    )
    assert (result.commits, result.canvas) == ([1, 1, 2, 2, 2], [4, 0, 0])


def test_indel_always_ends() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)

        def noise(tokens: list[int], generator: torch.Generator = generator) -> torch.Tensor:
            return 4 * torch.randn(len(tokens), VOCAB, generator=generator)

        result = run(
            [3],
            noise,
            decoder="indel",
            max_tokens=3,
            max_post_iterations=3,
            delete_id=DELETE,
            split_id=SPLIT,
            edit_threshold=0.0,
        )
        assert result.iterations <= 4 + 3 + 1
        assert result.canvas[0] == 3
        assert not {MASK, DELETE, SPLIT} & set(result.canvas[1:])
