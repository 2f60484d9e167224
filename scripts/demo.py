"""The demo: three questions to the model that comes with the package, while you watch the canvas fill in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Questions and what the last line of the answer has to be.
QUESTIONS = {
    "Reverse the word planet.": "tenalp",
    "Write river in capital letters.": "RIVER",
    "Which is larger, 57 or 31?": "57",
}


def run(*arguments: str) -> None:
    """Show a command and run it; end with its exit code if it fails."""
    print("\n$ relume " + " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    relume = Path(sys.executable).parent / "relume"
    done = subprocess.run([str(relume), *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Run the commands."""
    run("inspect", "demo")
    for question in QUESTIONS:
        run("generate", "demo", question, "--threshold", "0.9", "--live")


if __name__ == "__main__":
    main()
