"""How well the cost model of interval refresh predicts this computer, its disk being the link: measured.

A first run records what the model routes. From that the curves are gathered, and with the figures of `relume
machine` the time of an iteration is predicted for each interval. Then each interval runs, in turns, and its
iterations are timed.

    python scripts/interval_report.py MODEL --expert-memory 2GiB --intervals 1,4,31 --repeats 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from relume import DecodingConfig, Engine, Request
from relume.core import Phase, RelumeError
from relume.machine.hardware import load_hardware
from relume.machine.work import WorkShape
from relume.simulate.intervals import outside_experts_s, require_curves
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.refresh.solve import layer_seconds
from relume.trace.file import TraceReader
from relume.trace.profile import gather_profile
from relume.trace.views import phase_of

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
TRAINING_PROMPTS = (
    "Once upon a time there was a miller. " * 4,
    "Rain falls on the hills, and the river rises. " * 4,
)


def record(model: str, memory: str, strategy: str, prompts: tuple[str, ...], max_tokens: int, path: Path) -> None:
    """Answer prompts and write the trace."""
    with Engine.load(model, strategy=strategy, expert_memory=memory, context=1024) as engine, engine.record(path):
        decoding = DecodingConfig(max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            engine.generate_batch([Request(prompt=prompt, decoding=decoding)])


def iteration_s(path: Path) -> float:
    """Measured seconds of an iteration, its share of commit forwards included."""
    decoding = [(phase_of(record), record.wall_s) for record in TraceReader(path)]
    spent = sum(wall_s for phase, wall_s in decoding if phase is not Phase.PREFILL)
    return spent / sum(phase is Phase.DENOISE for phase, _ in decoding)


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--expert-memory", default="2GiB")
    parser.add_argument("--intervals", default="1,4,31")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    intervals = [int(part) for part in options.intervals.split(",")]
    try:
        hardware = load_hardware("this")
    except RelumeError as error:
        sys.exit(str(error))
    measured: dict[int, list[float]] = {interval: [] for interval in intervals}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        record(options.model, options.expert_memory, "lru", TRAINING_PROMPTS, options.max_tokens, path)
        reader = TraceReader(path)
        metadata = reader.metadata
        assert isinstance(metadata.work, WorkShape)
        curves = require_curves(gather_profile(reader, metadata.shape), path)
        costs = RefreshCosts.of(hardware, metadata.work, curves)
        outside_s = outside_experts_s(hardware, metadata.work, curves)
        experts_s = layer_seconds(curves, costs, np.array(metadata.slots)).all.sum(axis=1)
        for _ in range(options.repeats):
            for interval in intervals:
                strategy = f"tide:interval={interval}"
                record(options.model, options.expert_memory, strategy, (PROMPT,), options.max_tokens, path)
                measured[interval].append(iteration_s(path))
                print(json.dumps({"interval": interval, "iteration_s": measured[interval][-1]}), flush=True)
    print(f"{'interval':>8} {'predicted ms':>13} {'measured ms':>12} {'error':>7}")
    for interval in intervals:
        predicted = outside_s + float(experts_s[min(interval, len(experts_s)) - 1])
        seen = statistics.median(measured[interval])
        print(f"{interval:8} {1000 * predicted:13.1f} {1000 * seen:12.1f} {predicted / seen - 1:+7.1%}")
    print(
        f"measured on this computer; predicted from its own figures; {curves.num_iterations} iterations profiled"
    )


if __name__ == "__main__":
    main()
