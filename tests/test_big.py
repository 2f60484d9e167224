"""A checkpoint of real width: made, and decoded within 8 GiB. Takes minutes and 6 GB of disk."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from terminal import RELUME

pytestmark = pytest.mark.slow
LIMIT = 8 * 2**30


def peak_of(*arguments: object) -> tuple[str, int]:
    """Output of a command, and its largest resident set in bytes as the kernel counts it."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    done = subprocess.run(
        ["python3", "-c", code, str(RELUME), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    output, peak = done.stdout.rstrip().rsplit("\n", 1)
    return output, int(peak)


def test_four_layers_of_llada2_mini(tmp_path: Path) -> None:
    out = tmp_path / "big"
    _, peak = peak_of("synth", out, "--like", "llada2-mini", "--layers", "4")
    size = sum(path.stat().st_size for path in out.iterdir())
    assert size > 5.5 * 2**30
    assert peak < size / 2
    output, peak = peak_of("generate", out, "Why is the sky blue?", "--max-tokens", "64", "--json")
    statistics = json.loads(output.splitlines()[-1])["statistics"]
    print(f"peak {peak / 2**30:.2f} GiB of {LIMIT / 2**30:.0f}, {statistics}")  # noqa: T201 (shown by -s)
    assert peak < LIMIT
    assert statistics["num_tokens"] == 64
    assert 50 < statistics["active_experts"] < 95
