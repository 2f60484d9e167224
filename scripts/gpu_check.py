"""Checks relume on a GPU against a CPU, and measures it: one JSON document, and a short table.

It makes its own checkpoints. In order, as long as there is time: bandwidths; every strategy in float32 against the
CPU and against full residency; the same in bfloat16, where products are grouped; repeats with slots that are
filled with NaN when they are freed, to find races; and time per token and hit rate of a model that is shaped like
LLaDA2.0-mini, with as many layers as time and memory allow, by strategy and budget. Whatever does not fit is named
under `skipped`, whatever is wrong under `failures`, and then the exit status is 1.

    scripts/gpu_check.sh --seconds 450
    scripts/gpu_check.sh --dry-run
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import relume  # noqa: F401 (before torch, whose threads it sets up)

if importlib.util.find_spec("pyarrow") is None:  # trace files are not needed here
    sys.modules |= {name: MagicMock() for name in ("pyarrow", "pyarrow.parquet")}

import torch

from relume import Engine, RelumeError
from relume.config import ShapeOverrides
from relume.engine.recorder import Recorder
from relume.machine import bandwidth
from relume.machine.limits import find_limits
from relume.machine.profile import machine_identity, today
from relume.strategy.strategies import STRATEGIES
from relume.synth.job import synthesise
from relume.trace.profile import gather_profile, write_model_profile

#: Of logits relative to the largest, by type: against the CPU in float32, and between residencies. In bfloat16 a
#: kernel may be chosen by how many rows there are, and an expert may be computed on the host.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
LIVE = sorted(set(STRATEGIES) - {"belady"})
TIMED = ["counts", "oled", "foresight", "lru", "freetoken", "fiddler"]
PROMPT = [(37 * i + 11) % 200 for i in range(64)]


@dataclass
class Check:
    """One run.

    Attributes:
        device: `cuda` or `cpu`.
        tiny: models of a test's size.
        seconds: that all may take.
        out: the report.
        folder: for checkpoints.
    """

    device: str
    tiny: bool
    seconds: float
    out: Path
    folder: Path
    started: float = field(default_factory=time.perf_counter)
    step_ends: float = float("inf")
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds, of this step if it has its share of them."""
        return min(self.started + self.seconds, self.step_ends) - time.perf_counter()

    def fits(self, what: str, needed: float) -> bool:
        """Whether there is time for something; if not, that is said."""
        if self.left >= needed:
            return True
        self.report["skipped"].append(f"{what}: {self.left:.0f} s are left and about {needed:.0f} are needed")
        return False

    def fail(self, what: str) -> None:
        """Something is wrong."""
        print(f"  WRONG: {what}")
        self.report["failures"].append(what)

    @contextmanager
    def step(self, name: str, share: float = 1.0) -> Iterator[dict[str, Any]]:
        """A part of the report, written at its end whatever happens; it may take a share of all time."""
        print(f"{name} ...")
        began = time.perf_counter()
        self.step_ends = began + share * self.seconds
        found: dict[str, Any] = {}
        try:
            yield found
        except Exception as error:  # the other steps tell something nonetheless
            traceback.print_exc()
            self.fail(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        self.step_ends = float("inf")
        found["seconds"] = round(time.perf_counter() - began, 2)
        self.report[name] = found
        self.out.write_text(json.dumps(self.report, indent=1) + "\n")

    def load(self, model: Path, **options: Any) -> Engine:
        """An engine on the device, its freed slots poisoned if asked for."""
        poisoned = options.pop("poisoned", False)
        common: dict[str, Any] = {"device": self.device, "context": 512, "reads": "buffered", "max_batch": 1}
        engine = Engine.load(model, **(common | options))
        engine._model.experts.loader.copies.poisoned = poisoned
        return engine


def environment(check: Check) -> dict[str, Any]:
    """What this ran on."""
    limits = find_limits()
    found = {
        "kind": "measured",
        "date": today(),
        "hardware": machine_identity(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "dry_run": check.tiny,
        "pin_cap_bytes": limits.pin_cap_bytes,
    }
    if check.device == "cuda":
        found |= {
            "hardware": torch.cuda.get_device_name(),
            "host": machine_identity(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        }
    return found


def measure_bandwidths(check: Check, found: dict[str, Any]) -> None:
    """GB/s."""
    found["unit"] = "GB/s"

    def measure(name: str, run: Callable[[], float]) -> None:
        try:
            found[name] = round(run(), 2)
        except (bandwidth.NotMeasuredError, RuntimeError) as error:
            found[name] = None
            check.report["skipped"].append(f"{name}: {str(error).splitlines()[0]}")

    measure("memory_read", bandwidth.memory_read)
    measure("host_to_device_pinned", bandwidth.host_to_device)
    if check.device != "cuda":
        return
    host = torch.empty(bandwidth.working_bytes(), dtype=torch.uint8)
    there = torch.empty_like(host, device="cuda")

    def rate(run: Callable[[], object], num_bytes: int) -> float:
        def whole() -> None:
            run()
            torch.cuda.synchronize()

        return num_bytes / bandwidth.median_seconds(whole) / 1e9

    measure("host_to_device_pageable", lambda: rate(lambda: there.copy_(host), host.nbytes))
    measure("device_to_host_pageable", lambda: rate(lambda: host.copy_(there), host.nbytes))
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    measure("device_read_and_write", lambda: rate(large.clone, 2 * large.nbytes))


class Records(list[Any]):
    """Takes the place of a trace file."""

    write = list.append


def make_profile(check: Check, model: Path, out: Path) -> None:
    """Of a request: some strategies need one."""
    with check.load(model, strategy="full") as engine:
        records = Records()
        with engine._runtime.recording(Recorder(records)):  # type: ignore[arg-type]
            engine.generate(input_ids=PROMPT, max_tokens=32, ignore_eos=True)
        write_model_profile(gather_profile(records, engine._model.experts.pool.shape), out)


def answer(engine: Engine) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Logits of a prompt in small parts, whose experts do not fit, and tokens."""
    logits = engine.logits(PROMPT, prefill_blocks=1).float().cpu()
    return logits, engine.generate(input_ids=PROMPT[:40], max_tokens=32, ignore_eos=True).token_ids


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest value; infinite if one is no number."""
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


def compare(check: Check, found: dict[str, Any], model: Path, profile: Path, dtype: str) -> None:
    """Every strategy against the CPU in float32, and against full residency on the device."""
    with Engine.load(model, dtype="float32", strategy="full", context=512) as engine:
        reference, tokens = answer(engine)
    with check.load(model, dtype=dtype, strategy="full") as engine:
        full, full_tokens = answer(engine)
        found["fallbacks"] = engine.fallbacks
    found["full_against_cpu"] = apart(full, reference)
    found["full_tokens_as_cpu"] = full_tokens == tokens
    if not found["full_against_cpu"] <= TOLERANCE[dtype]:
        check.fail(f"{model.name} {dtype}: full residency is {found['full_against_cpu']:.2g} from the CPU")
    rows = found["strategies"] = {}
    longest = 1.0
    # With all experts in host memory first: should time run out, every strategy has been tried that way.
    for host, name in itertools.product(("100%", "50%", None), LIVE):
        if name == "full":
            continue
        if not check.fits(f"{model.name} {dtype}, host memory {host}, {name} and what follows", longest):
            return
        began = time.perf_counter()
        options = {"expert_memory": "25%", "host_memory": host, "profile": str(profile)}
        with check.load(model, dtype=dtype, strategy=name, poisoned=True, **options) as engine:
            logits, its_tokens = answer(engine)
        longest = max(longest, time.perf_counter() - began)
        row = {"against_full": apart(logits, full), "same_tokens": its_tokens == full_tokens}
        rows[f"{name}, host memory {host or 'none'}"] = row
        what = f"{model.name} {dtype} {name}, host memory {host}"
        if not row["against_full"] <= TOLERANCE[dtype]:
            check.fail(f"{what}: {row['against_full']:.2g} from full residency")
        elif dtype == "float32" and not row["same_tokens"]:
            check.fail(f"{what}: other tokens than full residency")


def races(check: Check, found: dict[str, Any], model: Path, profile: Path) -> None:
    """The same again and again with few slots, which are poisoned when they are freed."""
    repeats = 3 if check.tiny else 25
    for dtype in ("float32", "bfloat16"):
        with check.load(model, dtype=dtype, strategy="full") as engine:
            full = engine.logits(PROMPT, prefill_blocks=1).float().cpu()
        for strategy in ("lru", "lru:dispatch=host", "oled", "foresight", "hybrimoe"):
            for host in ("100%", None):
                if not check.fits(f"races {dtype} {strategy} host {host} and what follows", 5.0):
                    return
                options: dict[str, Any] = {"expert_memory": "10%", "host_memory": host, "profile": str(profile)}
                with check.load(model, dtype=dtype, strategy=strategy, poisoned=True, **options) as engine:
                    worst, ended = 0.0, time.perf_counter() + 3.0
                    count = 0
                    while count < repeats and time.perf_counter() < ended:
                        worst = max(worst, apart(engine.logits(PROMPT, prefill_blocks=1).float().cpu(), full))
                        count += 1
                    engine._model.experts.check_integrity()
                key = f"{dtype} {strategy}, host memory {host or 'none'}"
                found[key] = {"repeats": count, "worst": worst}
                if not worst <= TOLERANCE[dtype]:
                    check.fail(f"races, {key}: {worst:.2g} from full residency after {count} repeats")


def grouped_against_loop(check: Check, found: dict[str, Any], model: Path) -> None:
    """Experts of real size in grouped products, and one by one: how far apart, and milliseconds of a forward."""
    with check.load(model, strategy="full") as engine:
        executor = engine._model.transformer.executor
        found["fallbacks"] = engine.fallbacks
        if executor._grouped is None:
            return
        logits = {}
        for name, grouped in (("grouped", executor._grouped), ("loop", None)):
            executor._grouped = grouped
            logits[name] = engine.logits(PROMPT[:32]).float().cpu()
            found[f"{name}_ms"] = 1000 * bandwidth.median_seconds(lambda: engine.logits(PROMPT[:32]).cpu(), 10)
        found["apart"] = apart(logits["grouped"], logits["loop"])
        if not found["apart"] <= TOLERANCE["bfloat16"]:
            check.fail(f"grouped products are {found['apart']:.2g} from those of each expert")


def make_large(check: Check, found: dict[str, Any], one_layer_s: float) -> Path:
    """LLaDA2.0-mini's shape, with as many layers as time, disk and memory allow."""
    overrides = {"vocab": 32768}
    if check.tiny:
        overrides = {"vocab": 512, "hidden": 64, "experts": 16, "layers": 3}
    else:
        layer_bytes = 256 * 6 * 2**20
        disk = os.statvfs(check.folder)
        room = min(
            int(0.25 * check.left / max(one_layer_s, 1.0)),
            int(0.6 * disk.f_bavail * disk.f_frsize / layer_bytes),
            int(0.35 * find_limits(with_gpus=False).memory.usable_bytes / layer_bytes),
            19,
        )
        if check.device == "cuda":
            room = min(room, int(0.8 * torch.cuda.mem_get_info()[0] / layer_bytes))
        overrides["layers"] = 1 + max(1, room)
    found["layers"], found["of_layers"] = overrides["layers"], 20
    synthesise(check.folder / "mini", "llada2-mini", 1, ShapeOverrides(**overrides), dtype=torch.bfloat16)
    return check.folder / "mini"


def speed(check: Check, found: dict[str, Any], model: Path) -> None:
    """Time per token and hit rate by strategy and budget."""
    profile = check.folder / "mini.npz"
    make_profile(check, model, profile)
    budgets = ["8", "4"] if check.tiny else ["100", "40"]
    rows: list[dict[str, Any]] = []
    found["rows"] = rows
    longest = 5.0
    common = {"host_memory": "100%", "profile": str(profile)}
    tokens: tuple[int, ...] = ()
    for name in ["full", *TIMED]:
        if not check.fits(f"speed of {name}", longest):
            continue
        began = time.perf_counter()
        options: dict[str, Any] = {"strategy": "full"} if name == "full" else {"strategy": name} | common
        if name != "full":
            options["expert_memory"] = budgets[0]
        with check.load(model, **options) as engine:
            for budget in ["full"] if name == "full" else budgets:
                if budget == budgets[-1]:
                    engine.resize_experts(budget)
                limit = 32 if check.tiny else 128
                engine.generate(input_ids=PROMPT, max_tokens=limit // 4, ignore_eos=True)  # kernels, statistics
                result = engine.generate(input_ids=PROMPT, max_tokens=limit, ignore_eos=True)
                used = result.statistics
                tokens = tokens or result.token_ids
                rows.append(
                    {
                        "strategy": name,
                        "expert_memory": budget,
                        "tpot_ms": round(used.tpot_ms, 2),
                        "ms_per_iteration": round(1000 * used.wall_s / max(1, used.num_iterations), 2),
                        "hit_rate": round(used.hit_rate, 4),
                        "hosted": used.hosted,
                        "bytes_per_token": used.bytes_to_device // max(1, used.num_tokens),
                        "same_tokens_as_full": result.token_ids == tokens,
                        "costs": {
                            key: round(value, 3) for key, value in engine._model.experts.costs.scales.items()
                        },
                        "fallbacks": used.fallbacks,
                        "kind": used.kind,
                        "hardware": used.hardware,
                    }
                )
        longest = max(longest, time.perf_counter() - began)


def print_table(report: dict[str, Any]) -> None:
    """What matters, in a few lines."""
    print(f"\n{report['hardware']}, torch {report['torch']}, CUDA {report['cuda']}, kind {report['kind']}")
    rates = report.get("bandwidths", {})
    print("  ".join(f"{name} {value}" for name, value in rates.items() if name not in {"unit", "seconds"}), "GB/s")
    print(
        f"{'strategy':>12} {'experts':>8} {'TPOT ms':>9} {'ms/iter':>9} {'hit':>6} {'MB/token':>9} {'tokens':>7}"
    )
    for row in report.get("speed", {}).get("rows", ()):
        print(
            f"{row['strategy']:>12} {row['expert_memory']:>8} {row['tpot_ms']:>9.1f} "
            f"{row['ms_per_iteration']:>9.1f} {row['hit_rate']:>6.3f} {row['bytes_per_token'] / 1e6:>9.1f} "
            f"{'same' if row['same_tokens_as_full'] else 'other':>7}"
        )
    for kind in ("skipped", "failures"):
        print(f"{kind}: {len(report[kind])}")
        for line in report[kind]:
            print(f"  {line}")


def run(check: Check) -> None:
    """All steps."""
    report = check.report
    report |= environment(check) | {"skipped": [], "failures": []}
    with check.step("bandwidths", 0.1) as found:
        measure_bandwidths(check, found)
    small = {"vocab": 512, "experts": 16 if check.tiny else 64}
    shapes = {
        "llada2": ("llada2-mini", small | {"hidden": 64 if check.tiny else 512, "layers": 3}),
        "sdar": ("sdar-30b", small | {"hidden": 64 if check.tiny else 512, "layers": 2, "block_length": 16}),
    }
    for name, (like, overrides) in shapes.items():
        if not check.fits(name, 20.0):
            continue
        model, profile = check.folder / name, check.folder / f"{name}.npz"
        with check.step(f"make_{name}") as found:
            synthesise(model, like, 0, ShapeOverrides(**overrides), dtype=torch.float32)
            make_profile(check, model, profile)
        for dtype in ("float32", "bfloat16") if name == "llada2" else ("float32",):
            with check.step(f"{name}_{dtype}", 0.15 if dtype == "float32" and name == "llada2" else 0.08) as found:
                compare(check, found, model, profile, dtype)
        if name == "llada2":
            with check.step("races", 0.15) as found:
                races(check, found, model, profile)
    one_layer_s = 1.0
    if not check.tiny and check.fits("one layer of real size", 60.0):
        with check.step("real_layer") as found:
            began = time.perf_counter()
            sizes = ShapeOverrides(vocab=2048, layers=2)
            synthesise(check.folder / "layer", "llada2-mini", 0, sizes, dtype=torch.bfloat16)
            one_layer_s = time.perf_counter() - began
            found["synth_s"] = one_layer_s
            grouped_against_loop(check, found, check.folder / "layer")
    if check.fits("speed", 5.0 if check.tiny else 2.5 * one_layer_s + 30.0):
        with check.step("speed") as found:
            speed(check, found, make_large(check, found, one_layer_s))


def main() -> None:
    """Run, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=os.environ.get("RELUME_GPU_CHECK_DEVICE", "cuda"))
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--seconds", type=float, default=450.0, help="that all may take")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu_check.json")
    parser.add_argument("--folder", type=Path, help="for checkpoints; by default a temporary one")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else options.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: run this on a machine with a GPU, or with --dry-run")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="relume-gpu-check-") as folder:
        check = Check(
            device, options.tiny or options.dry_run or device == "cpu", options.seconds, options.out, Path(folder)
        )
        try:
            run(check)
        except RelumeError as error:
            check.fail(str(error))
        check.report["wall_s"] = round(time.perf_counter() - check.started, 1)
        options.out.write_text(json.dumps(check.report, indent=1) + "\n")
    print_table(check.report)
    print(f"{options.out}: written after {check.report['wall_s']:.0f} s")
    sys.exit(1 if check.report["failures"] else 0)


if __name__ == "__main__":
    main()
