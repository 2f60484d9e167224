"""How a model routes while it decodes, from a trace: a JSON file and a plot.

    pip install -e '.[figures]'
    relume trace record demo demo.trace --num-prompts 1000 --threshold 0.9
    python scripts/routing_report.py demo.trace docs/demo-routing

For every denoising iteration and MoE layer: the share of experts that are active, the share of the active set
that was active in the iteration before (within a block and across its border), and the share of a token's experts
that it keeps in the next iteration, by what happens to the token in between and by its confidence. Means of fewer
than 20 values are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from relume.core import Phase, SpanSignals
from relume.strategy.use import span_slices
from relume.trace.file import TraceReader
from relume.trace.views import expert_counts

#: Upper ends of the bins of confidence.
BINS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
#: Ends of the bins of an expert's load over the mean.
LOAD_BINS = np.linspace(0.0, 5.0, 11)
FEWEST = 20

Sums = dict[str, dict[Any, list[float]]]


def measure(reader: TraceReader) -> dict[str, Any]:
    """Means over all forwards of a trace."""
    shape = reader.metadata.shape
    sums: Sums = defaultdict(lambda: defaultdict(list))
    histogram = np.zeros((shape.num_layers, shape.num_experts), dtype=np.int64)
    last: dict[int, tuple[SpanSignals, np.ndarray]] = {}  # of each request
    begun: dict[tuple[int, int], SpanSignals] = {}  # each block's first iteration
    iterations: dict[tuple[int, int], int] = defaultdict(int)
    for record in reader:
        for span, tokens in zip(record.spans, span_slices(record.spans), strict=True):
            if span.phase is Phase.DENOISE:
                ids = record.expert_ids[:, tokens].astype(np.int64)
                histogram += expert_counts(ids, shape.num_experts)
                block = span.request, span.start
                answers = np.asarray(begun.setdefault(block, span).masked)
                note(sums, span, ids, iterations[block], answers, last.get(span.request), shape.num_experts)
                iterations[block] += 1
                last[span.request] = span, ids
    return summarise(sums, histogram)


def note(
    sums: Sums,
    span: SpanSignals,
    ids: np.ndarray,
    iteration: int,
    answers: np.ndarray,
    before: tuple[SpanSignals, np.ndarray] | None,
    num_experts: int,
) -> None:
    """File one iteration of a request; `ids` is `[layers, tokens, k]`, `answers` are tokens past the prompt."""
    active = expert_counts(ids, num_experts) > 0
    for layer, share in enumerate(active.mean(axis=1).tolist()):
        sums["active_share"][layer, iteration].append(share)
    if before is None:
        return
    earlier, earlier_ids = before
    shared = (active & (expert_counts(earlier_ids, num_experts) > 0)).sum(axis=1) / active.sum(axis=1)
    same_block = earlier.start == span.start
    sums["set_overlap"]["within_block" if same_block else "across_border"].append(float(shared.mean()))
    if not same_block:
        return
    kept = (earlier_ids[:, :, :, None] == ids[:, :, None, :]).any(-1).mean(axis=(0, 2))
    for token, share in enumerate(kept.tolist()):
        confidence = float(earlier.confidences[token])
        top = next(top for top in BINS if confidence <= top)
        if earlier.committed[token]:
            kind = "commits"
        elif earlier.masked[token]:
            kind = "stays masked"
        else:
            sums["kept"]["committed earlier" if answers[token] else "prompt"].append(share)
            continue
        sums["kept"][kind].append(share)
        sums["kept"][f"{kind}, confidence up to {top}"].append(share)


def summarise(sums: Sums, histogram: np.ndarray) -> dict[str, Any]:
    """Means and counts as plain values."""
    by_layer: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (layer, _), values in sorted(sums["active_share"].items()):
        by_layer[str(layer)] += [mean_of(values)] if len(values) >= FEWEST else []
    shares = [share for values in sums["active_share"].values() for share in values]
    load = histogram / histogram.mean(axis=1, keepdims=True)
    return {
        "kind": "measured",
        "iterations": len(shares) // len(by_layer),
        "active_share": sum(shares) / len(shares),
        "active_share_by_layer_and_iteration": by_layer,
        "set_overlap": means_of(sums["set_overlap"]),
        "kept": means_of(sums["kept"]),
        "load_over_mean": {"least": float(load.min()), "largest": float(load.max())},
        "dead_experts": int((histogram == 0).sum()),
        "load_histogram": {"edges": LOAD_BINS.tolist(), "experts": np.histogram(load, bins=LOAD_BINS)[0].tolist()},
    }


def means_of(sums: dict[Any, list[float]]) -> dict[str, dict[str, float]]:
    """Of all that have enough values, by name."""
    return {name: mean_of(values) for name, values in sorted(sums.items()) if len(values) >= FEWEST}


def mean_of(values: list[float]) -> dict[str, float]:
    """A mean, and of how many."""
    return {"share": sum(values) / len(values), "count": len(values)}


def plot(report: dict[str, Any], path: Path) -> None:
    """Active share by iteration and layer, and what tokens keep."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for layer, means in report["active_share_by_layer_and_iteration"].items():
        shares = [mean["share"] for mean in means]
        left.plot(range(1, len(shares) + 1), shares, label=f"MoE layer {int(layer) + 1}")
    left.set(xlabel="iteration of the block", ylabel="active experts / experts", ylim=(0, None))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8)
    overlaps = {f"active set, {name.replace('_', ' ')}": mean for name, mean in report["set_overlap"].items()}
    for bars, color in ((overlaps, "tab:orange"), (report["kept"], "tab:blue")):
        names = [f"{name} ({mean['count']})" for name, mean in bars.items()]
        right.barh(names, [mean["share"] for mean in bars.values()], color=color)
    right.invert_yaxis()
    right.tick_params(axis="y", labelsize=8)
    right.set(xlabel="share of the active set, or of a token's experts, that is kept", xlim=(0, 1))
    figure.suptitle("measured on held-out prompts, mean over layers where none is named")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", help="path without suffix; .json and .png are written")
    arguments = parser.parse_args()
    report = measure(TraceReader(arguments.trace))
    Path(f"{arguments.out}.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report, Path(f"{arguments.out}.png"))
    print(json.dumps({k: v for k, v in report.items() if "by_layer" not in k}, indent=1))


if __name__ == "__main__":
    main()
