"""What a budget costs: TPOT, hit rate and bytes per token of a model at several expert budgets, measured.

Each run is a process of its own, under an enforced limit on its memory (RLIMIT_DATA) of what its plan says.
Budgets alternate, and the table gives medians. Its last column is the time of the experts' layers against the
larger of loading and computing: 1 is a perfect overlap.

    python scripts/budget_report.py MODEL --budgets 2GiB,100% --repeats 3
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

RELUME = Path(sys.executable).parent / "relume"


def run(arguments: list[str], limit: int | None) -> dict[str, float]:
    """The JSON document of a command whose data may not grow beyond `limit` bytes."""

    def enforce() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    before: Callable[[], None] = enforce
    command = [str(RELUME), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=before)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--budgets", default="2GiB,100%")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", default="64")
    parser.add_argument("--prompt", default="The quick brown fox jumps over the lazy dog. " * 4)
    options, rest = parser.parse_known_args()  # further options go to relume generate
    budgets = options.budgets.split(",")
    answers: dict[tuple[int, ...], str] = {}
    found: dict[str, list[dict[str, float]]] = {budget: [] for budget in budgets}
    for _ in range(options.repeats):
        for budget in budgets:
            memory = ["--expert-memory", budget, "--context", "1024", *rest]
            total = int(run(["plan", options.model, *memory], None)["total_bytes"])
            total = (total // 2**20 + 1) * 2**20
            arguments = [
                "generate",
                options.model,
                options.prompt,
                *memory,
                "--memory",
                f"{total // 2**20}MiB",
            ]
            arguments += ["--max-tokens", options.max_tokens]
            document = run([*arguments, "--ignore-eos"], total)
            figures: dict[str, float] = document["statistics"]  # type: ignore[assignment]
            found[budget].append(figures | {"plan": total})
            answers.setdefault(tuple(document["token_ids"]), budget)  # type: ignore[arg-type]
            print(json.dumps({"budget": budget, "plan_bytes": total} | figures), flush=True)
    print("all runs gave the same tokens" if len(answers) == 1 else f"different tokens: {answers}")
    print(f"{'budget':>8} {'TPOT ms':>9} {'ratio':>6} {'hit':>6} {'MB/token':>9} {'peak/plan':>9} {'overlap':>8}")
    base = statistics.median(figures["tpot_ms"] for figures in found[budgets[-1]])
    for budget, runs in found.items():

        def median(name: str, runs: list[dict[str, float]] = runs) -> float:
            return statistics.median(figures[name] for figures in runs)

        overlap = median("moe_s") / max(median("compute_s"), median("load_s"))
        print(
            f"{budget:>8} {median('tpot_ms'):9.1f} {median('tpot_ms') / base:6.2f} {median('hit_rate'):6.3f} "
            f"{median('bytes_to_device') / median('num_tokens') / 1e6:9.1f} "
            f"{median('peak_rss_bytes') / median('plan'):9.2f} {overlap:8.2f}"
        )


if __name__ == "__main__":
    main()
