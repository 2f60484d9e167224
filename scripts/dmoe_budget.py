"""What fewer experts a block save when few experts fit: hit rate, bytes per token and time per token, measured.

    relume distill demo --out OUT
    python scripts/dmoe_budget.py OUT/checkpoint docs/dmoe-budget

The base in its native routing against the distilled model in its own, each with the strategies lru and
foresight, at one budget of resident experts, and the distilled model with more and more weight on what is
resident. One request at a time, the same held-out prompts for all. A first round, recorded and not timed, gives
the answers, the hits by phase and Belady's bound of its routing, which is simulated; then rounds in turn, there
and back, give times, and medians of them are shown. Foresight starts from a profile of prompts of the training
split, which is made for either model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relume import Engine
from relume.config import DecodingConfig, EngineConfig
from relume.core import Phase
from relume.engine.result import GenerationResult
from relume.evaluate.job import answer
from relume.evaluate.prompts import sample_problems
from relume.evaluate.scoring import Score
from relume.machine.profile import machine_identity
from relume.routing.choice import RoutingChoice
from relume.routing.options import ROUTINGS
from relume.strategy.use import span_slices
from relume.tasks import TASKS, Problem, is_exact
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile, write_model_profile
from relume.trace.views import expert_counts

RELUME = Path(sys.executable).parent / "relume"
#: Weights on what is resident.
RESIDENTS = (0.05, 0.1)
PHASES = ("prefill", "first", "later", "commit")
HEAD = (
    "| model | routing | strategy | exact match | active | hit rate | bound (simulated) | prefill | first | later "
    "| commit | KB/token | / first row | TPOT ms | hosted | prefetched, useful |\n" + "|---" * 16 + "|"
)


@dataclass(frozen=True)
class Case:
    """One engine; no routing is the model's own."""

    model: str
    strategy: str
    routing: str | None = None


def cases_of(own: RoutingChoice, more: str | None) -> list[Case]:
    """The base first, which the others are compared with; `own` is the distilled model's routing."""
    heeding = [str(replace(own, residents=strength)) for strength in RESIDENTS]
    found = [Case("base", "lru", "native"), Case("base", "foresight", "native")]
    found += [Case("distilled", "lru"), Case("distilled", "foresight")]
    found += [Case("distilled", "foresight", routing) for routing in heeding]
    found.append(Case("distilled", "foresight:prefetch=none", heeding[0]))
    return found + [Case("distilled", "foresight", text) for text in (more or "").split(",") if text]


class Bench:
    """Runs cases on the same problems."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._folders = {"base": options.base, "distilled": options.distilled}
        self._options = options
        self._scratch = scratch
        self._profiles = {model: self._make_profile(model) for model in self._folders}
        chosen = sample_problems(list(TASKS), options.num_prompts, options.seed)
        self.problems: list[Problem] = [problem for group in chosen.values() for problem in group]

    def run(self, case: Case, trace: Path | None = None) -> tuple[list[GenerationResult], str]:
        """Answer all problems one by one, and record it if a trace is named; also the routing's full name."""
        loading = {"strategy": case.strategy, "expert_memory": self._options.budget, "routing": case.routing}
        loading |= {"profile": self._profiles[case.model], "max_batch": 1}
        with Engine.load(self._folders[case.model], **loading) as engine:
            prompts = [problem.prompt for problem in self.problems]
            if trace is not None:
                with engine.record(trace):
                    return self._answer(engine, prompts), str(engine.routing)
            return self._answer(engine, prompts), str(engine.routing)

    def _answer(self, engine: Engine, prompts: list[str]) -> list[GenerationResult]:
        decoding = DecodingConfig(max_tokens=self._options.max_tokens, threshold=self._options.threshold)
        return answer(engine, prompts, decoding, 1, lambda _done, _total: None)

    def _make_profile(self, model: str) -> str:
        """Of a model, from prompts that it may have been trained on."""
        trace, path = self._scratch / "profile.trace", self._scratch / f"{model}.npz"
        problems = sample_problems(list(TASKS), self._options.profile_prompts, self._options.seed, "train")
        with Engine.load(self._folders[model], strategy="full", max_batch=1) as engine, engine.record(trace):
            self._answer(engine, [problem.prompt for group in problems.values() for problem in group])
        reader = TraceReader(trace)
        write_model_profile(gather_profile(reader, reader.metadata.shape, reader.metadata.model), path)
        trace.unlink()
        return str(path)


def hits_by_phase(path: Path) -> dict[str, dict[str, float]]:
    """Of prefills, blocks' first iterations, their later ones, and commits: forwards, active experts, hits."""
    reader = TraceReader(path)
    active: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    forwards: Counter[str] = Counter()
    begun: set[tuple[int, int]] = set()
    for record in reader:
        span, place = record.spans[0], span_slices(record.spans)[0]
        phase = span.phase.value
        if span.phase is Phase.DENOISE:
            phase = "later" if (span.request, span.start) in begun else "first"
            begun.add((span.request, span.start))
        counts = expert_counts(record.expert_ids[:, place], reader.metadata.shape.num_experts)
        forwards[phase] += 1
        active[phase] += int((counts > 0).sum())
        missed[phase] += sum(len(layer) for layer in record.misses)
    layers = reader.metadata.shape.num_layers
    return {
        phase: {
            "forwards": forwards[phase],
            "active_experts": active[phase] / forwards[phase] / layers,
            "hit_rate": 1.0 - missed[phase] / active[phase],
            "misses": missed[phase],
        }
        for phase in PHASES
        if forwards[phase]
    }


def bound_of(path: Path, budget: str) -> float:
    """Belady's hit rate on a recorded routing, simulated: nobody who brings only what was asked for has more."""
    command = [str(RELUME), "simulate", str(path), "--strategy", "lru", "--json"]
    done = subprocess.run([*command, "--expert-memory", budget], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    return float(next(row["hit_rate"] for row in rows if row["strategy"] == "belady"))


def figures_of(results: list[GenerationResult]) -> dict[str, float]:
    """Of one round, over all its requests."""
    found = [result.statistics for result in results]
    num_tokens = sum(s.num_tokens for s in found)
    active = sum(s.active_experts * s.num_iterations for s in found)
    prefetched = sum(s.prefetch_useful + s.prefetch_wasted for s in found)
    return {
        "hit_rate": sum(s.hit_rate * s.active_experts * s.num_iterations for s in found) / active,
        "active_experts": active / sum(s.num_iterations for s in found),
        "bytes_per_token": sum(s.bytes_to_device for s in found) / num_tokens,
        "tpot_ms": 1000.0 * sum(s.wall_s for s in found) / num_tokens,
        "tokens_per_iteration": num_tokens / sum(s.num_iterations for s in found),
        "hosted": sum(s.hosted for s in found),
        "prefetched": prefetched,
        "prefetched_useful": sum(s.prefetch_useful for s in found) / max(1, prefetched),
        "expert_memory_bytes": found[0].expert_memory_bytes,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases."""
    with Engine.open(options.distilled, EngineConfig()) as engine:
        own = engine.routing
    if "residents" not in ROUTINGS[own.name].names:
        raise SystemExit(f"{options.distilled}: residents cannot sway its routing {own}: it has no votes")
    cases = cases_of(own, options.more)
    with tempfile.TemporaryDirectory() as folder:
        bench, rows = Bench(options, Path(folder)), []
        for case in cases:
            trace = Path(folder) / "case.trace"
            results, routing = bench.run(case, trace)
            exact = [is_exact(r.text or "", p.answer) for r, p in zip(results, bench.problems, strict=True)]
            score = Score(sum(exact), len(exact))
            row = {"model": case.model, "routing": routing, "strategy": case.strategy, "kind": "measured"}
            row |= {"exact_match": score.to_dict(), "phases": hits_by_phase(trace), "rounds": []}
            rows.append(row | {"belady_hit_rate_simulated": bound_of(trace, options.budget)})
            print(f"{case}: {figures_of(results)['hit_rate']:.3f} hits", flush=True)
        for number in range(options.rounds):
            order = range(len(cases)) if number % 2 == 0 else reversed(range(len(cases)))
            for index in order:
                rows[index]["rounds"].append(figures_of(bench.run(cases[index])[0]))
            print(f"round {number + 1} of {options.rounds}", flush=True)
    for row in rows:
        row |= {key: statistics.median(found[key] for found in row["rounds"]) for key in row["rounds"][0]}
    return rows


def line_of(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table."""
    low, high = row["exact_match"]["interval_95"]
    cells = [row["model"], f"`{row['routing']}`", row["strategy"]]
    cells += [f"{row['exact_match']['exact_match']:.3f} ({low:.3f}..{high:.3f})", f"{row['active_experts']:.1f}"]
    cells += [f"{row['hit_rate']:.3f}", f"{row['belady_hit_rate_simulated']:.3f}"]
    cells += [f"{row['phases'][phase]['hit_rate']:.3f}" if phase in row["phases"] else "-" for phase in PHASES]
    cells += [f"{row['bytes_per_token'] / 1e3:.0f}"]
    cells += [f"1/{first['bytes_per_token'] / row['bytes_per_token']:.2f}" if row["bytes_per_token"] else "0"]
    cells += [f"{row['tpot_ms']:.2f}", f"{row['hosted']:.0f}"]
    cells += [f"{row['prefetched']:.0f}, {row['prefetched_useful']:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distilled", help="the distilled model")
    parser.add_argument("out", help="path without suffix; .md and .json are written")
    parser.add_argument("--base", default="demo", help="the model that it was distilled from")
    parser.add_argument("--budget", default="15%", help="of resident experts")
    parser.add_argument("--num-prompts", type=int, default=120)
    parser.add_argument("--profile-prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument(
        "--threshold", type=float, default=0.9, help="with a larger one blocks take more iterations"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", help="further routings of the distilled model, separated by commas")
    options = parser.parse_args()
    rows = measure(options)
    about = (
        f"Measured on {machine_identity()}: {options.num_prompts} held-out prompts one by one, threshold "
        f"{options.threshold}, "
        f"{options.budget} of the experts resident, medians of {options.rounds} rounds. Hit rates by phase are "
        "those of prefills, of blocks' first and later iterations, and of commits, in a recorded round; the "
        "bound is Belady's for that round's routing, simulated."
    )
    text = [about, "", HEAD, *(line_of(row, rows[0]) for row in rows)]
    Path(f"{options.out}.md").write_text("\n".join(text) + "\n")
    document = {"hardware": machine_identity(), "budget": options.budget, "rows": rows}
    Path(f"{options.out}.json").write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
