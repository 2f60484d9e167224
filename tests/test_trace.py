"""The trace file, what is read off a trace, and the calibrated one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from relume.core import Phase, RelumeError, SpanSignals
from relume.strategy.use import ExpertShape
from relume.trace.calibrated import TARGETS, CalibratedConfig, synthesise_trace
from relume.trace.file import TraceReader, TraceWriter
from relume.trace.info import summarise
from relume.trace.metadata import TraceMetadata
from relume.trace.profile import gather_profile, read_model_profile, write_model_profile
from relume.trace.record import ForwardRecord
from relume.trace.views import phase_of
from traces import SMALL_CONFIG, SMALL_TRACE, joined, make_record, make_span, small_records, write_trace

METADATA = dataclasses.replace(
    SMALL_CONFIG.metadata(), model="m", strategy="lru", slots=(9,), shared=True, kind="measured", hardware="h"
)


def assert_same(left: object, right: object) -> None:
    """Equal to the bit, arrays with their types."""
    if isinstance(left, np.ndarray):
        assert isinstance(right, np.ndarray)
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    elif isinstance(left, tuple):
        assert isinstance(right, tuple) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, (ForwardRecord, SpanSignals)):
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right and type(left) is type(right)


def varied_records() -> list[ForwardRecord]:
    """Batches of one and two, misses, times, odd floats, a request that ends."""
    generator = np.random.default_rng(0)
    records = small_records()
    records[5] = joined(records[5], records[40])
    for index, record in enumerate(records):
        misses = tuple(np.arange(generator.integers(4), dtype=np.uint16) for _ in range(4))
        records[index] = dataclasses.replace(
            record, misses=misses, bytes_loaded=2**40 + index, wall_s=generator.random(), stall_s=0.1
        )
    odd = np.array([np.nan, -0.0, 1e-45, 1 / 3], dtype=np.float32)
    records[7].weights[0, :2] = odd.reshape(2, 2)
    return records


def test_records_come_back_to_the_bit(tmp_path: Path) -> None:
    records = varied_records()
    path = write_trace(tmp_path / "t", records, METADATA, row_group=10)
    reader = TraceReader(path)
    assert reader.metadata == METADATA
    assert reader.num_forwards == len(records)
    for _ in range(2):
        assert_same(tuple(reader), tuple(records))
    assert pq.ParquetFile(path).num_row_groups == -(-len(records) // 10)


def test_an_empty_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [], METADATA)
    assert list(TraceReader(path)) == []
    summary = summarise(TraceReader(path), METADATA.shape)
    assert (summary.hit_rate, summary.num_tokens, summary.active_by_layer) == (None, 0, ())
    with pytest.raises(RelumeError, match="no denoising forward"):
        gather_profile(TraceReader(path), METADATA.shape)


def test_the_committed_trace_is_what_its_script_makes() -> None:
    assert SMALL_TRACE.stat().st_size < 200_000
    made = small_records()
    kept = list(TraceReader(SMALL_TRACE))
    assert len(made) == len(kept)
    for one, other in zip(made, kept, strict=True):
        assert_same(one.expert_ids, other.expert_ids)
        assert_same(one.spans, other.spans)
        assert np.allclose(one.weights, other.weights)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("old")

    def broken() -> Iterator[ForwardRecord]:
        yield small_records()[0]
        raise KeyError

    with pytest.raises(KeyError):
        write_trace(path, broken(), METADATA, row_group=1)
    assert [file.name for file in tmp_path.iterdir()] == ["t"]
    assert path.read_text() == "old"
    with pytest.raises(RelumeError, match="cannot be written"):
        TraceWriter(tmp_path / "nowhere" / "t", METADATA)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RelumeError, match="this is a folder"):
        TraceWriter(tmp_path / "folder", METADATA)
    assert not (tmp_path / "folder.part").exists()


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), path)


def other_version(path: Path) -> None:
    key = next(iter(METADATA.encode()))
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({key: json.dumps({"version": 99})}), path)


def other_columns(path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(METADATA.encode()), path)


def damaged_metadata(path: Path) -> None:
    key = next(iter(METADATA.encode()))
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({key: b'{"version": 2}'}), path)


def truncated(path: Path) -> None:
    path.write_bytes(SMALL_TRACE.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such trace"),
        (lambda path: path.write_bytes(b""), "truncated or damaged"),
        (lambda path: path.write_text("some text, not a trace"), "truncated or damaged"),
        (lambda path: path.mkdir(), "truncated or damaged"),
        (truncated, "truncated or damaged"),
        (foreign, "no trace of relume's"),
        (other_version, "a trace of version 99, this relume reads version 2"),
        (other_columns, "columns are not those"),
        (damaged_metadata, "metadata are damaged"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, make: object, words: str) -> None:
    path = tmp_path / "t"
    assert callable(make)
    make(path)
    with pytest.raises(RelumeError, match=words) as caught:
        TraceReader(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data = bytearray(SMALL_TRACE.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(RelumeError, match="truncated or damaged"):
        list(TraceReader(tmp_path / "t"))


def test_metadata_that_contradict_themselves() -> None:
    with pytest.raises(RelumeError, match="2 numbers of slots: 1 were expected"):
        dataclasses.replace(METADATA, slots=(1, 2))
    with pytest.raises(RelumeError, match="kind"):
        dataclasses.replace(METADATA, kind="guessed")


def test_summary_by_hand() -> None:
    """One layer, four experts; two iterations of a block, then another block."""
    shape = ExpertShape(1, 4, 1)
    old, new = np.array([9, 9]), np.array([1, 9])
    first = make_record([[[0], [1]]], [make_span(2, next_token_ids=new, token_ids=old)])
    masked = np.array([False, True])
    second = make_record([[[2], [1]]], [make_span(2, token_ids=new, masked=masked, committed=masked)])
    other = make_record([[[3], [3]]], [make_span(2, start=2)])
    second = dataclasses.replace(second, misses=(np.array([2], dtype=np.uint16),), bytes_loaded=5, wall_s=0.5)
    commit = make_record([[[0], [0]]], [make_span(2, Phase.COMMIT)])
    summary = summarise([first, second, commit, other], shape)
    assert summary.forwards == {"prefill": 0, "denoise": 3, "commit": 1}
    assert (summary.num_requests, summary.num_blocks, summary.num_tokens) == (1, 2, 3)
    assert summary.tokens_per_iteration == 1.0
    assert summary.active_experts == pytest.approx(5 / 3)
    assert summary.active_sd == pytest.approx(np.std([2, 2, 1]))
    assert summary.similarity == pytest.approx(0.5)
    assert (summary.similarity_far, summary.overlap) == (None, 0.5)
    assert (summary.kept_masked, summary.kept_committed, summary.kept_committing) == (1.0, None, 0.0)
    assert summary.top_share == 2 / 6
    assert summary.hit_rate == pytest.approx(4 / 5)
    assert (summary.bytes_loaded, summary.wall_s) == (5, 0.5)


def test_profile_counts_voting_tokens(tmp_path: Path) -> None:
    shape = ExpertShape(1, 4, 1)
    prefill = make_record([[[0], [1], [2]]], [make_span(3, Phase.PREFILL, block_length=1)])
    profile = gather_profile([prefill, make_record([[[1], [1]]]), make_record([[[1], [3]]])], shape)
    assert profile.popularity.tolist() == [[0.0, 1.0, 1 / 3, 1 / 3]]
    assert profile.mean_active.tolist() == [1.5]
    path = tmp_path / "p.npz"
    write_model_profile(profile, path)
    loaded = read_model_profile(path, shape)
    assert_same(loaded.popularity, profile.popularity)
    assert_same(loaded.mean_active, profile.mean_active)
    assert loaded.model == profile.model == ""
    write_model_profile(replace(profile, model="one"), path)
    assert read_model_profile(path, shape).model == "one"
    with pytest.raises(RelumeError, match="1 layers of 4 experts, 1 a token, the model has 2 layers"):
        read_model_profile(path, ExpertShape(2, 4, 1))
    with pytest.raises(RelumeError, match="cannot be written"):
        write_model_profile(profile, tmp_path / "nowhere" / "p")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RelumeError, match="Is a directory"):
        write_model_profile(profile, tmp_path / "folder")
    assert not (tmp_path / "folder.part").exists()


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    shape = ExpertShape(1, 4, 1)
    with pytest.raises(RelumeError, match="no such profile"):
        read_model_profile(path, shape)
    path.write_text("text")
    with pytest.raises(RelumeError, match=r"no profile.*no \.npz file"):
        read_model_profile(path, shape)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(RelumeError, match=r"no profile.*no \.npz file"):
        read_model_profile(path, shape)
    np.savez(path, version=np.array(object()), allow_pickle=True)
    with pytest.raises(RelumeError, match="damaged") as caught:
        read_model_profile(path, shape)
    assert "pickle" not in str(caught.value)
    np.savez(path, version=7)
    with pytest.raises(RelumeError, match="version 7"):
        read_model_profile(path, shape)
    np.savez(path, version=3)
    with pytest.raises(RelumeError, match="damaged"):
        read_model_profile(path, shape)


def test_the_calibrated_trace_meets_published_figures() -> None:
    config = CalibratedConfig()
    summary = summarise(synthesise_trace(config, np.random.default_rng(0)), config.shape).to_dict()
    for name, (low, high, _) in TARGETS.items():
        assert low <= summary[name] <= (0.4 if name == "kept_committing" else high), name
    assert summary["top_share"] > 0.5
    assert (summary["num_requests"], summary["num_blocks"]) == (4, 24)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_signals_of_the_calibrated_trace_follow_each_other(groups: tuple[int, int]) -> None:
    config = dataclasses.replace(SMALL_CONFIG, groups=groups)
    records = list(synthesise_trace(config, np.random.default_rng(3)))
    for record, following in zip(records, [*records[1:], None], strict=True):
        span = record.spans[0]
        assert len(np.unique(record.expert_ids[0, 0])) == config.shape.top_k
        assert (np.diff(record.weights, axis=-1) <= 0).all()
        assert len(np.unique(record.expert_ids // (24 // groups[0]), axis=-1)) <= 24
        assert (span.committed <= span.masked).all()
        assert (span.confidences[~span.masked] == 1).all()
        if not len(span.next_token_ids):
            assert span.phase is Phase.DENOISE and (span.committed == span.masked).all()
            assert following is None or following.spans[0].request == span.request + 1
            continue
        assert following is not None
        after = following.spans[0]
        assert (after.request, after.start) == (span.request, span.next_start)
        assert np.array_equal(after.token_ids, span.next_token_ids)
        if after.start == span.start:
            assert np.array_equal(after.masked, span.masked & ~span.committed)
            assert np.array_equal(after.token_ids != span.token_ids, span.committed)
    assert {phase_of(record) for record in records} == {Phase.PREFILL, Phase.DENOISE, Phase.COMMIT}


def test_group_limited_routing_uses_few_groups() -> None:
    records = small_records()
    groups = records[-1].expert_ids // 6
    assert max(len(set(token)) for layer in groups.tolist() for token in layer) <= 2


def test_configurations_that_make_no_trace() -> None:
    with pytest.raises(RelumeError, match="blocks is 0"):
        dataclasses.replace(SMALL_CONFIG, blocks=0)
    for groups, words in (((5, 2), "must divide"), ((4, 5), "must divide"), ((24, 1), "cannot use 2 experts")):
        config = dataclasses.replace(SMALL_CONFIG, groups=groups)
        with pytest.raises(RelumeError, match=words):
            next(synthesise_trace(config, np.random.default_rng(0)))


def test_metadata_type() -> None:
    assert isinstance(TraceReader(SMALL_TRACE).metadata, TraceMetadata)
    assert TraceReader(SMALL_TRACE).metadata == SMALL_CONFIG.metadata()
