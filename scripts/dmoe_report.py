"""What a distilled model keeps of its base's quality, with how many experts: a table, JSON and a plot, measured.

    pip install -e '.[figures]'
    python scripts/dmoe_report.py OUT/checkpoint docs/dmoe

Rows: the base in its native routing, others with fewer experts, dMoE without and with the distillation, and
several block lengths. All of them answer the same held-out prompts, and each is compared with the base by paired
resampling. A row is kept in `OUT.rows.jsonl` as soon as it is done, and a run that is started again goes on there.
Batches are exact, since otherwise active experts would be those of the whole batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relume import Engine
from relume.checkpoint.fingerprint import fingerprint
from relume.checkpoint.folder import open_checkpoint
from relume.config import DecodingConfig, EngineConfig
from relume.evaluate.job import EvaluationRow, evaluate
from relume.evaluate.prompts import sample_problems
from relume.evaluate.scoring import Comparison, compare
from relume.evaluate.variants import Variant
from relume.figures.drawing import require_drawing
from relume.figures.tradeoff import TradeoffPoint, curve_of, draw_tradeoff
from relume.machine.profile import machine_identity
from relume.routing.choice import RoutingChoice
from relume.tasks import TASKS

#: Of dMoE, untrained and distilled, and of DES by votes.
P = (0.4, 0.5, 0.6, 0.7, 0.8)
SHARES = (0.125, 0.15, 0.2, 0.25, 0.3, 0.4)
#: Of these, DES with prefills and commits that route natively too, for what was not trained may need it.
NATIVE_PREFILL_SHARES = (0.125, 0.2, 0.3)
BLOCK_LENGTHS = (8, 16, 32)
#: Options that a row depends on.
FACTS = ("dtype", "num_prompts", "seed", "max_tokens")
VARIANT = "threshold:0.9"
HEAD = (
    "| model | routing | block | exact match | - base, points | / base | active | prefill | KiB "
    "| tokens/iteration |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Spec:
    """A row to make: of the `base` or the `distilled` model; no routing is its own, no length its own."""

    model: str
    routing: str | None = None
    block_length: int | None = None


@dataclass(frozen=True)
class Made:
    """A row that is there."""

    spec: Spec
    row: EvaluationRow

    @property
    def line(self) -> str:
        """The curve that it belongs to."""
        name = curve_of(self.row.routing)
        return f"{name}, distilled" if self.spec.model == "distilled" else name


def specs_of(base: Engine, distilled: Engine) -> list[Spec]:
    """All rows, those that matter most first; equal ones once."""
    top_k = base.config.router.top_k
    own = distilled.routing if distilled.routing.name == "dmoe" else RoutingChoice("dmoe")
    wanted = [Spec("base", "native"), Spec("distilled")]
    wanted += [Spec("distilled", str(dataclasses.replace(own, p=p))) for p in P]
    wanted += [Spec("distilled", str(RoutingChoice("dmoe", p=own.p)))]  # with the least guard
    wanted += [Spec("base", f"des-vote:share={share}") for share in SHARES]
    wanted += [Spec("base", f"des-seq:n={n}") for n in range(1, top_k)]
    wanted += [Spec("base", f"dmoe:p={p}") for p in P]
    wanted += [Spec("base", f"des-vote:share={share}:prefill=native") for share in NATIVE_PREFILL_SHARES]
    wanted += [Spec("base", f"des-seq:n={n}:prefill=native") for n in range(1, top_k)]
    wanted += [Spec("base", f"top-k:{max(1, top_k // 2)}"), Spec("base", "expert-choice")]
    wanted += [Spec("base", "team:distance=4:confidence=0.9")]
    for length in BLOCK_LENGTHS:
        wanted += [Spec("base", "native", length), Spec("distilled", None, length)]
    chosen: dict[Spec, None] = {}
    for spec in wanted:
        engine = base if spec.model == "base" else distilled
        usual = spec.block_length in {None, engine.config.block_length}
        routing = str(engine.routing) if spec.routing is None else spec.routing
        chosen[Spec(spec.model, routing, None if usual else spec.block_length)] = None
    return list(chosen)


class Rows:
    """Rows on disk, one a line, each under what it depends on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the last one, of a run that was killed
            self._rows[entry["key"]] = entry["row"]

    def get(self, key: str) -> EvaluationRow | None:
        """The row, if it was made."""
        return EvaluationRow.from_plain(self._rows[key]) if key in self._rows else None

    def add(self, key: str, row: EvaluationRow) -> None:
        """Keep a row for good."""
        with self._path.open("a") as file:
            file.write("\n" * self._broken() + json.dumps({"key": key, "row": dataclasses.asdict(row)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _broken(self) -> bool:
        return (
            self._path.exists() and self._path.stat().st_size > 0 and not self._path.read_bytes().endswith(b"\n")
        )


def make_rows(options: argparse.Namespace) -> list[Made]:
    """Make or find all rows; says how far it is."""
    folders = {"base": options.base, "distilled": options.distilled}
    engines = {name: Engine.open(folder, EngineConfig()) for name, folder in folders.items()}
    prints = {name: fingerprint(open_checkpoint(engine.folder)) for name, engine in engines.items()}
    specs = specs_of(engines["base"], engines["distilled"])
    for engine in engines.values():
        engine.close()
    problems = sample_problems(list(TASKS), options.num_prompts, options.seed)
    decoding = DecodingConfig(max_tokens=options.max_tokens)
    rows, made, spent, count = Rows(Path(f"{options.out}.rows.jsonl")), [], 0.0, 0
    todo = 0
    keys = {}
    for spec in specs:
        facts = (prints[spec.model], VARIANT, *(getattr(options, name) for name in FACTS))
        keys[spec] = json.dumps([*dataclasses.astuple(spec), *facts])
        todo += rows.get(keys[spec]) is None
    for spec in specs:
        row = rows.get(keys[spec])
        if row is None:
            started = time.perf_counter()
            loading = {"dtype": options.dtype, "routing": spec.routing, "max_batch": options.batch_size}
            with Engine.load(folders[spec.model], **loading) as engine:
                changed = dataclasses.replace(decoding, block_length=spec.block_length)
                variant = Variant.parse(VARIANT)
                row = evaluate(engine, problems, variant, changed, options.batch_size, model=spec.model)
            rows.add(keys[spec], row)
            spent, count = spent + time.perf_counter() - started, count + 1
            print(
                f"{count}/{todo} {spec.model} {row.routing} block {row.block_length}: "
                f"{row.overall.exact_match:.3f} with {row.active_experts:.1f} experts; "
                f"{spent / count * (todo - count):.0f} s left",
                flush=True,
            )
        made.append(Made(spec, row))
    return made


def line_of(row: EvaluationRow, found: Comparison | None) -> str:
    """A row of the table."""
    low, high = row.overall.interval
    cells = [row.model, f"`{row.routing}`", str(row.block_length)]
    cells += [f"{row.overall.exact_match:.3f} ({low:.3f}..{high:.3f})", *against(found)]
    cells += [f"{row.active_experts:.1f}", f"{row.active_experts_prefill:.1f}"]
    cells += [f"{row.active_expert_bytes / 2**10:.0f}", f"{row.tokens_per_iteration:.2f}"]
    return f"| {' | '.join(cells)} |"


def against(found: Comparison | None) -> list[str]:
    """Cells of a comparison."""
    if found is None:
        return ["base", "base"]
    points = "{:+.1f} ({:+.1f}..{:+.1f})".format(found.points, *found.points_interval)
    if found.relative is None or found.relative_interval is None:
        return [points, "-"]
    return [points, "{:.3f} ({:.3f}..{:.3f})".format(found.relative, *found.relative_interval)]


def at_equal_experts(
    row: EvaluationRow, others: Sequence[EvaluationRow], rng: np.random.Generator
) -> dict[str, Any]:
    """A row against others of one kind at as many experts: between the two nearest, prompt by prompt.

    Outside their range it is the nearest of them, and `active_experts` says how many that one has.
    """
    ordered = sorted(others, key=lambda other: other.active_experts)
    counts = [other.active_experts for other in ordered]
    place = float(np.interp(row.active_experts, counts, np.arange(len(counts))))
    below = ordered[int(place)]
    above = ordered[min(int(place) + 1, len(ordered) - 1)]
    weight = place - int(place)
    mixed = (1.0 - weight) * np.array(below.right, dtype=float) + weight * np.array(above.right, dtype=float)
    found = compare(row.right, mixed.tolist(), rng)
    return {
        "routing": row.routing,
        "active_experts": row.active_experts,
        "exact_match": row.overall.exact_match,
        "between": [below.routing, above.routing] if weight else [below.routing],
        "other_active_experts": float(np.interp(place, np.arange(len(counts)), counts)),
        "other_exact_match": float(mixed.mean()),
    } | found.to_dict()


def equal_experts(made: Sequence[Made], seed: int) -> list[dict[str, Any]]:
    """Distilled dMoE against both kinds of DES, and itself before the distillation, at equal active experts."""
    usual = [each for each in made if each.spec.block_length is None]
    rng, found = np.random.default_rng(seed), []
    for each in usual:
        if each.line == "dmoe, distilled":
            for name in ("des-vote", "des-seq", "des-vote, native prefill", "des-seq, native prefill", "dmoe"):
                others = [other.row for other in usual if other.line == name]
                found += [at_equal_experts(each.row, others, rng)] if others else []
    return found


def write(made: Sequence[Made], options: argparse.Namespace) -> None:
    """The Markdown, the JSON and the plot."""
    base = made[0].row
    lengths = {each.row.block_length: each.row for each in made if each.line == "native"}
    found = [None if each.row is base else each.row.against(base, options.seed) for each in made]
    blocks = [each for each in made if each.row.block_length in lengths and each.spec in own_specs(made)]
    matched = {
        n: blocks[n].row.against(lengths[blocks[n].row.block_length], options.seed) for n in range(len(blocks))
    }
    equal = equal_experts(made, options.seed)
    about = (
        f"Measured on {machine_identity()}: {base.overall.num_prompts} held-out prompts, {VARIANT}, computed in "
        f"{options.dtype}, batches of {options.batch_size} (exact). Intervals are 95%: Wilson's of exact match, "
        "the others from 10,000 paired resamples of the prompts. Active and prefill are distinct experts of a "
        "layer, in a denoising iteration and in a forward that prefills or commits; KiB are those of all layers' "
        "active experts in an iteration, as the checkpoint stores them."
    )
    picture = f"![Exact match over active experts]({Path(options.out).name}.png)"
    text = [
        "# Quality against active experts",
        "",
        about,
        "",
        picture,
        "",
        HEAD,
        *(line_of(each.row, one) for each, one in zip(made, found, strict=True)),
    ]
    text += [
        "",
        "At equal experts (of two neighbouring rows of the other kind, interpolated prompt by prompt):",
    ]
    text += ["", "| distilled | active | exact match | against | active | exact match | difference, points |"]
    text += ["|---|---|---|---|---|---|---|", *map(equal_line, equal)]
    text += ["", "By block length, each against the base's native routing with the same length:", "", HEAD]
    text += [line_of(each.row, matched[n] if each.line != "native" else None) for n, each in enumerate(blocks)]
    Path(f"{options.out}.md").write_text("\n".join(text) + "\n")
    rows = [
        each.row.to_dict() | {"against_base": None if one is None else one.to_dict()}
        for each, one in zip(made, found, strict=True)
    ]
    own = [
        {"block_length": each.row.block_length, "model": each.row.model, "routing": each.row.routing}
        | matched[n].to_dict()
        for n, each in enumerate(blocks)
        if each.line != "native"
    ]
    document = {"kind": "measured", "hardware": machine_identity(), "dtype": options.dtype, "rows": rows}
    document |= {"by_block_length": own}
    Path(f"{options.out}.json").write_text(json.dumps(document | {"equal_experts": equal}, indent=1) + "\n")
    points = [
        TradeoffPoint(
            each.line, each.row.active_experts, each.row.overall.exact_match, each.row.overall.interval, n == 0
        )
        for n, each in enumerate(made)
        if each.spec.block_length is None
    ]
    draw_tradeoff(points, Path(f"{options.out}.png"))
    print("\n".join(text))


def own_specs(made: Sequence[Made]) -> set[Spec]:
    """Rows of each model's own routing: those that another block length was asked of, and their likes."""
    asked = {(each.spec.model, each.spec.routing) for each in made if each.spec.block_length is not None}
    return {each.spec for each in made if (each.spec.model, each.spec.routing) in asked}


def equal_line(found: dict[str, Any]) -> str:
    """A row of the comparison at equal experts."""
    low, high = found["points_interval"]
    between = " and ".join(f"`{name}`" for name in found["between"])
    outside = "" if abs(found["other_active_experts"] - found["active_experts"]) < 1e-6 else " (its nearest)"
    return (
        f"| `{found['routing']}` | {found['active_experts']:.1f} | {found['exact_match']:.3f} | "
        f"{between}{outside} | "
        f"{found['other_active_experts']:.1f} | {found['other_exact_match']:.3f} | "
        f"{found['points']:+.1f} ({low:+.1f}..{high:+.1f}) |"
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distilled", help="the distilled model")
    parser.add_argument("out", help="path without suffix; .md, .json, .png and .rows.jsonl are written")
    parser.add_argument("--base", default="demo", help="the model that it was distilled from")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="on a CPU several times as fast as bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    require_drawing(Path(f"{options.out}.png"))
    write(make_rows(options), options)


if __name__ == "__main__":
    main()
