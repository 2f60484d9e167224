"""Real limits of the system on real processes: within them relume decodes, below them it says one line."""

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
from relume.config import EngineConfig

MIB = 2**20
on_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a torch that was built for CUDA reserves much that it does not use"
)
#: 48 MiB of experts.
CONFIG = LLADA2 | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32}

LIMITED = """
import resource, sys
name, limit = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
resource.setrlimit(getattr(resource, name), (limit, limit))
from relume.cli import main
main()
"""
PEAK = """
import sys
from relume import DecodingConfig, Engine, Request

strategy, budget, batch = sys.argv[2], sys.argv[3], int(sys.argv[4])
with Engine.load(sys.argv[1], strategy=strategy, expert_memory=budget, context=256, max_batch=batch) as engine:
    decoding = DecodingConfig(block_length=32, max_tokens=64, ignore_eos=True)
    engine.generate_batch([Request(input_ids=[1] * 192, decoding=decoding)] * batch)  # the whole context of each
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(peak, engine.plan.total_bytes, engine.plan.bytes["safety_margin"], engine.plan.expert_memory_bytes)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits") / "model"
    return write_checkpoint(path, CONFIG, make_tensors(CONFIG), num_shards=2, tokenizer=True)


def generate(folder: Path, limit: str, mebibytes: int, *more: str) -> subprocess.CompletedProcess[str]:
    """`relume generate` in a process with a resource limit."""
    arguments = [limit, str(mebibytes * MIB), "generate", str(folder), "ABC", "--context", "256", *more]
    # One thread, because the matrix library ends the process if it cannot start another.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments, "--max-tokens", "16", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )


@on_cpu_build
def test_decodes_within_a_limit_on_data(folder: Path) -> None:
    """10% of the experts need no more than the plan says; what is reserved beside it is the runtime's."""
    plan = Engine.open(folder, EngineConfig(strategy="lru", expert_memory="10%", context=256)).plan
    done = generate(
        folder, "RLIMIT_DATA", plan.total_bytes // MIB + 120, "--strategy", "lru", "--expert-memory", "10%"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["statistics"]["bytes_from_disk"] > 0
    with Engine.load(folder, strategy="full") as engine:
        assert document["token_ids"] == list(engine.generate("ABC", max_tokens=16).token_ids)


@on_cpu_build
@pytest.mark.parametrize(
    ("limit", "mebibytes", "more", "words"),
    [
        ("RLIMIT_DATA", 500, (), ["of memory are too little", "at least --memory", "--expert-memory 1"]),
        ("RLIMIT_AS", 1000, (), ["of memory are too little", "at least --memory", "--expert-memory 1"]),
        ("RLIMIT_AS", 300, (), ["memory ran out before a model was opened", "raise RLIMIT_AS of 300MiB"]),
        # Who overrules the plan meets the system's own refusal.
        ("RLIMIT_DATA", 300, ("--memory", "8GiB"), ["do not fit in memory", "--expert-memory"]),
    ],
)
def test_too_small_a_limit_is_one_line(
    folder: Path, limit: str, mebibytes: int, more: tuple[str, ...], words: list[str]
) -> None:
    done = generate(folder, limit, mebibytes, *more)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("relume: ") and all(word in line for word in words), line


def test_the_peak_stays_within_the_plan_at_every_budget(folder: Path) -> None:
    peaks = []
    for strategy, budget, batch in (
        ("lru", "10%", 1),
        ("counts", "25%", 1),
        ("foresight", "25%", 4),
        ("lru", "60%", 4),
        ("counts", "10%", 8),
        ("full", "100%", 1),
    ):
        command = [sys.executable, "-c", PEAK, str(folder), strategy, budget, str(batch)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, total, margin, experts = map(int, run.stdout.split())
        assert peak <= total - margin
        peaks.append((peak, experts))
    # Memory follows the budget: what all experts take more than a tenth of them, within the runtime's own noise.
    (small, few), (large, many) = peaks[0], peaks[-1]
    assert many - few > 40 * MIB
    assert abs((large - small) - (many - few)) < 16 * MIB
