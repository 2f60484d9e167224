"""What the public engine promises besides the tokens: events, text, cancellation, sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import EOS, LLADA2, LLADA22, MASK, make_tensors, write_checkpoint
from relume import Engine, RelumeError, Request
from relume.config import DecodingConfig
from relume.engine.ending import AnswerCutter
from relume.engine.events import BlockEvent, IterationEvent


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("api") / "model"
    return Engine.load(write_checkpoint(folder, LLADA22, make_tensors(LLADA22, 2), tokenizer=True))


PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
OPTIONS: dict[str, Any] = {"block_length": 8, "max_tokens": 30, "temperature": 1.0, "ignore_eos": True}


@pytest.mark.parametrize("decoder", ["threshold", "joint", "indel"])
def test_events_replay_to_the_canvas(engine: Engine, decoder: str) -> None:
    stream = engine.stream(input_ids=PROMPT, decoder=decoder, threshold=0.4, **OPTIONS)
    canvas, text, iterations = list(PROMPT[:8]), "", 0
    answer: list[int] = []
    block = [*PROMPT[8:], *[MASK] * 4]
    for event in stream:
        if isinstance(event, IterationEvent):
            iterations += 1
            assert event.start == len(canvas)
            assert len(event.positions) == len(event.tokens) == len(event.confidences)
            assert set(event.edits) <= set(event.positions)
            assert all(0.0 < confidence <= 1.0 for confidence in event.confidences)
            if decoder != "indel":  # without shifts the changes alone give the block
                for position, token in zip(event.positions, event.tokens, strict=True):
                    block[position - event.start] = token
                assert list(event.token_ids) == block
            block = list(event.token_ids)
        else:
            canvas += block
            block = [MASK] * 8
            text += event.text or ""
            answer += event.token_ids
    result = stream.result
    assert tuple(canvas) == result.canvas
    assert text == result.text
    assert tuple(answer) == result.token_ids
    assert len(answer) == 30
    assert iterations == result.statistics.num_iterations == len(result.commits)


def test_only_the_last_block_event_is_last(engine: Engine) -> None:
    events = [e for e in engine.stream(input_ids=PROMPT, **OPTIONS) if isinstance(e, BlockEvent)]
    assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
    assert [event.block for event in events] == list(range(1, 1 + len(events)))


def test_cancel_keeps_finished_blocks(engine: Engine) -> None:
    whole = engine.generate(input_ids=PROMPT, **OPTIONS)
    stream = engine.stream(input_ids=PROMPT, **OPTIONS)
    for event in stream:
        if isinstance(event, BlockEvent):
            stream.cancel()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.token_ids == whole.token_ids[:4]
    assert stream.result.canvas == whole.canvas[:16]
    assert list(stream) == []


def test_a_cancelled_canvas_is_the_canvas_as_it_was(engine: Engine) -> None:
    stream = engine.stream(input_ids=PROMPT, **OPTIONS)
    event = next(stream)
    assert isinstance(event, IterationEvent)
    stream.cancel()
    assert list(stream) == []
    assert stream.result.canvas == (*PROMPT[:8], *event.token_ids)


def test_one_bad_request_stops_a_batch_before_anything_is_decoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._model.transformer, "forward", lambda *_: pytest.fail("a forward was run"))
    batch = [Request(input_ids=[1, 2]), Request(input_ids=[1, 99])]
    with pytest.raises(RelumeError, match="request 1: the token id 99"):
        engine.generate_batch(batch)
    with pytest.raises(RelumeError, match="request 0 is a str"):
        engine.generate_batch(["hello"])  # type: ignore[list-item]


def test_text_that_is_no_unicode_is_refused(engine: Engine) -> None:
    with pytest.raises(RelumeError, match="no valid Unicode at character 1"):
        engine.generate("A\ud800")


def test_cancel_before_the_first_iteration(engine: Engine) -> None:
    stream = engine.stream(input_ids=PROMPT, **OPTIONS)
    with pytest.raises(RelumeError, match="has not ended"):
        _ = stream.result
    stream.cancel()
    assert list(stream) == []
    assert stream.result.token_ids == ()


def test_the_engine_is_unharmed_by_an_abandoned_stream(engine: Engine) -> None:
    expected = engine.generate(input_ids=PROMPT, **OPTIONS)
    next(engine.stream(input_ids=PROMPT, **OPTIONS))
    assert engine.generate(input_ids=PROMPT, **OPTIONS).token_ids == expected.token_ids


def test_statistics_have_the_documented_keys(engine: Engine) -> None:
    statistics = engine.generate(input_ids=PROMPT, **OPTIONS).statistics.to_dict()
    documented = (Path(__file__).parent.parent / "docs" / "json.md").read_text()
    for key in statistics:
        assert f"| `{key}` |" in documented
    assert set(statistics) <= set(re.findall(r"\n\| `(\w+)` \|", documented))
    assert statistics["kind"] == "measured"
    assert statistics["lossless"] is True
    assert statistics["strategy"] == "full"
    assert 0 < statistics["active_experts"] <= 16


def test_early_stop_gives_the_same_answer_in_fewer_iterations(tmp_path: Path) -> None:
    tensors = make_tensors(LLADA2, 1)
    tensors["lm_head.weight"][EOS] *= 1.6
    engine = Engine.load(write_checkpoint(tmp_path, LLADA2, tensors, tokenizer=True))
    saved = 0
    for seed in range(12):
        options: dict[str, Any] = {
            "input_ids": [seed, 3, 4],
            "block_length": 16,
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 64,
        }
        early, late = (engine.generate(eos_early_stop=early, **options) for early in (True, False))
        assert early.token_ids == late.token_ids
        assert early.finish_reason == late.finish_reason
        saved += late.statistics.num_iterations - early.statistics.num_iterations
    assert saved > 0


def test_sampling_depends_on_the_seed_only(engine: Engine) -> None:
    first, again, other = (engine.generate(input_ids=PROMPT, seed=s, **OPTIONS).token_ids for s in (1, 1, 2))
    assert first == again
    assert first != other


def letters(token_ids: object) -> str:
    return "".join(chr(ord("a") + token) for token in token_ids if token < 26)  # type: ignore[attr-defined]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    block_length=st.integers(1, 9),
)
def test_streamed_text_never_takes_back_a_letter(tokens: list[int], stop: list[str], block_length: int) -> None:
    """Text is emitted as soon as it is certain, also when a stop string crosses block borders."""
    cutter = AnswerCutter(DecodingConfig(stop=tuple(stop), max_tokens=len(tokens)), [EOS], letters)
    emitted = ""
    for end in range(block_length, len(tokens) + block_length, block_length):
        ending = cutter.cut(tokens[:end])
        certain = cutter.certain_text(ending)
        assert certain is not None
        assert certain.startswith(emitted)
        emitted = certain
        if ending.reason is not None:
            break
    whole = letters(tokens)
    cut, stopped = len(whole), False
    for end in range(1, len(whole) + 1):  # the stop string that is completed first, whatever the blocks
        begins = [end - len(text) for text in stop if whole[:end].endswith(text)]
        if begins:
            cut, stopped = min(begins), True
            break
    assert emitted == whole[:cut]
    assert ending.reason == ("stop" if stopped else "length")
    assert not stopped or any(text in letters(ending.token_ids) for text in stop)


def test_incomplete_characters_are_held_back() -> None:
    data = "é€".encode()
    cutter = AnswerCutter(DecodingConfig(max_tokens=9), [], lambda ids: bytes(ids).decode(errors="replace"))
    seen = [cutter.certain_text(cutter.cut(list(data[:end]))) for end in range(1, len(data) + 1)]
    assert seen == ["", "é", "é", "é", "é€"]
