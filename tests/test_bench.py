"""`relume bench` as a user runs it, and what it computes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relume.core import RelumeError
from relume.machine.hardware import load_hardware
from relume.simulate.ablation import SYSTEMS, variants
from relume.simulate.bench import COMPARED, prepare
from relume.simulate.comparisons import compare
from relume.simulate.groups import Group, TraceLabel
from relume.simulate.rows import SimulationRow
from relume.strategy.strategies import STRATEGIES, Strategy
from relume.trace.file import TraceReader
from terminal import run
from traces import SMALL_TRACE, joined, make_record, make_span, small_records, write_trace

BENCH_KEYS = {"trace", "block_length", "requests_per_forward", "link_gb_s", "tpot_over_full"}
SIZES = ["--work", "llada2-mini"]
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an extra"
)


def document(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain(row: dict[str, Any], *others: str) -> dict[str, Any]:
    """A row without what `relume simulate` does not say."""
    return {key: value for key, value in row.items() if key not in BENCH_KEYS | set(others)}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "small.npz"
    assert run("trace", "profile", SMALL_TRACE, path).returncode == 0
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests together, and nothing that takes a token."""
    metadata = TraceReader(SMALL_TRACE).metadata
    metadata = replace(metadata, shape=replace(metadata.shape, num_layers=2, num_experts=8), slots=(8, 8))
    span = make_span(4, committed=np.zeros(4, dtype=bool))
    record = make_record([[[0, 1], [2, 3], [0, 3], [1, 4]]] * 2, [span])
    return write_trace(tmp_path_factory.mktemp("tiny") / "tiny", [joined(record, record)] * 3, metadata)


@needs_matplotlib
def test_strategies_are_those_of_simulate_on_every_machine(profile: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    common = [SMALL_TRACE, "--expert-memory", "40%", "--profile", profile, *SIZES]
    done = run("bench", "strategies", *common, "--plot", plot, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"rows", "comparisons"}
    rows = found["rows"]
    assert [(row["hardware"], row["expert_memory"], row["strategy"]) for row in rows] == [
        (hardware, memory, strategy)
        for hardware in ("rtx4090", "a100-40")
        for memory, strategies in (("100%", ["full"]), ("40%", [*COMPARED, "belady"]))
        for strategy in strategies
    ]
    strategies = ",".join(["full", *COMPARED])
    for hardware in ("rtx4090", "a100-40"):
        expected = document("simulate", *common, "--strategy", strategies, "--hardware", hardware)["rows"]
        assert [plain(row) for row in rows if row["hardware"] == hardware] == expected
    for row in rows:
        assert (row["kind"], row["trace"], row["block_length"]) == ("simulated", str(SMALL_TRACE), 16.0)
        assert row["requests_per_forward"] == 1.0
        assert row["link_gb_s"] == load_hardware(row["hardware"]).si("link.bandwidth") / 1e9
        full = next(other for other in rows if (other["strategy"], other["hardware"]) == ("full", row["hardware"]))
        assert row["tpot_over_full"] == row["tpot_ms"] / full["tpot_ms"]
    assert [comparison["hardware"] for comparison in found["comparisons"]] == ["rtx4090", "a100-40"]
    assert done.stdout.count("simulated: small.trace.parquet, rtx4090") == 2  # the table, and against the paper
    assert "1.23x to 7.93x" in done.stdout and "+23%" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_matrix_in_two_processes_is_the_same(profile: Path) -> None:
    machines = [load_hardware("rtx4090"), load_hardware("a100-40")]
    sizes = Path(SMALL_TRACE), ["lru", "oled"], ["25%", "6"], machines, profile
    matrix = prepare(*sizes, work=work()).matrix
    apart = matrix.run(lambda added, total: None, worth_a_process=1)
    assert apart == matrix.run(lambda added, total: None)
    assert [(row.hardware, row.expert_memory, row.strategy) for row in apart] == [
        (job.hardware and job.hardware.name, job.expert_memory, job.strategy) for job in matrix.jobs
    ]


def work() -> Any:
    from relume.cli.simulate import work_of

    return work_of("llada2-mini")


def test_the_paper_s_comparisons() -> None:
    nothing: dict[str, Any] = {
        "shared": False,
        "hit_rate_all": None,
        "bytes_per_token": 0.0,
        "preload_bytes": 0,
        "hosted": 0.0,
    }
    nothing |= {"evictions": 0, "prefetch_useful": 0, "prefetch_wasted": 0}
    nothing |= {"prefetch_stopped": False, "hit_rate": 0.5}

    def row(strategy: str, slots: int, tpot_ms: float | None, utilisation: float) -> SimulationRow:
        return SimulationRow(
            strategy, str(slots), float(slots), utilisation=utilisation, tpot_ms=tpot_ms, **nothing
        )

    rows = [
        row("full", 256, 10.0, 0.3),
        row("finemoe", 40, 50.0, 0.2),
        row("oled", 40, 20.0, 0.8),
        row("foresight", 40, 15.0, 0.9),
        row("finemoe", 100, None, 0.25),
        row("oled", 100, 12.0, 0.5),
        row("foresight", 100, 12.6, 0.5),
    ]
    label = TraceLabel(Path("some.trace"), 256, 32.0, 1.0)
    found = compare(Group(label, load_hardware("rtx4090"), tuple(rows)))
    assert found is not None
    assert found.tpot_gain == {"finemoe": {"40": 2.5, "100": None}}
    assert found.utilisation_gain == {"finemoe": {"40": 4.0, "100": 2.0}}
    assert (found.nearest_budget, found.nearest_share) == ("100", 100 / 256)
    assert found.excess == pytest.approx(0.2)
    assert found.slower == {"100": pytest.approx(1.05)}
    assert compare(Group(label, load_hardware("rtx4090"), tuple(rows[:2]))) is None


def test_ablation_takes_every_choice_of_components(profile: Path) -> None:
    common = [SMALL_TRACE, "--hardware", "rtx4090", "--expert-memory", "40%", "--profile", profile, *SIZES]
    rows = document("bench", "ablation", *common)["rows"]
    systems = [(row["system"], row["components"], row["strategy"]) for row in rows]
    assert systems == [(v.system, list(v.components), v.strategy) for name in SYSTEMS for v in variants(name)]
    assert [len(row["components"]) for row in rows] == [0, 1, 1, 1, 2, 2, 2, 3] * 2
    names = ["lru", "oled", "foresight", "lru:budget=activation", "foresight:prefetch=none"]
    expected = document("simulate", *common, "--strategy", ",".join(names))["rows"]
    for name, other in zip(names, expected, strict=False):
        found = [row for row in rows if row["strategy"] == name]
        assert found and all(plain(row, "system", "components", "gain") == other for row in found)
        assert found[0]["gain"] == expected[0]["tpot_ms"] / other["tpot_ms"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_variants_mix_a_system_s_parts_with_the_baseline_s(system: str) -> None:
    mine = STRATEGIES[system]
    for variant in variants(system):
        made = Strategy.parse(variant.strategy)
        for seam in ("retention", "prefetch", "dispatch", "budget"):
            owner = mine if seam in variant.components else STRATEGIES["lru"]
            assert getattr(made, seam) == getattr(owner, seam)
    assert (variants(system)[0].strategy, variants(system)[-1].strategy) == ("lru", system)


def test_the_profile_s_own_bandwidth_is_the_plain_row(profile: Path) -> None:
    common = [SMALL_TRACE, "--expert-memory", "40%", "--profile", profile, *SIZES]
    own = load_hardware("rtx4090").si("link.bandwidth") / 1e9
    varied = document("bench", "sensitivity", *common, "--vary", "link", "--link", f"{own},{4 * own}")
    budget = document("bench", "sensitivity", *common)
    assert (varied["varied"], budget["varied"]) == ("link", "budget")
    assert len(varied["rows"]) == 2 * len(budget["rows"])
    same = [row for row in varied["rows"] if row["link_gb_s"] == own]
    assert {row["hardware"] for row in same} == {f"rtx4090:link.bandwidth={own:g}"}
    assert [plain(row, "hardware") for row in same] == [plain(row, "hardware") for row in budget["rows"]]
    times = {(row["strategy"], row["link_gb_s"]): row["tpot_ms"] for row in varied["rows"]}
    assert times["lru", 4 * own] < times["lru", own]
    assert times["full", 4 * own] == times["full", own]


def test_traces_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    records = small_records()
    metadata = TraceReader(SMALL_TRACE).metadata
    pairs = [joined(record, record) for record in records]
    together = write_trace(tmp_path / "together", pairs, metadata)
    arguments = ["bench", "sensitivity", SMALL_TRACE, together, "--vary", "trace", "--strategy", "lru", *SIZES]
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["trace"], row["requests_per_forward"], row["strategy"]) for row in rows] == [
        (str(path), requests, strategy)
        for path, requests in ((SMALL_TRACE, 1.0), (together, 2.0))
        for strategy in ("full", "lru", "belady")
    ]
    assert "together, block 16, 2.00 requests a forward" in done.stdout
    single = {row["strategy"]: row for row in rows[:3]}
    double = {row["strategy"]: row for row in rows[3:]}
    # The same experts for twice the tokens: what moves is shared.
    assert double["lru"]["hit_rate"] == single["lru"]["hit_rate"]
    assert double["lru"]["bytes_per_token"] == single["lru"]["bytes_per_token"] / 2


def test_skipped_requests_leave_others_of_the_same_model(tmp_path: Path) -> None:
    size = ["--blocks", 1, "--prompt-tokens", 8]
    for name, *arguments in (("all", "--requests", 2), ("rest", "--skip", 1, "--requests", 1)):
        done = run("trace", "synth", tmp_path / name, *arguments, *size)
        assert (done.returncode, done.stderr) == (0, "")
    everything, rest = (list(TraceReader(tmp_path / name)) for name in ("all", "rest"))
    assert 0 < len(rest) < len(everything)
    for left, right in zip(everything[-len(rest) :], rest, strict=True):
        assert (left.expert_ids == right.expert_ids).all() and left.spans[0].request == right.spans[0].request


def test_a_profile_of_another_model_is_told_of(profile: Path, tmp_path: Path) -> None:
    other = replace(TraceReader(SMALL_TRACE).metadata, model="calibrated:7")
    path = write_trace(tmp_path / "other", small_records(), other)
    done = run("bench", "sensitivity", path, "--strategy", "lru", "--profile", profile, *SIZES)
    assert done.returncode == 0
    assert done.stderr == f"relume: {profile}: the profile is of calibrated, {path} a trace of calibrated:7\n"


@needs_matplotlib
def test_a_trace_without_tokens_has_no_times(tiny: Path, tmp_path: Path) -> None:
    arguments = ["bench", "strategies", tiny, "--expert-memory", "50%", "--strategy", "lru,oled,foresight"]
    done = run(*arguments, "--hardware", "rtx4090", "--plot", tmp_path / "p.png", "--json", *SIZES)
    assert done.returncode == 0, done.stderr
    assert "lru" not in done.stderr and "oled, foresight begin without a profile" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["tpot_over_full"] for row in found["rows"]] == [None] * 5
    assert found["rows"][0]["requests_per_forward"] == 2.0
    assert found["comparisons"][0]["excess"] is None
    assert (tmp_path / "p.png").exists()


def test_a_machine_with_another_constant() -> None:
    machine = load_hardware("rtx4090")
    changed = machine.with_constant("link.bandwidth", 12.0, "GB/s", "assumed: a test")  # type: ignore[attr-defined]
    assert changed.name == "rtx4090:link.bandwidth=12"
    assert changed.transfer_s(12e9) == pytest.approx(1.0, rel=1e-5)
    assert machine.transfer_s(12e9) < 0.6
    for key, value, message in (("link.speed", 1.0, "unknown key"), ("link.bandwidth", 0.0, "must be positive")):
        with pytest.raises(RelumeError, match=message):
            machine.with_constant(key, value, "GB/s", "assumed: a test")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["strategies", "SMALL", "--strategy", "lru", *SIZES],
            "expert memory 40, 100: a layer has only 24 experts",
        ),
        (["strategies", "SMALL", "--expert-memory", "40%", *SIZES], "fiddler, fiddler-max: these need to know"),
        (["strategies", "SMALL", "--expert-memory", "40%", "--strategy", "lru"], "name a shape with --work"),
        (["strategies", "SMALL", "--expert-memory", "1%", "--strategy", "lru", *SIZES], "holds 0 experts"),
        (["strategies", "SMALL", "--profile", "/nowhere/p", "--expert-memory", "40%", *SIZES], "no such profile"),
        (["ablation", "/nowhere/trace"], "no such trace"),
        (["sensitivity", "SMALL", "--vary", "link", "--link", "0", *SIZES], "must be positive"),
    ],
)
def test_failures_print_one_line_and_exit_1(arguments: list[str], message: str) -> None:
    done = run("bench", *[SMALL_TRACE if part == "SMALL" else part for part in arguments])
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, ""), done.stderr
    assert done.stderr.startswith("relume: ") and message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategies", "SMALL", "--hardware", "abacus"], "unknown hardware profile 'abacus'"),
        (["strategies", "SMALL", "--strategy", "magic"], "unknown strategy 'magic'"),
        (["strategies", "SMALL", "--work", "llama"], "llama"),
        (["ablation", "SMALL", "--expert-memory", "lots"], "is no amount"),
        (["strategies", "SMALL", "--profile", "a,b"], "2 profiles for 1 traces"),
        (["sensitivity", "SMALL", "--link", "8"], "--link is for --vary link"),
        (["sensitivity", "SMALL", "--vary", "link", "--link", "fast"], "write numbers of GB/s"),
        (["sensitivity", "SMALL", "--vary", "weather"], "weather"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], message: str) -> None:
    done = run("bench", *[SMALL_TRACE if part == "SMALL" else part for part in arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error" in done.stderr and "Traceback" not in done.stderr
    assert message in " ".join(done.stderr.split())


def test_without_matplotlib_a_plot_is_refused_before_the_work(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from relume.cli import main; main()"
    arguments = ["bench", "strategies", str(SMALL_TRACE), "--plot", str(tmp_path / "p.png")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "relume: drawing needs matplotlib: pip install 'relume[figures]'\n"


@needs_matplotlib
@pytest.mark.parametrize(("name", "message"), [("p.svg", "written as .png"), ("no/p.png", "there is no folder")])
def test_a_plot_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str, message: str) -> None:
    done = run("bench", "strategies", SMALL_TRACE, "--plot", tmp_path / name)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert message in done.stderr


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = (
        "import sys; import relume.cli.bench_tables, relume.figures.budgets; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
