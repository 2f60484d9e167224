"""Models by hub id, over real HTTP against a hub on localhost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import LLADA2, make_tensors, write_checkpoint
from hub_server import Hub, serve_hub
from relume import Engine, RelumeError
from relume.checkpoint.hub import resolve_model
from relume.config import PackConfig
from relume.pack.job import pack_model
from terminal import RELUME, Terminal


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_checkpoint(tmp_path / "repo", LLADA2, make_tensors(LLADA2, 1), num_shards=3, tokenizer=True)
    (folder / "README.md").write_text("hello")
    (folder / "pytorch_model.bin").write_bytes(b"\0" * 1000)
    (folder / "model-extra.safetensors").write_bytes(b"\0" * 1000)
    with serve_hub(folder) as hub:
        yield hub


def environment(hub: Hub, home: Path) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return clean | local | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}


def run(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RELUME), *arguments],
        capture_output=True,
        text=True,
        env=environment(hub, home),
        check=False,
        timeout=90,
    )


SHORT = ["HELLO", "--block-length", "8", "--max-tokens", "12", "--json"]


def test_download_what_the_index_names_then_offline(hub: Hub, tmp_path: Path) -> None:
    expected = Engine.load(hub.folder).generate("HELLO", block_length=8, max_tokens=12)
    refused = run(hub, tmp_path / "home", "generate", "org/model", *SHORT, "--offline")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "without --offline" in refused.stderr
    assert hub.requests == []

    # The files are small, but the index comes before the shards, and nothing that it does not name comes at all.
    inspected = run(hub, tmp_path / "home", "inspect", "org/model", "--json")
    assert json.loads(inspected.stdout)["weights_complete"] is False
    assert not [name for name in hub.downloaded() if name.endswith(".safetensors")]

    done = run(hub, tmp_path / "home", "generate", "org/model", *SHORT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == list(expected.token_ids)
    fetched = set(hub.downloaded())
    assert {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)} <= fetched
    assert not fetched & {"README.md", "pytorch_model.bin", "model-extra.safetensors"}
    assert done.stderr == ""

    hub.requests.clear()
    again = run(hub, tmp_path / "home", "generate", "org/model", *SHORT, "--offline")
    assert again.returncode == 0, again.stderr
    assert hub.requests == []


def test_an_interrupted_download_resumes(hub: Hub, tmp_path: Path) -> None:
    chunk = 10 * 2**20  # what the hub library writes at a time
    config = LLADA2 | {"hidden_size": 512, "moe_intermediate_size": 256}
    write_checkpoint(hub.folder, config, make_tensors(config), num_shards=3, tokenizer=True)
    hub.cut_after = chunk + 5000
    for _ in range(4):
        done = run(hub, tmp_path / "home", "generate", "org/model", *SHORT)
        if done.returncode == 0:
            break
        assert done.stderr.splitlines()[-1].startswith("relume: org/model: ")
    assert done.returncode == 0, done.stderr
    resumed = [wanted for _, name, wanted in hub.requests if wanted and name.endswith(".safetensors")]
    assert f"bytes={chunk}-" in resumed


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    for arguments, message in (
        (["org/other"], "no model on the hub has this name"),
        (["org/model", "--revision", "v9"], "the hub has no revision 'v9'"),
    ):
        done = run(hub, tmp_path / "home", "inspect", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert message in done.stderr
    assert run(hub, tmp_path / "home", "inspect", "org/model", "--revision", "v2").returncode == 0
    assert any("/revision/v2" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize(
    "name", ["./nowhere", "../nowhere", "models/llada2-", "a/b..c", "a/b--c", "/nowhere/at/all", "x"]
)
def test_what_is_neither_a_folder_nor_a_hub_id(name: str) -> None:
    with pytest.raises(RelumeError, match="no such folder, and not a hub id"):
        resolve_model(name)


def test_a_hub_that_is_away(tmp_path: Path, hub: Hub) -> None:
    hub.url = "http://127.0.0.1:9"
    done = run(hub, tmp_path / "home", "inspect", "org/model")
    assert done.returncode == 1
    assert "the hub was not reached" in done.stderr


def test_a_terminal_shows_progress_in_bytes(hub: Hub, tmp_path: Path) -> None:
    terminal = Terminal("generate", "org/model", *SHORT, environment=environment(hub, tmp_path / "home"))
    assert terminal.wait() == 0
    assert "B/s" in terminal.output


def test_a_packed_folder_comes_with_its_experts(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    pack_model(hub.folder, folder, PackConfig("int8"))
    with serve_hub(folder) as packed:
        done = run(packed, tmp_path / "home", "inspect", "org/model", "--json")
        inspected = json.loads(done.stdout.splitlines()[-1])
        assert (inspected["packed_as"], inspected["weights_complete"]) == ("int8", False)
        done = run(packed, tmp_path / "home", "generate", "org/model", *SHORT)
        assert done.returncode == 0, done.stderr
        expected = Engine.load(folder).generate("HELLO", block_length=8, max_tokens=12)
        assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == list(expected.token_ids)
