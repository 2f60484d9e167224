"""Measures how a model routes while it decodes held-out prompts; writes a JSON file and a plot.

    .venv/bin/pip install -e '.[figures]'
    .venv/bin/python scripts/routing_report.py demo docs/demo-routing --num-prompts 60

For every denoising iteration and MoE layer: the share of experts that are active, the share of the active set
that was active in the iteration before (within a block and across its border), and the share of a token's experts
that it keeps in the next iteration, by what happens to the token in between.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from relume import Engine, IterationEvent
from relume.core import Routing
from relume.evaluate.job import held_out_problems
from relume.tasks import TASKS

BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Recorder:
    """Keeps the routing of each layer of the last forward."""

    def __init__(self, engine: Engine) -> None:
        self.layers: dict[int, torch.Tensor] = {}
        transformer = engine._model.transformer
        route = transformer.route

        def record(layer: int, *arguments: Any) -> Routing:
            routing = route(layer, *arguments)
            self.layers[layer] = routing.expert_ids
            return routing

        transformer.route = record  # type: ignore[method-assign]


def kept(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Share of each token's experts that it has again, `[tokens]`."""
    return (before.unsqueeze(-1) == after.unsqueeze(-2)).any(-1).float().mean(-1)


def measure(engine: Engine, num_prompts: int, threshold: float) -> dict[str, Any]:
    """Decode the prompts one by one and average."""
    recorder = Recorder(engine)
    num_experts = engine.config.router.num_experts
    sums: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    histogram = torch.zeros(engine.config.num_layers, num_experts)
    for problem in [p for group in held_out_problems(list(TASKS), num_prompts, 1).values() for p in group]:
        stream = engine.stream(messages=[{"role": "user", "content": problem.prompt}], threshold=threshold)
        last: tuple[IterationEvent, dict[int, torch.Tensor]] | None = None
        for event in stream:
            if not isinstance(event, IterationEvent):
                continue
            routing = dict(recorder.layers)
            for layer, ids in routing.items():
                active = set(ids.flatten().tolist())
                histogram[layer] += torch.bincount(ids.flatten(), minlength=num_experts)
                sums["active_share"][layer, event.iteration].append(len(active) / num_experts)
                if last is None:
                    continue
                before = set(last[1][layer].flatten().tolist())
                same_block = last[0].block == event.block
                place = "within_block" if same_block else "across_border"
                sums["set_overlap"][place].append(len(active & before) / len(active))
                if same_block:
                    note_tokens(sums["kept"], last[0], kept(last[1][layer], ids))
            last = (event, routing)
    return summarise(sums, histogram[list(engine.config.moe_layers)])


def note_tokens(found: dict[Any, list[float]], event: IterationEvent, shares: torch.Tensor) -> None:
    """File each token's share under what the iteration `event` did to it."""
    confidence = dict(zip(event.positions, event.confidences, strict=True))
    for offset, share in enumerate(shares.tolist()):
        position = event.start + offset
        if event.masked[offset]:
            found["stays masked"].append(share)
        elif position in confidence:
            found["commits"].append(share)
            low = max(b for b in BINS[:-1] if b <= min(confidence[position], 0.999))
            found[f"commits at confidence {low:.1f}-{low + 0.2:.1f}"].append(share)
        else:
            found["committed earlier, or prompt"].append(share)


def summarise(sums: dict[str, dict[Any, list[float]]], histogram: torch.Tensor) -> dict[str, Any]:
    """Means and counts as plain values."""
    by_layer: dict[str, list[float]] = {}
    for (layer, _), values in sorted(sums["active_share"].items()):
        by_layer.setdefault(str(layer), []).append(sum(values) / len(values))
    shares = [share for values in sums["active_share"].values() for share in values]
    load = histogram / histogram.mean(dim=1, keepdim=True)
    return {
        "kind": "measured",
        "active_share": sum(shares) / len(shares),
        "active_share_by_layer_and_iteration": by_layer,
        "set_overlap": {name: sum(values) / len(values) for name, values in sums["set_overlap"].items()},
        "kept": {
            name: {"share": sum(values) / len(values), "count": len(values)}
            for name, values in sorted(sums["kept"].items())
        },
        "load_over_mean": {"least": float(load.min()), "largest": float(load.max())},
        "dead_experts": int((histogram == 0).sum()),
        "load_histogram": torch.histc(load, bins=10, min=0.0, max=5.0).int().tolist(),
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Active share by iteration and layer, and what tokens keep."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for layer, shares in report["active_share_by_layer_and_iteration"].items():
        left.plot(range(1, len(shares) + 1), shares, label=f"layer {layer}")
    left.set(xlabel="iteration of the block", ylabel="active experts / experts", ylim=(0, None))
    left.legend(fontsize=8)
    names = list(report["kept"])
    right.barh(names, [report["kept"][name]["share"] for name in names])
    right.set(xlabel="share of a token's experts that it keeps", xlim=(0, 1))
    figure.suptitle("measured on held-out prompts, mean over layers where none is named")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("out", help="path without suffix; .json and .png are written")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=0.9)
    arguments = parser.parse_args()
    report = measure(Engine.load(arguments.model), arguments.num_prompts, arguments.threshold)
    Path(f"{arguments.out}.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report, Path(f"{arguments.out}.png"))
    print(json.dumps({k: v for k, v in report.items() if "by_layer" not in k}, indent=1))


if __name__ == "__main__":
    main()
