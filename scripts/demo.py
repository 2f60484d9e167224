"""The demo: three questions to the model that comes with the package, while you watch the canvas fill in.

Then the same again with all experts in memory, and with room for 40% of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from relume import Engine
from relume.cli.live import pictures

#: Questions and what the last line of the answer has to be.
QUESTIONS = {
    "Reverse the word planet.": "tenalp",
    "Add 922 and 456.": "1378",
    "Nina has 19 stamps. Nina gives 5 to Emma and then loses 3. How many stamps now?": "11",
}


def run(*arguments: str) -> None:
    """Show a command and run it; end with its exit code if it fails."""
    print("\n$ relume " + " ".join(f'"{a}"' if " " in a else a for a in arguments), flush=True)
    relume = Path(sys.executable).parent / "relume"
    done = subprocess.run([str(relume), *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def show() -> None:
    """Answer the questions; every iteration's canvas stays on the screen."""
    console = Console(emoji=False, highlight=False)
    with Engine.load("demo") as engine:
        for question in QUESTIONS:
            console.print(f"\n{question}", style="bold", soft_wrap=True)
            stream = engine.stream(messages=[{"role": "user", "content": question}], threshold=0.9)
            for picture in pictures(stream, engine.tokenizer.decode):
                console.print(picture, soft_wrap=True)


def compare() -> None:
    """Decode with all experts resident and with 40% of them; print what that costs. A token that differs fails."""
    print("\nThe same questions with all experts in memory, and with room for 40% of them (all measured here):\n")
    print(f"{'experts in memory':<18}{'hit rate':>10}{'bytes moved':>14}{'ms a token':>12}   answers")
    tokens = []
    for budget, strategy in (("100%", "full"), ("40%", "foresight")):
        with Engine.load("demo", strategy=strategy, expert_memory=budget) as engine:
            asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
            engine.generate(messages=asked[0], threshold=0.9)  # the first forwards of a process are slow
            found = [engine.generate(messages=messages, threshold=0.9) for messages in asked]
        figures = [result.statistics for result in found]
        hit_rate = sum(f.hit_rate for f in figures) / len(figures)
        moved = sum(f.bytes_to_device for f in figures)
        tpot = 1000 * sum(f.wall_s for f in figures) / sum(f.num_tokens for f in figures)
        tokens.append([result.token_ids for result in found])
        answers = ", ".join((result.text or "").splitlines()[-1] for result in found)
        print(f"{budget + ' ' + strategy:<18}{hit_rate:>10.3f}{moved / 2**20:>10.1f} MiB{tpot:>12.2f}   {answers}")
    if tokens[0] != tokens[1]:
        sys.exit("the tokens differ")
    print("\nThe tokens are the same.")


def main() -> None:
    """Run the commands."""
    run("inspect", "demo")
    run("generate", "demo", next(iter(QUESTIONS)), "--threshold", "0.9")
    print("\nThe canvas after each iteration, ░ a mask, red to green how sure a token was:")
    show()
    compare()


if __name__ == "__main__":
    main()
