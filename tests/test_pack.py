"""Packed folders: what they hold, who may write them, interruptions, and decoding from them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import LLADA2, SDAR, make_tensors, write_checkpoint
from relume import Engine, RelumeError
from relume.checkpoint.folder import open_checkpoint, shard_names
from relume.checkpoint.pack import JOURNAL_FILE, PACK_FILE, read_pack
from relume.config import PackConfig
from relume.experts.packed import PackedExperts, packed_format
from relume.experts.quantised import QuantisedFormat
from relume.pack.job import pack_model
from terminal import RELUME

BF16 = LLADA2 | {"dtype": "bfloat16"}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bfloat16, with a tokenizer and in several shards."""
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors(BF16).items()}
    folder = tmp_path_factory.mktemp("source") / "model"
    return write_checkpoint(folder, BF16, tensors, num_shards=3, tokenizer=True)


@pytest.fixture(scope="module")
def packed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in each format."""
    folder = tmp_path_factory.mktemp("packed")
    for experts in ("bf16", "int8", "int4"):
        pack_model(model, folder / experts, PackConfig(experts))
    return {experts: folder / experts for experts in ("bf16", "int8", "int4")}


@pytest.mark.parametrize("config", [BF16, SDAR | {"torch_dtype": "bfloat16"}], ids=["llada2", "sdar"])
@pytest.mark.parametrize("stacked", [False, True])
def test_bf16_gives_the_original_s_logits_bit_for_bit(
    config: dict[str, Any], stacked: bool, tmp_path: Path
) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors(config, stacked=stacked).items()}
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    report = pack_model(folder, tmp_path / "out", PackConfig())
    assert report.lossless and report.relative_error_max == 0.0
    for dtype in ("auto", "float32"):
        engines = Engine.load(folder, dtype=dtype), Engine.load(tmp_path / "out", dtype=dtype)
        first, second = (engine.logits(range(40)) for engine in engines)
        assert torch.equal(first, second)
        results = [engine.generate(input_ids=[1, 2, 3], max_tokens=20, block_length=8) for engine in engines]
        assert results[0].token_ids == results[1].token_ids
        assert results[1].statistics.lossless


@pytest.mark.parametrize("experts", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("reads", ["direct", "buffered"])
def test_residency_changes_no_bit(packed: dict[str, Path], experts: str, reads: str) -> None:
    folder = packed[experts]
    options: dict[str, Any] = {"dtype": "float32", "reads": reads}
    with Engine.load(folder, **options) as full, Engine.load(folder, expert_memory="25%", **options) as quarter:
        assert torch.equal(full.logits(range(50)), quarter.logits(range(50)))
        request: dict[str, Any] = {"input_ids": [5, 6, 7], "max_tokens": 24, "block_length": 8}
        results = [engine.generate(**request) for engine in (full, quarter)]
        assert results[0].token_ids == results[1].token_ids
        statistics = results[1].statistics
        pack = read_pack(folder)
        assert pack is not None
        assert statistics.hit_rate < 1 and statistics.bytes_from_disk > 0
        assert statistics.lossless == (experts == "bf16")
        assert statistics.expert_format == {"bf16": "dense"}.get(experts, experts)
        slot = 6 * 32 * 24 * 2 if experts == "bf16" else pack.expert_bytes  # bf16 is computed in float32 here
        assert quarter.plan.bytes_per_slot == slot
        assert quarter._model.experts.arena.format.slot_bytes == slot


def test_the_folder_says_what_it_is(packed: dict[str, Path], model: Path) -> None:
    for experts, folder in packed.items():
        pack = read_pack(folder)
        assert pack is not None and pack.name == experts
        assert (pack.num_layers, pack.num_experts, pack.source, pack.source_dtype) == (2, 16, "model", "bfloat16")
        assert pack.record_bytes % 4096 == 0
        assert shard_names(folder) == ["model.safetensors", *pack.files]
        checkpoint = open_checkpoint(folder)
        assert checkpoint.num_bytes == sum(entry.num_bytes for entry in checkpoint.tensors.values()) + sum(
            (folder / name).stat().st_size for name in pack.files
        )
        original = open_checkpoint(model)
        for name, entry in checkpoint.tensors.items():
            source = original.tensors[name]
            assert (entry.dtype, entry.shape) == (source.dtype, source.shape)
            stored = entry.path.read_bytes()[entry.offset :][: entry.num_bytes]
            assert stored == source.path.read_bytes()[source.offset :][: source.num_bytes]
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).read_bytes() == (model / name).read_bytes()
        assert not list(folder.glob(".*")) and not (folder / JOURNAL_FILE).exists()


def test_damage_is_found_when_an_expert_is_read(packed: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    subprocess.run(["cp", "-r", packed["int8"], folder], check=True)
    pack = read_pack(folder)
    assert pack is not None
    path, offset = folder / pack.files[1], 3 * pack.record_bytes
    data = bytearray(path.read_bytes())
    data[offset + 1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(RelumeError, match=rf"{pack.files[1]}: expert 3 at byte {offset} is damaged"):
        Engine.load(folder)
    source = PackedExperts(folder, pack, direct=False)
    views = packed_format(pack.packing, 32, 24).views(torch.zeros(pack.expert_bytes, dtype=torch.uint8))
    assert source.read(1, 2, views) == pack.expert_bytes
    path.write_bytes(data[:-1])
    with pytest.raises(RelumeError, match=f"{pack.files[1]}: has .* bytes instead of"):
        open_checkpoint(folder)
    path.unlink()
    with pytest.raises(RelumeError, match=f"{pack.files[1]}: these packed experts are missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"name": "int2"}, "unknown expert format 'int2'"),
        ({"num_experts": "many"}, "num_experts is 'many'"),
        ({"num_experts": 15}, "checksums"),
        ({"group_size": 7}, "no groups"),
        ({"hidden_size": 64}, "hidden_size 64 instead of 32"),
        ({"expert_bytes": 2532}, f"{PACK_FILE} has expert_bytes 2532 instead of"),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_a_damaged_description_is_one_clear_line(
    packed: dict[str, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "changed"
    subprocess.run(["cp", "-r", packed["int8"], folder], check=True)
    values = json.loads((folder / PACK_FILE).read_text())
    (folder / PACK_FILE).write_text(json.dumps(values | change))
    with pytest.raises(RelumeError, match=message) as caught:
        Engine.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_nothing_else_is_overwritten(packed: dict[str, Path], model: Path, tmp_path: Path) -> None:
    before = digest(packed["int8"])
    report = pack_model(model, packed["int8"], PackConfig("int8"))
    assert report.num_kept == 32 and digest(packed["int8"]) == before
    with pytest.raises(RelumeError, match="holds another pack, of model as int8"):
        pack_model(model, packed["int8"], PackConfig("int4"))
    other = write_checkpoint(tmp_path / "other", LLADA2, make_tensors(LLADA2, seed=1))
    with pytest.raises(RelumeError, match="holds another pack"):
        pack_model(other, packed["int8"], PackConfig("int8"))
    assert digest(packed["int8"]) == before
    with pytest.raises(RelumeError, match="exists and is not empty"):
        pack_model(model, other, PackConfig("int8"))
    with pytest.raises(RelumeError, match="is packed already"):
        pack_model(packed["int8"], tmp_path / "twice", PackConfig("int4"))
    with pytest.raises(RelumeError, match="experts are packed as int8; give what it was packed from, model"):
        open_checkpoint(packed["int8"]).expert("model.layers.1.mlp.experts", 0)


KILLED = """
import os, signal, sys
import relume
from pathlib import Path
from relume.config import PackConfig
from relume.pack.job import pack_model
real, left = os.write, [int(sys.argv[3])]
def write(descriptor, data):
    left[0] -= 1
    if left[0] < 0:  # in the middle of a write
        real(descriptor, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(descriptor, data)
os.write = write
pack_model(sys.argv[1], Path(sys.argv[2]), PackConfig("int4"))
"""


def test_a_killed_run_is_continued_to_the_same_bytes(packed: dict[str, Path], model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kept = []
    # The first write is the journal's first line; an expert takes three: record, padding, and its line there.
    for writes in (0, 7, 3 * 16, 3 * 3 + 1):
        ended = subprocess.run([sys.executable, "-c", KILLED, model, out, str(writes)], check=False)
        assert ended.returncode == -signal.SIGKILL
        assert not (out / PACK_FILE).exists()
        with pytest.raises(RelumeError, match="not finished; run the same relume pack command again"):
            Engine.load(out)
        kept.append(len((out / JOURNAL_FILE).read_bytes().splitlines()) - 1)
    assert kept == sorted(kept) and kept[-1] > kept[0]
    with pytest.raises(RelumeError, match="holds another pack"):
        pack_model(model, out, PackConfig("int8"))
    report = pack_model(model, out, PackConfig("int4"))
    assert 0 < report.num_kept <= kept[-1]
    assert digest(out) == digest(packed["int4"])


def test_records_that_a_crash_left_wrong_are_packed_again(
    packed: dict[str, Path], model: Path, tmp_path: Path
) -> None:
    """As after a power failure: the journal is on the disk, the last records are not what it says."""
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-c", KILLED, model, out, str(3 * 20 + 1)], check=False)
    pack = read_pack(packed["int4"])
    assert pack is not None
    path = out / pack.files[1]
    data = bytearray(path.read_bytes())
    data[2 * pack.record_bytes] ^= 255
    path.write_bytes(data)
    assert pack_model(model, out, PackConfig("int4")).num_kept == 16 + 2
    assert digest(out) == digest(packed["int4"])


def test_a_full_disk_keeps_what_was_packed(
    packed: dict[str, Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, left = tmp_path / "out", os.write, [3 * 10 + 1]

    def write(descriptor: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(RelumeError, match=r"the disk is full; what was packed is kept") as caught:
            pack_model(model, out, PackConfig("int4"))
    assert "\n" not in str(caught.value)
    pack = read_pack(packed["int4"])
    assert pack is not None
    assert (out / pack.files[0]).stat().st_size == 10 * pack.record_bytes
    assert pack_model(model, out, PackConfig("int4")).num_kept == 10
    assert digest(out) == digest(packed["int4"])


def test_too_little_space_is_said_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(1, 1, 1000))
    with pytest.raises(RelumeError, match=r"are needed and .* are free"):
        pack_model(model, tmp_path / "deep" / "out", PackConfig())
    assert not (tmp_path / "deep").exists()


def test_two_runs_do_not_write_the_same_folder(model: Path, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", KILLED.replace("SIGKILL", "SIGSTOP"), model, tmp_path / "out", "31"]
    )
    try:
        while not os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOHANG):
            time.sleep(0.01)
        with pytest.raises(RelumeError, match="another relume pack is writing it"):
            pack_model(model, tmp_path / "out", PackConfig("int4"))
    finally:
        holder.kill()
        holder.wait()
    assert pack_model(model, tmp_path / "out", PackConfig("int4")).num_kept == 10


def test_a_few_experts_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are cores are made, and written before the next are begun; progress counts every byte."""
    config = BF16 | {"num_experts": 32}
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors(config).items()}
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    monkeypatch.setattr("relume.pack.source.effective_cores", lambda: 2)
    made = written = most = 0
    real = QuantisedFormat.fill

    def fill(self: QuantisedFormat, *args: Any) -> None:
        nonlocal made, most
        made += 1
        most = max(most, made - written)
        real(self, *args)

    seen: list[tuple[int, int]] = []

    def progress(added: int, total: int) -> None:
        nonlocal written
        seen.append((added, total))
        written += made > 0  # everything else comes before the experts

    monkeypatch.setattr(QuantisedFormat, "fill", fill)
    report = pack_model(folder, tmp_path / "out", PackConfig("int8"), progress=progress)
    assert made == 64 and most <= 2
    kept = open_checkpoint(tmp_path / "out")
    assert sum(added for added, _ in seen) == seen[-1][1] == kept.num_bytes
    assert report.expert_bytes == 2 * 32 * 4096


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "int4"
    command = [str(RELUME), "pack", "demo", str(folder), "--experts", "int4", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    document = json.loads(run.stdout.splitlines()[-1])
    assert document["bytes_per_expert"] == 96 * 64 + 4 * 96 * 2 + 128 * 32 + 4 * 128
    assert document["num_experts"] == 320 and document["source_bytes_per_expert"] == 36864
    assert 0.1 < document["relative_error_mean"] <= document["relative_error_max"] < 0.2
    assert document["expert_bytes"] == 320 * 12288
    assert document["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    return folder


def test_the_commands_take_a_packed_folder(demo: Path) -> None:
    def run(*arguments: str) -> dict[str, Any]:
        done = subprocess.run([RELUME, *arguments, "--json"], capture_output=True, text=True, check=True)
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    plan = run("plan", str(demo), "--memory", "2GiB", "--expert-memory", "25%")
    assert plan["bytes_per_expert"] == 11520
    assert plan["bytes"]["expert_slots"] == 80 * 11520 == plan["expert_memory_bytes"]
    inspected = run("inspect", str(demo))
    assert inspected["packed_as"] == "int4" and inspected["bytes_per_expert"] == 11520
    assert inspected["weights_complete"] and inspected["bytes"]["routed_experts"] == 320 * 11520
    answer = run("generate", str(demo), "What is 2 + 3?", "--max-tokens", "32", "--expert-memory", "25%")
    assert answer["statistics"]["lossless"] is False and answer["statistics"]["expert_format"] == "int4"
    scored = run("eval", str(demo), "--num-prompts", "9", "--max-tokens", "64")
    assert scored["exact_match"]["overall"] >= 0.5


def test_wrong_usage_of_the_command(tmp_path: Path) -> None:
    for options, code, text in (
        (["--experts", "int4", "--group-size", "48"], 2, "choose one of 32, 64, 128"),
        (["--experts", "int8", "--group-size", "64"], 2, "int8 has no groups"),
        (["--experts", "int2"], 2, "int2"),
    ):
        run = subprocess.run(
            [RELUME, "pack", "demo", tmp_path / "out", *options], capture_output=True, text=True, check=False
        )
        assert run.returncode == code and text in run.stderr
    assert not (tmp_path / "out").exists()
