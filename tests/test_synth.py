"""Synthetic checkpoints: they load, the seed decides them, routing is near its targets, failures leave nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import relume.checkpoint.writer as writer_module
from relume import Engine, RelumeError
from relume.checkpoint.byte_tokenizer import byte_tokenizer_files
from relume.checkpoint.folder import open_checkpoint
from relume.checkpoint.tokenizer import Tokenizer
from relume.checkpoint.writer import CheckpointWriter, TensorSpec, plan_shards
from relume.config import ShapeOverrides
from relume.synth.job import synthesise
from relume.synth.report import SynthReport
from relume.synth.routers import random_active
from relume.synth.shapes import SHAPE_NAMES, make_shape

TINY = {"layers": 3, "hidden": 64, "experts": 16, "top_k": 2, "expert_size": 32, "vocab": 400, "head_dim": 16}
SHAPES = {
    "llada2": ("llada2-mini", ShapeOverrides(**TINY, groups=4, kept_groups=2, block_length=8)),
    "sdar": ("sdar-30b", ShapeOverrides(**TINY)),
    "llada2.2": ("llada2-flash", ShapeOverrides(**TINY, block_length=8, expert_capacity=6)),
}
SPECIAL = {"<eos>": 390, "<mask>": 391, "<|role_end|>": 392}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", SHAPES)
def test_every_family_loads_and_decodes(name: str, tmp_path: Path) -> None:
    like, overrides = SHAPES[name]
    report = synthesise(tmp_path / "model", like, 1, overrides, max_shard_bytes=100_000)
    checkpoint = open_checkpoint(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint.num_bytes == report.num_bytes
    assert len(checkpoint.tensors) == report.num_tensors
    engine = Engine.load(tmp_path / "model")
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Good morning!"}])
    result = engine.generate(input_ids=prompt, max_tokens=20)
    assert (len(result.token_ids), result.finish_reason) == (20, "length")
    special = set(make_shape(like, overrides).special.values())
    assert not special & set(result.token_ids)
    if engine.config.router.capacity:
        assert result.statistics.active_experts <= engine.config.router.capacity


def test_an_editing_decoder_comes_to_rest(tmp_path: Path) -> None:
    like, overrides = SHAPES["llada2"]
    synthesise(tmp_path / "model", like, 1, overrides)
    engine = Engine.load(tmp_path / "model")
    result = engine.generate(input_ids=[70, 80, 90], max_tokens=29, decoder="joint", mode="speed")
    # Every block could take block_length + 16 iterations; editing in circles would use them all.
    assert result.statistics.num_iterations < 4 * 8


def test_stacked_and_single_experts_are_the_same_model(tmp_path: Path) -> None:
    like, overrides = SHAPES["llada2"]
    logits = []
    for stacked in (False, True):
        folder = tmp_path / str(stacked)
        synthesise(folder, like, 3, overrides, stacked=stacked)
        assert ("model.layers.1.mlp.experts.gate_proj" in open_checkpoint(folder).tensors) == stacked
        logits.append(Engine.load(folder, dtype="float32").logits(list(range(40))))
    assert torch.equal(*logits)


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    like, overrides = SHAPES["sdar"]
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        synthesise(tmp_path / name, like, seed, overrides)
    first, again, other = (digest(tmp_path / name) for name in "abc")
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> SynthReport:
    overrides = ShapeOverrides(layers=3, hidden=256, experts=128, expert_size=32, vocab=2048, heads=8, kv_heads=2)
    return synthesise(tmp_path_factory.mktemp("synth") / "model", "llada2-mini", 2, overrides)


def test_routing_is_near_what_trained_models_show(report: SynthReport) -> None:
    routing, targets = report.routing, report.targets
    assert targets["active_experts"].low <= routing.active_experts <= targets["active_experts"].high
    assert routing.active_experts < 0.6 * random_active(128, 8, 32)
    assert routing.similarity > 0.95
    assert routing.kept_masked is not None
    assert routing.kept_committed is not None
    assert routing.kept_committing is not None
    assert 0.82 < routing.kept_masked < 0.98
    assert 0.82 < routing.kept_committed < 0.98
    assert 0.1 < routing.kept_committing < 0.4
    assert routing.all_experts > 1.15 * routing.canvas_experts > 1.15 * routing.active_experts


def test_a_real_decode_behaves_like_the_sample(report: SynthReport) -> None:
    engine = Engine.load(report.path)
    generator = torch.Generator().manual_seed(0)
    iterations, tokens = 0, 0
    for length in (20, 60, 120):
        prompt = torch.randint(256, 2000, (length,), generator=generator).tolist()
        result = engine.generate(input_ids=prompt, max_tokens=64)
        assert 0.6 < result.statistics.active_experts / report.routing.active_experts < 1.6
        assert len(set(result.token_ids)) > 16
        iterations += result.statistics.num_iterations
        tokens += len(result.token_ids)
    assert 1.3 < tokens / iterations < 6.0


def test_the_report_is_plain_data(report: SynthReport) -> None:
    found = json.loads(json.dumps(report.to_dict()))
    assert found["kind"] == "measured"
    assert len(found["layers"]) == 2
    assert set(found["targets"]) <= set(found["routing"]) | set(found)


@pytest.mark.parametrize("like", SHAPE_NAMES)
def test_named_shapes_have_the_published_sizes(like: str) -> None:
    from relume.model.sizes import model_sizes

    shape = make_shape(like)
    sizes = model_sizes(shape.family, shape.config)
    published = {"llada2-mini": 16.256e9, "llada2-flash": 102_889_705_216, "sdar-30b": 30.53e9}[like]
    assert sizes.total == pytest.approx(published, rel=1e-9 if like == "llada2-flash" else 1e-3)


@pytest.mark.parametrize(
    ("like", "sizes", "complaint"),
    [
        ("llama", {}, "unknown shape 'llama'"),
        ("llada2-mini", {"experts": 30}, "n_group is 8"),
        ("llada2-mini", {"layers": 0}, "layers is 0"),
        ("llada2-mini", {"vocab": 200}, "a vocabulary of 200 is too small"),
        ("sdar-30b", {"groups": 4}, "groups does not apply to sdar-30b"),
        ("sdar-30b", {"top_k": 200}, "num_experts_per_tok is 200"),
    ],
)
def test_impossible_shapes_are_one_line(like: str, sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(RelumeError, match=complaint) as caught:
        make_shape(like, ShapeOverrides(**sizes))
    assert "\n" not in str(caught.value)


def test_an_existing_folder_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RelumeError, match="exists and is not empty"):
        synthesise(tmp_path, "sdar-30b", 0, SHAPES["sdar"][1])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(_tensors: object, path: Path, **_options: object) -> None:
        path.touch()
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "save_file", fail)
    with pytest.raises(RelumeError, match="the disk is full") as caught:
        synthesise(tmp_path / "model", "sdar-30b", 0, SHAPES["sdar"][1], max_shard_bytes=100_000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_noticed_before_writing(tmp_path: Path) -> None:
    with pytest.raises(RelumeError, match="GiB are needed and"):
        CheckpointWriter(tmp_path / "m", [TensorSpec("a", (2**60,), torch.bfloat16)], {}).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_the_name_appears_only_when_complete(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (4,), torch.float32), TensorSpec("b", (3, 5), torch.bfloat16)]
    with CheckpointWriter(tmp_path / "m", specs, {"x": 1}, {"note.txt": "hello"}, max_shard_bytes=16) as writer:
        writer.write("a", torch.arange(4.0))
        writer.reserve("b").fill_(2.0)
        assert not (tmp_path / "m").exists()
    checkpoint = open_checkpoint(tmp_path / "m")
    assert {name: entry.path.name for name, entry in checkpoint.tensors.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert (tmp_path / "m" / "note.txt").read_text() == "hello"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointWriter(tmp_path / "m", [TensorSpec("a", (4,), torch.float32)], {}),
    ):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 60))
def test_shards_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    specs = [TensorSpec(str(index), (size,), torch.float32) for index, size in enumerate(sizes)]
    shards = plan_shards(specs, 4 * limit)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(len(shard) == 1 or sum(spec.num_bytes for spec in shard) <= 4 * limit for shard in shards)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_tokenizer_files(400, SPECIAL, "<eos>", "<mask>").items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer(folder)


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    if any(name in text for name in SPECIAL):
        return
    token_ids = tokenizer.encode(text)
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_every_id_has_a_text_of_its_own(tokenizer: Tokenizer) -> None:
    texts = [tokenizer.decode([token]) for token in range(256, 400) if token not in SPECIAL.values()]
    assert len(set(texts)) == len(texts)
    assert all(2 <= len(text) <= 3 and text.isalnum() for text in texts)
    assert tokenizer.encode("<mask>") == [391]
    assert tokenizer.decode([391, 65]) == "A"


def test_the_chat_template_has_the_published_form(tokenizer: Tokenizer) -> None:
    def text(*messages: dict[str, str]) -> str:
        token_ids = tokenizer.encode_chat(messages)
        return "".join("<|role_end|>" if token == 392 else chr(token) for token in token_ids)

    user = {"role": "user", "content": "Hi"}
    assert text(user) == (
        "<role>SYSTEM</role>detailed thinking off<|role_end|>"
        "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>"
    )
    assert text({"role": "system", "content": "Be kind."}, user).startswith(
        "<role>SYSTEM</role>Be kind.\ndetailed thinking off<|role_end|>"
    )
    with pytest.raises(RelumeError, match="unknown role robot"):
        text({"role": "robot", "content": "Hi"})


MEASURE = """
import sys, torch
from pathlib import Path
import relume
from relume.synth.job import synthesise
from relume.config import ShapeOverrides

overrides = ShapeOverrides(layers=2, hidden=256, experts=256, expert_size=int(sys.argv[2]), vocab=600, heads=4)
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
before = peak()
report = synthesise(Path(sys.argv[1]), "llada2-mini", 0, overrides, max_shard_bytes=2**23)
print(report.num_bytes, peak() - before)
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    grown = []
    for size in (32, 256):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / str(size)), str(size)]
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        num_bytes, peak = map(int, output.split())
        grown.append(peak)
    assert num_bytes > 90 * 2**20
    assert grown[1] < grown[0] + 40 * 2**20
