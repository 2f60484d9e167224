"""Loading holds at most one tensor beyond the weights; long prompts are prefilled in bounded chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import Engine
from relume.checkpoint.folder import open_checkpoint
from relume.experts import arena
from relume.experts.source import CheckpointExperts
from relume.machine.memory import allocate_bytes
from terminal import RELUME

MEASURE = """
import json, resource, sys
import relume
from relume import Engine
import relume.model.loading, relume.checkpoint.tokenizer  # what loading imports is not what it holds

def now():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024

open("/proc/self/clear_refs", "w").write("5")  # restart the peak
before = now()
engine = Engine.load(sys.argv[1], dtype=sys.argv[2])
peak = [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(json.dumps({"before": before, "after": now(), "peak": peak}))
"""


@pytest.mark.parametrize(("stored", "loaded"), [(torch.bfloat16, "bfloat16"), (torch.bfloat16, "float32")])
def test_loading_peaks_at_one_shard_beyond_the_weights(tmp_path: Path, stored: torch.dtype, loaded: str) -> None:
    config = LLADA2 | {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "dtype": "bfloat16"}
    tensors = {name: tensor.to(stored) for name, tensor in make_tensors(config).items()}
    write_checkpoint(tmp_path, config, tensors, num_shards=8)
    weights = sum(tensor.numel() for tensor in tensors.values()) * (4 if loaded == "float32" else 2)
    shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert weights > 8 * 2**20
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path), loaded], capture_output=True, check=True, text=True
        ).stdout
    )
    grown = found["peak"] - found["before"]
    assert weights * 0.9 < grown < weights + shard + 4 * 2**20  # the last term: allocator and header objects


def test_no_tensor_is_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in bytes: the weights themselves, and for each reader one expert's tensors in whole pages."""
    folder = write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2), num_shards=4)
    asked: list[int] = []
    real = torch.empty

    def count(*args: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = real(*args, **options)  # type: ignore[call-overload]
        asked.append(made.numel() * made.element_size())
        return made

    def count_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
        asked.append(num_bytes)
        return allocate_bytes(num_bytes, device)

    monkeypatch.setattr(torch, "empty", count)
    monkeypatch.setattr(arena, "allocate_bytes", count_bytes)
    with Engine.load(folder, dtype="float32") as engine:
        assert sum(asked) == open_checkpoint(folder).num_bytes
        source = engine._model.experts.loader.source
        assert isinstance(source, CheckpointExperts)
        assert source.staging_bytes <= 24 * 32 * 4 + 2 * 4096


def test_a_long_prompt_is_prefilled_in_bounded_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2))
    engine = Engine.load(folder, prefill_blocks=3)
    seen: list[int] = []
    transformer = engine._model.transformer
    real = transformer.forward

    def record(segments: list[object], usage: object) -> list[torch.Tensor]:
        seen.append(segments[0].num_tokens)  # type: ignore[attr-defined]
        return real(segments, usage)  # type: ignore[arg-type]

    monkeypatch.setattr(transformer, "forward", record)
    engine.generate(input_ids=[1] * 100, block_length=8, max_tokens=4)
    assert seen[:4] == [24, 24, 24, 24]
    assert set(seen[4:]) == {8}


def test_the_commit_forward_is_skipped_where_it_would_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`joint` ends on an iteration that changed nothing: its K/V are final. `threshold` needs one forward more."""
    engine = Engine.load(write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2)))
    transformer = engine._model.transformer
    real, forwards = transformer.forward, [0]

    def count(segments: list[object], usage: object) -> list[torch.Tensor]:
        forwards[0] += 1
        return real(segments, usage)  # type: ignore[arg-type]

    monkeypatch.setattr(transformer, "forward", count)
    options = {"input_ids": [1, 2], "block_length": 8, "max_tokens": 30, "ignore_eos": True}
    for decoder, extra in (({"decoder": "threshold"}, 3), ({"decoder": "joint", "edit_threshold": 1.0}, 0)):
        forwards[0] = 0
        iterations = engine.generate(**decoder, **options).statistics.num_iterations  # type: ignore[arg-type]
        assert forwards[0] == iterations + extra


def test_experts_are_read_in_place_and_only_when_they_are_wanted(tmp_path: Path) -> None:
    """No second copy on disk, and no pass over all experts to warm up."""
    folder = write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2), num_shards=2, tokenizer=True)
    (tmp_path / "empty").mkdir()
    before = {path: path.stat() for path in folder.iterdir()}
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"), str(tmp_path / "empty"))
    few = ["--strategy", "lru", "--expert-memory", "25%", "--max-tokens", "8"]
    subprocess.run(
        [str(RELUME), "generate", str(folder), "ABC", *few],
        check=True,
        capture_output=True,
        cwd=tmp_path / "empty",
        env=os.environ | places,
    )
    assert list((tmp_path / "empty").rglob("*")) == []
    after = {path: path.stat() for path in folder.iterdir()}
    assert [(p, s.st_size, s.st_mtime_ns) for p, s in after.items()] == [
        (p, s.st_size, s.st_mtime_ns) for p, s in before.items()
    ]
    experts = sum(e.num_bytes for name, e in open_checkpoint(folder).tensors.items() if ".experts." in name)
    with Engine.load(folder, strategy="lru", expert_memory="25%") as engine:
        assert engine._model.bytes_read == open_checkpoint(folder).num_bytes - experts
