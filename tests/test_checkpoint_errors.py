"""Every way in which a checkpoint can be wrong gives one clear line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from checkpoints import LLADA2, LLADA22, SDAR, make_tensors, write_checkpoint
from relume import Engine, RelumeError, Request
from relume.checkpoint.folder import open_checkpoint
from relume.checkpoint.tensor_file import TensorReader
from relume.config import EngineConfig

GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", LLADA2, make_tensors(LLADA2), num_shards=3)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard(folder: Path, number: int = 2) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def truncate(folder: Path) -> None:
    os.truncate(shard(folder), shard(folder).stat().st_size - 100)


def break_header(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[8:12] = b"oops"
    shard(folder).write_bytes(data)


def drop_tensors(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: file for name, file in content["weight_map"].items() if "experts.3." not in name
    }
    index.write_text(json.dumps(content))


def promise_more(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = shard(folder).name
    index.write_text(json.dumps(content))


CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing shard": (lambda f: shard(f).unlink(), ["missing shards", "model-00002-of-00003.safetensors"]),
    "truncated shard": (truncate, ["model-00002-of-00003.safetensors", "truncated", "ends at"]),
    "empty shard": (lambda f: shard(f).write_bytes(b""), ["model-00002-of-00003.safetensors", "header"]),
    "damaged header": (break_header, ["model-00002-of-00003.safetensors", "damaged"]),
    "missing tensors": (
        drop_tensors,
        ["experts.3.gate_proj.weight is missing", "experts.3.down_proj.weight is missing"],
    ),
    "index promises more": (promise_more, ["model.extra.weight", "shards lack"]),
    "unknown architecture": (
        lambda f: edit_config(f, architectures=["GPT7"]),
        ["unknown architecture GPT7", "LLaDA2MoeModelLM", "SDARMoeForCausalLM"],
    ),
    "no architecture": (lambda f: edit_config(f, architectures=None), ["unknown architecture (none)"]),
    "fewer layers configured": (
        lambda f: edit_config(f, num_hidden_layers=2),
        ["model.layers.2.input_layernorm.weight has no place"],
    ),
    "more layers configured": (
        lambda f: edit_config(f, num_hidden_layers=4),
        ["model.layers.3.input_layernorm.weight is missing"],
    ),
    "fewer experts configured": (
        lambda f: edit_config(f, num_experts=8),
        ["gate.weight has the shape [16, 32] instead of [8, 32]", "experts.8.gate_proj.weight has no place"],
    ),
    "other hidden size": (
        lambda f: edit_config(f, hidden_size=64),
        ["has the shape [60, 32] instead of [60, 64]"],
    ),
    "no such key": (lambda f: edit_config(f, vocab_size=None), ["config.json: vocab_size is missing"]),
    "wrong type": (lambda f: edit_config(f, hidden_size="big"), ["hidden_size is 'big'", "integer"]),
    "contradictory groups": (lambda f: edit_config(f, n_group=5), ["n_group is 5", "divide num_experts (16)"]),
    "rope scaling": (lambda f: edit_config(f, rope_scaling={"rope_type": "yarn"}), ["rotary scaling 'yarn'"]),
    "unknown dtype": (lambda f: edit_config(f, dtype="float8"), ["float8", "bfloat16"]),
    "bias switched off": (
        lambda f: edit_config(f, moe_router_enable_expert_bias=False),
        ["model.layers.1.mlp.gate.expert_bias has no place"],
    ),
    "shared expert left out": (
        lambda f: edit_config(f, num_shared_experts=0),
        ["shared_experts.up_proj.weight has no place"],
    ),
    "tied but with a head": (lambda f: edit_config(f, tie_word_embeddings=True), ["lm_head.weight has no place"]),
    "other activation": (lambda f: edit_config(f, hidden_act="gelu"), ["hidden_act is 'gelu'"]),
    "biases": (lambda f: edit_config(f, use_bias=True), ["use_bias is True"]),
    "no query norm": (lambda f: edit_config(f, use_qk_norm=False), ["use_qk_norm is False"]),
    "old spelling of scaling": (lambda f: edit_config(f, rope_scaling={"type": "yarn"}), ["scaling 'yarn'"]),
    "scaling is no object": (lambda f: edit_config(f, rope_scaling="yarn"), ["rope_scaling is 'yarn'", "object"]),
    "rotary number": (lambda f: edit_config(f, partial_rotary_factor="half"), ["partial_rotary_factor is 'half'"]),
    "no heads": (lambda f: edit_config(f, num_attention_heads=0, head_dim=None), ["num_heads is 0"]),
    "no window": (lambda f: edit_config(f, expert_capacity=6, expert_capacity_window=0), ["window is 0"]),
    "negative theta": (lambda f: edit_config(f, rope_theta=-1.0), ["rope_theta is -1.0"]),
    "architecture of the wrong type": (lambda f: edit_config(f, architectures=[["x"]]), ["unknown architecture"]),
    "end of text is no token": (lambda f: edit_config(f, eos_token_id=[58, 60]), ["config.json: eos_token_id 60"]),
    "header is a list": (
        lambda f: shard(f).write_bytes((2).to_bytes(8, "little") + b"[]"),
        ["model-00002-of-00003.safetensors", "damaged"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["config.json", "missing"]),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
    "index without map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        ["model.safetensors.index.json", "no weight_map"],
    ),
    "index escapes the folder": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'),
        ["'../x'", "no plain file name"],
    ),
    "nothing to load": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        ["neither model.safetensors.index.json nor model.safetensors"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(sharded: Path, name: str) -> None:
    damage, expected = CASES[name]
    damage(sharded)
    with pytest.raises(RelumeError) as caught:
        Engine.load(sharded)
    for text in expected:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    tensors = make_tensors(LLADA2, stacked=True)
    wrong = [name for name in tensors if "experts.up_proj" in name or name.endswith("norm.weight")]
    for name in wrong:
        tensors[name] = torch.zeros(3)
    write_checkpoint(tmp_path, LLADA2, tensors)
    with pytest.raises(RelumeError) as caught:
        Engine.load(tmp_path)
    assert f"{len(wrong)} problems" in str(caught.value)
    assert all(name in str(caught.value) for name in wrong)


def test_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("")
    with pytest.raises(RelumeError, match="not a folder"):
        Engine.load(file)
    with pytest.raises(RelumeError, match="no such folder"):
        Engine.load(tmp_path / "nowhere" / "at" / "all")


def test_no_permission(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is injected where files are opened."""
    real_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("00002-of-00003.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RelumeError, match=r"00002-of-00003.safetensors: cannot be .*Permission denied"):
        Engine.load(sharded)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_for_real(sharded: Path) -> None:
    shard(sharded).chmod(0)
    with pytest.raises(RelumeError, match="Permission denied"):
        Engine.load(sharded)


def test_a_file_that_shrinks_while_it_is_read_names_file_and_offset(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    entry = max(checkpoint.tensors.values(), key=lambda entry: entry.offset)
    os.truncate(entry.path, entry.offset + 8)
    with pytest.raises(RelumeError, match=rf"{entry.path.name}: truncated: .* at byte {entry.offset + 8}"):
        TensorReader().read(entry, torch.empty(entry.shape))


def test_a_failing_disk_names_file_and_offset(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(RelumeError, match=r"safetensors: reading .* at byte \d+ failed \(Input/output error\)"):
        Engine.load(sharded)


def test_short_reads_are_continued(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(20))
    expected = Engine.load(sharded).logits(prompt)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:100]], offset))
    assert torch.equal(Engine.load(sharded).logits(prompt), expected)


def test_files_that_the_index_does_not_name_are_never_opened(sharded: Path) -> None:
    save_file({GATE: torch.zeros(1)}, sharded / "consolidated.safetensors")
    (sharded / "model.safetensors").write_bytes(b"not a checkpoint")
    (sharded / "training_state.safetensors").write_bytes(b"")
    assert Engine.load(sharded).logits([1, 2, 3]).shape == (3, 60)


def test_no_tokenizer(sharded: Path) -> None:
    engine = Engine.load(sharded)
    with pytest.raises(RelumeError, match=r"no tokenizer \(tokenizer.json\)"):
        engine.generate("hello")
    assert engine.generate(input_ids=[1, 2], max_tokens=3).text is None
    (sharded / "tokenizer.json").write_text("{}")
    with pytest.raises(RelumeError, match="cannot be read as a tokenizer"):
        engine.generate("hello")


def test_no_mask_token(sharded: Path) -> None:
    edit_config(sharded, mask_token_id=None)
    with pytest.raises(RelumeError, match="mask_token_id"):
        Engine.load(sharded).generate(input_ids=[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [60]}, "token id 60 lies outside the vocabulary of 60"),
        ({"input_ids": [1.5]}, "flat sequence of integers"),
        ({"input_ids": "123"}, "flat sequence of integers"),
        ({"input_ids": [[1]]}, "flat sequence of integers"),
        ({"prompt": ["A"]}, "prompt is a list"),
        ({"messages": "A"}, "messages must be a list"),
        ({"input_ids": [1], "max_tokens": "3"}, "max_tokens is '3': int was expected"),
        ({"input_ids": [1], "max_tokens": 3.5}, "max_tokens is 3.5"),
        ({"input_ids": [1], "temperature": float("inf")}, "temperature is inf"),
        ({"input_ids": [1], "seed": -1}, "seed is -1"),
        ({"input_ids": [1], "seed": 2**63}, "seed is"),
        ({"input_ids": [1], "stop": [1]}, "stop is"),
        ({"input_ids": [1], "block_length": 10**11}, "block_length is 100000000000"),
        ({"input_ids": [1], "mode": "speed", "decoder": "threshold"}, "the decoder threshold has no mode"),
        ({"input_ids": [1], "max_tokens": 512}, "exceed the model's context of 512"),
        ({"input_ids": [1], "prompt": "a"}, "exactly one of prompt, messages and input_ids"),
        ({}, "exactly one of prompt, messages and input_ids"),
        ({"input_ids": [1], "temprature": 1}, "unknown decoding option 'temprature'"),
        ({"input_ids": [1], "decoder": "magic"}, "choose one of threshold, joint, indel"),
        ({"input_ids": [1], "decoder": "indel"}, "delete_token_id"),
        ({"input_ids": [1], "stop": "x"}, "stop strings need a tokenizer"),
        ({"input_ids": [1], "top_p": 0.0}, "top_p is 0.0"),
        ({"input_ids": [1], "iterations": 64}, "at most block_length"),
    ],
)
def test_wrong_arguments(sharded: Path, arguments: dict[str, Any], message: str) -> None:
    engine = Engine.load(sharded)
    with pytest.raises(RelumeError, match=message):
        engine.generate(**arguments)


def test_wrong_engine_arguments(sharded: Path) -> None:
    with pytest.raises(RelumeError, match="dtype"):
        Engine.load(sharded, dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(RelumeError, match="device 'warp' cannot be used"):
        Engine.load(sharded, device="warp")


def test_token_ids_may_be_a_tensor_or_an_array(sharded: Path) -> None:
    engine = Engine.load(sharded)
    expected = engine.generate(input_ids=[1, 2, 3], max_tokens=5, stop=None).token_ids
    for ids in (torch.tensor([1, 2, 3]), numpy.array([1, 2, 3]), (n for n in (1, 2, 3))):
        assert engine.generate(input_ids=ids, max_tokens=5).token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [1] * 513}, "exceed the model's context"),
        ({"input_ids": [1], "block_length": 0}, "block_length is 0"),
        ({"input_ids": [1], "prefill_blocks": -1}, "prefill_blocks is -1"),
    ],
)
def test_wrong_arguments_of_logits(sharded: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RelumeError, match=message):
        Engine.load(sharded).logits(**arguments)


def test_block_lengths_that_the_capacity_window_forbids(tmp_path: Path) -> None:
    engine = Engine.load(write_checkpoint(tmp_path, LLADA22, make_tensors(LLADA22)))
    for call in (engine.logits, engine.generate):
        with pytest.raises(RelumeError, match="experts per 8 tokens"):
            call(input_ids=[1, 2], block_length=4)


def test_undeclared_type_is_that_of_the_tensors(tmp_path: Path) -> None:
    config = {key: value for key, value in LLADA2.items() if key != "dtype"}
    engine = Engine.load(write_checkpoint(tmp_path, config, make_tensors(LLADA2)))
    assert engine._model.transformer.dtype == torch.float32


def test_a_request_is_checked_before_weights_are_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorReader, "read", lambda *_: pytest.fail("weights were read"))
    engine = Engine.open(sharded, EngineConfig())
    with pytest.raises(RelumeError, match="no tokenizer"):
        engine.check(Request(prompt="hello"))
    engine.check(Request(input_ids=[1, 2]))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_stored_types_and_their_names(tmp_path: Path, stored: torch.dtype, key: str) -> None:
    name = str(stored).removeprefix("torch.")
    tensors = {n: t if n.endswith("expert_bias") else t.to(stored) for n, t in make_tensors(LLADA2).items()}
    config = {k: v for k, v in LLADA2.items() if k != "dtype"} | {key: name}
    write_checkpoint(tmp_path / "a", config, tensors)
    write_checkpoint(tmp_path / "b", LLADA2, {n: t.float() for n, t in tensors.items()})
    found, expected = (Engine.load(tmp_path / part, dtype="float32").logits([1, 2, 3]) for part in "ab")
    assert torch.equal(found, expected)


def test_layouts_and_shards_give_the_same_bits(tmp_path: Path) -> None:
    for config in (LLADA2, SDAR):
        logits = []
        for shards, stacked in ((1, False), (3, True), (2, False)):
            folder = tmp_path / f"{config['model_type']}-{shards}"
            write_checkpoint(folder, config, make_tensors(config, 1, stacked), num_shards=shards)
            logits.append(Engine.load(folder).logits(list(range(20))))
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])
