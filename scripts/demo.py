"""The demo: make a small synthetic model once, look at it, and decode a prompt with it.

Its weights are random, so its answer is gibberish; its shape, routing and number of tokens per iteration are
those of a trained model in small.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(".demo/model")
SIZES = ["--layers", "6", "--hidden", "512", "--expert-size", "128", "--vocab", "8192"]


def run(*arguments: str) -> None:
    """Show a command and run it; end with its exit code if it fails."""
    print("\n$ relume " + " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)  # noqa: T201
    relume = Path(sys.executable).parent / "relume"
    done = subprocess.run([str(relume), *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Run the three commands."""
    print("This demo runs a synthetic model with random weights: expect its pace, not sense.")  # noqa: T201
    if not MODEL.exists():
        run("synth", str(MODEL), "--like", "llada2-mini", *SIZES)
    run("inspect", str(MODEL))
    run("generate", str(MODEL), "Why is the sky blue?", "--max-tokens", "96", "--live", "--json")


if __name__ == "__main__":
    main()
