"""Agreement with outputs of the published module (tests/oracle, see its README)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from relume import Engine

ORACLE = Path(__file__).parent / "oracle"
Oracle = tuple[Engine, dict[str, str], dict[str, torch.Tensor]]
NAMES = ["llada2-tiny-a", "llada2-tiny-b"]


@pytest.fixture(scope="module", params=NAMES)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    folder = ORACLE / request.param
    with safe_open(folder / "expected.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    return Engine.load(folder, dtype="float32"), metadata, tensors


@pytest.mark.parametrize("prefill_blocks", [1, 2, None])
def test_logits_agree_whatever_the_prefill_chunk(oracle: Oracle, prefill_blocks: int | None) -> None:
    engine, metadata, tensors = oracle
    expected = tensors["forward.logits"][0]
    found = engine.logits(
        tensors["forward.input_ids"][0].tolist(),
        block_length=int(metadata["block_length"]),
        prefill_blocks=prefill_blocks,
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("prefill_blocks", [1, 2, 16])
@pytest.mark.parametrize("name", NAMES)
def test_canvases_and_commits_agree(name: str, prefill_blocks: int) -> None:
    engine = Engine.load(ORACLE / name, dtype="float32", prefill_blocks=prefill_blocks)
    with safe_open(ORACLE / name / "expected.safetensors", "pt") as file:
        metadata = file.metadata()
        expected = {key: file.get_tensor(key).tolist() for key in file.keys() if key.startswith("generate.")}  # noqa: SIM118
    prompts = {key.split(".")[1]: value for key, value in expected.items() if key.endswith(".prompt")}
    assert len(prompts) >= 4
    for length, prompt in prompts.items():
        result = engine.generate(
            input_ids=prompt,
            block_length=int(metadata["block_length"]),
            max_tokens=int(metadata["gen_length"]),
            threshold=float(metadata["threshold"]),
            eos_early_stop=False,
        )
        canvas = expected[f"generate.{length}.canvas"]
        never_reached = [int(metadata["mask_token_id"])] * (len(canvas) - len(result.canvas))
        assert [*result.canvas, *never_reached] == canvas
        assert list(result.commits) == expected[f"generate.{length}.committed_per_iteration"]
