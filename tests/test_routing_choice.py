"""Choosing a routing: its text, the model's own and another one, and that an engine stays exact with each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import LLADA2, LLADA22, MASK, SDAR, make_tensors, write_checkpoint
from relume import DecodingConfig, Engine, RelumeError, Request
from relume.core import Phase
from relume.engine.events import Event, IterationEvent
from relume.routing.choice import NATIVE, RoutingChoice
from relume.routing.options import ROUTINGS
from relume.strategy.use import LayerUse
from relume.trace.file import TraceReader
from terminal import RELUME

PROMPTS = [[(7 * i + 3 * j) % 40 for j in range(length)] for i, length in enumerate((40, 5, 72, 33))]
#: One of each kind, all of them far from the model's own routing.
TEXTS = [
    "dmoe:p=0.3",
    "dmoe:p=0.3:block=8",
    "dmoe:p=0.3:aggregate=max:prefill=native",
    "des-seq:n=1",
    "des-vote:share=0.3",
    "team:distance=3:confidence=0.5",
    "expert-choice",
    "top-k:2",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing") / "model"
    return write_checkpoint(folder, LLADA2, make_tensors(LLADA2, 3), tokenizer=True)


def requests(**options: Any) -> list[Request]:
    decoding = DecodingConfig.from_mapping({"block_length": 16, "max_tokens": 40, "threshold": 0.6} | options)
    return [Request(input_ids=prompt, decoding=decoding) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("native", "native"),
        ("top-k:4", "top-k:n=4"),
        ("des-seq:2", "des-seq:n=2"),
        ("des-vote", "des-vote:share=0.15"),
        ("dmoe", "dmoe:p=0.6"),
        ("dmoe:p=.5:residents=0:aggregate=sum:prefill=same", "dmoe:p=0.5"),
        (
            "dmoe:prefill=native:p=0.6:block=16:guard=12:aggregate=max",
            "dmoe:p=0.6:guard=12:aggregate=max:block=16:prefill=native",
        ),
        ("expert-choice:least=4:most=8", "expert-choice:least=4.0:most=8.0"),
        ("team:distance=4:confidence=0.9", "team:distance=4:confidence=0.9"),
    ],
)
def test_a_choice_has_one_text(text: str, canonical: str) -> None:
    choice = RoutingChoice.parse(text)
    assert str(choice) == canonical
    assert RoutingChoice.parse(canonical) == choice
    assert RoutingChoice.parse("native") == NATIVE


@given(p=st.floats(0.0, 1.0, exclude_min=True), guard=st.none() | st.integers(1, 300), block=st.integers(1, 64))
def test_any_choice_is_read_back(p: float, guard: int | None, block: int) -> None:
    choice = RoutingChoice("dmoe", p=p, guard=guard, block=block, residents=p)
    assert RoutingChoice.parse(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", f"unknown routing 'magic': choose one of {', '.join(sorted(ROUTINGS))}"),
        ("dmoe:q=1", "no option 'q'; it has p, guard, aggregate, block, prefill, residents"),
        ("native:p=1", "no option 'p'; it has none"),
        ("dmoe:p=0", "p is 0.0: a number above 0 and at most 1 was expected"),
        ("dmoe:p=nan", "p is nan"),
        ("dmoe:p=much", "p is 'much': a number above 0 and at most 1 was expected"),
        ("dmoe:p=0.5:p=0.6", "p is given twice"),
        ("dmoe:aggregate=mean", "aggregate is mean: one of sum, max was expected"),
        ("dmoe:block=0", "block is 0: a whole number of at least 1 was expected"),
        ("dmoe:residents=-1", "residents is -1.0: a number of at least 0 was expected"),
        ("top-k", "routing top-k needs n: write top-k:n=..."),
        ("top-k:x", "n is 'x': a whole number"),
        ("des-vote:share=2", "share is 2.0"),
        ("expert-choice:least=5:most=4", "least is 5.0, which exceeds most"),
        ("team:distance=4", "routing team needs confidence"),
        ("dmoe:guard=1.5", "guard is '1.5'"),
    ],
)
def test_a_wrong_choice_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(RelumeError) as error:
        RoutingChoice.parse(text)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dmoe:guard=4", r"guard is 4, and only 5\.\.16 experts leave every token of this model 3"),
        ("dmoe:guard=17", r"guard is 17, and only 5\.\.16"),
        ("top-k:4", "a token of this model uses 3 experts"),
        ("des-seq:3", "n must be less than the 3 experts"),
        ("expert-choice:most=17", "a token cannot have 17.0 experts of the layer's 16"),
        ("expert-choice:least=8", "least is 8.0, which exceeds most"),
    ],
)
def test_what_the_model_cannot_run_with_is_refused_before_it_is_loaded(
    model: Path, text: str, message: str
) -> None:
    with pytest.raises(RelumeError, match=message):
        Engine.load(model, routing=text)


def test_windows_that_straddle_blocks_are_refused(model: Path) -> None:
    engine = Engine.load(model, routing="dmoe:block=16")
    message = "blocks of 8 tokens are no whole windows of 16: give a block that divides the block length"
    with pytest.raises(RelumeError, match=message):
        engine.generate(input_ids=[1, 2], block_length=8)
    with pytest.raises(RelumeError, match=message):
        engine.logits([1, 2], block_length=8)
    assert engine.generate(input_ids=[1, 2], block_length=32, max_tokens=8).token_ids


def test_models_that_admit_experts_by_themselves_take_top_k_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA22, make_tensors(LLADA22, 3))
    for text in ("dmoe", "des-seq:1", "des-vote", "team:distance=1:confidence=1", "expert-choice"):
        with pytest.raises(RelumeError, match="this model admits 6 experts per 8 tokens by itself"):
            Engine.load(folder, routing=text)
    result = Engine.load(folder, routing="top-k:2").generate(input_ids=[1, 2], block_length=8, max_tokens=8)
    assert result.statistics.routing == "top-k:n=2" and not result.statistics.lossless


@pytest.mark.parametrize("text", TEXTS)
def test_a_request_routes_alone_as_in_any_company(model: Path, text: str) -> None:
    """The same tokens, confidences and logits whatever the batch and the budget."""
    seen = []
    several: list[dict[str, Any]] = [
        {"strategy": "full", "max_batch": 1},
        {"strategy": "full", "max_batch": 8},
        {"strategy": "lru", "expert_memory": "25%", "max_batch": 8},
        {"strategy": "oled", "expert_memory": "40%", "max_batch": 3, "num_threads": 1},
    ]
    for options in several:
        with Engine.load(model, dtype="float32", routing=text, **options) as engine:
            confidences: dict[int, list[float]] = {index: [] for index in range(len(PROMPTS))}

            def note(index: int, event: Event, into: dict[int, list[float]] = confidences) -> None:
                if isinstance(event, IterationEvent):
                    into[index] += event.confidences

            results = engine.generate_batch(requests(), note)
            logits = engine.logits(PROMPTS[2], block_length=16)
            assert torch.isfinite(logits).all()
            seen.append(([result.canvas for result in results], confidences, logits.tolist()))
            assert all(result.statistics.routing == str(RoutingChoice.parse(text)) for result in results)
            assert not any(result.statistics.lossless for result in results)
    assert all(each == seen[0] for each in seen[1:])


@pytest.mark.parametrize("text", TEXTS)
def test_the_chunks_of_a_prompt_change_no_token_and_no_expert(model: Path, tmp_path: Path, text: str) -> None:
    # In the last bit a matrix product depends on its rows, and so do the logits, with any routing.
    canvases, experts, logits = [], [], []
    for blocks in (None, 1, 3):
        with Engine.load(model, dtype="float32", routing=text, prefill_blocks=blocks) as engine:
            canvases.append([result.canvas for result in engine.generate_batch(requests())])
            logits.append(engine.logits(PROMPTS[2], block_length=16, prefill_blocks=blocks))
            if text != "expert-choice":
                with engine.record(tmp_path / "trace"):
                    engine.generate_batch(requests()[:1])
                prefills = [r for r in TraceReader(tmp_path / "trace") if r.spans[0].phase is Phase.PREFILL]
                assert len(prefills) == (1 if blocks is None else -(-2 // blocks))
                experts.append(np.concatenate([record.expert_ids for record in prefills], axis=1).tolist())
    assert canvases[0] == canvases[1] == canvases[2]
    assert all(each == experts[0] for each in experts)
    for each in logits[1:]:
        torch.testing.assert_close(each, logits[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("text", ["dmoe:p=0.3", "expert-choice"])
def test_joined_batches_route_as_apart(model: Path, text: str) -> None:
    apart, joined = (
        Engine.load(model, dtype="float32", routing=text, exact_batches=exact).generate_batch(requests())
        for exact in (True, False)
    )
    assert [result.canvas for result in joined] == [result.canvas for result in apart]  # in float32, here


def test_fewer_experts_are_active_and_both_kinds_of_forwards_say_how_many(model: Path) -> None:
    found = {}
    for text in ("native", "dmoe:p=0.3", "dmoe:p=0.3:prefill=native"):
        result = Engine.load(model, routing=text).generate_batch(requests())[0]
        found[text] = result.statistics
    own, all_phases, denoising = found.values()
    assert own.lossless and not own.fallbacks and own.routing == "native"
    assert 3 <= all_phases.active_experts < own.active_experts
    assert denoising.active_experts < own.active_experts
    assert all_phases.active_experts_prefill < denoising.active_experts_prefill


@pytest.mark.parametrize("strategy", ["lru", "lfu", "counts", "oled", "hybrimoe", "finemoe", "moe-infinity"])
def test_tokens_with_more_or_fewer_experts_suit_these_strategies(model: Path, strategy: str) -> None:
    several: list[dict[str, Any]] = [{"strategy": "full"}, {"strategy": strategy, "expert_memory": "40%"}]
    full, fewer = (
        Engine.load(model, dtype="float32", routing="expert-choice", **options).generate_batch(requests())
        for options in several
    )
    assert [result.canvas for result in fewer] == [result.canvas for result in full]


def test_what_needs_as_many_experts_for_every_token_is_refused(model: Path, tmp_path: Path) -> None:
    for strategy in ("auto", "foresight"):
        with pytest.raises(RelumeError, match="the strategy foresight needs as many experts for every token"):
            Engine.load(model, routing="expert-choice", strategy=strategy, expert_memory="40%")
    engine = Engine.load(model, routing="expert-choice")
    with (
        pytest.raises(RelumeError, match="a trace holds as many experts for every token"),
        engine.record(tmp_path),
    ):
        pass
    with pytest.raises(RelumeError, match="the strategy foresight needs"):
        engine.resize_experts("40%")


def test_residents_may_decide(model: Path) -> None:
    options: dict[str, Any] = {"strategy": "lru", "expert_memory": "40%", "dtype": "float32"}
    none, weak, strong = (
        Engine.load(model, routing=f"dmoe:p=0.3:residents={strength}", **options).generate_batch(requests())
        for strength in (0, 1e-12, 1.0)
    )
    assert [result.canvas for result in weak] == [result.canvas for result in none]
    assert none[0].statistics.routing == "dmoe:p=0.3"
    assert sum(r.statistics.hit_rate for r in strong) > sum(r.statistics.hit_rate for r in none)


@pytest.mark.parametrize(
    ("extra", "own"),
    [
        ({"routing": "dmoe:p=0.4:block=8"}, "dmoe:p=0.4:block=8"),
        ({"core_threshold": 0.4}, "dmoe:p=0.4"),
        ({"routing": "top-k:2", "core_threshold": 0.4}, "top-k:n=2"),
    ],
)
def test_a_checkpoint_names_the_routing_that_it_is_made_for(
    tmp_path: Path, extra: dict[str, Any], own: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2 | extra, make_tensors(LLADA2, 3))
    request = requests()[0]
    for asked in (None, own):
        (result,) = Engine.load(folder, routing=asked).generate_batch([request])
        assert (result.statistics.routing, result.statistics.lossless) == (own, True)
        assert not result.statistics.fallbacks
    (native,) = Engine.load(folder, routing="native").generate_batch([request])
    assert (native.statistics.routing, native.statistics.lossless) == ("native", False)
    assert native.statistics.fallbacks == (f"routing native instead of the model's own {own}",)


def test_the_default_written_out_is_still_the_model_s_own(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2 | {"core_threshold": 0.4}, make_tensors(LLADA2, 3))
    (result,) = Engine.load(folder, routing="dmoe:p=0.4:guard=5").generate_batch(requests()[:1])
    assert result.statistics.lossless and not result.statistics.fallbacks


def test_a_model_s_own_routing_that_heeds_residents_is_not_lossless(tmp_path: Path) -> None:
    own = {"routing": "dmoe:p=0.4:residents=0.05"}
    folder = write_checkpoint(tmp_path / "model", LLADA2 | own, make_tensors(LLADA2, 3))
    (result,) = Engine.load(folder).generate_batch(requests()[:1])
    assert not result.statistics.lossless and not result.statistics.fallbacks


def test_a_filler_is_no_use_of_an_expert() -> None:
    ids, votes = np.array([[1, 2], [1, 1], [3, 0]]), np.array([True, True, False])
    used = np.array([[True, True], [True, False], [True, False]])
    use = LayerUse(0, ids, np.ones((3, 2), dtype=np.float32), votes, 4, used)
    assert use.counts.tolist() == [0, 2, 1, 0] and use.token_counts.tolist() == [0, 2, 1, 1]
    assert use.active.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"routing": "magic"}, "config.json: unknown routing 'magic'"),
        ({"core_threshold": 3}, "config.json: routing dmoe: p is 3.0"),
        ({"core_threshold": "high"}, "config.json: core_threshold is 'high'"),
        ({"routing": "dmoe:guard=3"}, "guard is 3, and only"),
    ],
)
def test_a_checkpoint_s_wrong_routing_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2 | extra, make_tensors(LLADA2, 3))
    with pytest.raises(RelumeError, match=message):
        Engine.load(folder)


def test_a_model_without_groups_or_bias(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", SDAR, make_tensors(SDAR, 3))
    engine = Engine.load(folder, dtype="float32", routing="dmoe:p=0.01")
    result = engine.generate(input_ids=[1, 2, 3], block_length=8, max_tokens=12)
    assert result.statistics.active_experts == 2.0  # the guard is the top-k
    assert torch.isfinite(engine.logits([1, 2, 3, MASK, MASK], block_length=4)).all()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RELUME), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_line_names_the_routing_and_says_that_it_is_lossy(tmp_path: Path) -> None:
    done = run("generate", "demo", "What is 2 + 2?", "--routing", "dmoe:p=0.5", "--max-tokens", "16", "--json")
    assert done.returncode == 0, done.stderr
    statistics = json.loads(done.stdout.splitlines()[-1])["statistics"]
    assert statistics["routing"] == "dmoe:p=0.5" and statistics["lossless"] is False
    assert "routing dmoe:p=0.5 instead of the model's own native" in done.stderr
    trace = tmp_path / "a.parquet"
    done = run("trace", "record", "demo", trace, "--num-prompts", "1", "--routing", "dmoe:p=0.5", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["routing"] == "dmoe:p=0.5", done.stderr


def test_plan_and_inspect_say_which_routing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLADA2 | {"core_threshold": 0.4}, make_tensors(LLADA2, 3))
    assert json.loads(run("inspect", folder, "--json").stdout)["routing"] == "dmoe:p=0.4"
    plan = json.loads(run("plan", folder, "--routing", "native", "--json").stdout)
    assert plan["routing"] == "native"
    assert plan["warnings"] == ["routing native instead of the model's own dmoe:p=0.4"]


@pytest.mark.parametrize("text", ["magic", "dmoe:p=2", "dmoe:q=1", "top-k"])
def test_wrong_values_are_wrong_usage(model: Path, text: str) -> None:
    done = run("generate", model, "HI", "--routing", text)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "routing" in done.stderr


def test_what_only_the_model_can_refuse_fails_with_one_line(model: Path) -> None:
    done = run("generate", model, "HI", "--routing", "dmoe:guard=2")
    assert done.returncode == 1
    assert done.stderr.startswith("relume: ") and done.stderr.count("\n") == 1
    assert "leave the guard out for 5" in done.stderr
