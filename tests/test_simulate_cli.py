"""`relume trace` and `relume simulate` as a user runs them."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relume.trace.calibrated import TARGETS
from relume.trace.file import TraceReader
from terminal import RELUME, Terminal, run
from traces import SMALL_TRACE, played, small_records, write_trace

ROW_KEYS = {
    "decoding_ms",
    "iteration_ms",
    "strategy",
    "expert_memory",
    "slots_per_layer",
    "shared",
    "hit_rate",
    "hit_rate_all",
    "utilisation",
    "bytes_per_token",
    "preload_bytes",
    "hosted",
    "evictions",
    "prefetch_useful",
    "prefetch_wasted",
    "prefetch_stopped",
    "tpot_ms",
    "seconds",
    "hardware",
    "kind",
}


def test_simulate_prints_a_table_and_json() -> None:
    done = run("simulate", SMALL_TRACE, "--strategy", "lru,counts", "--expert-memory", "25%, 9", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document) == {"trace", "rows"}
    rows = document["rows"]
    assert [(row["strategy"], row["expert_memory"]) for row in rows] == [
        (strategy, memory) for memory, strategy in itertools.product(("25%", "9"), ("lru", "counts", "belady"))
    ]
    assert all(set(row) == ROW_KEYS and row["kind"] == "simulated" and row["tpot_ms"] is None for row in rows)
    assert [row["slots_per_layer"] for row in rows] == [6.0] * 3 + [9.0] * 3
    assert rows[1]["hit_rate"] < rows[2]["hit_rate"] < rows[5]["hit_rate"] < 1
    assert "simulated" in done.stdout and "belady" in done.stdout


def simulated_rows(*arguments: object) -> list[dict[str, Any]]:
    done = run("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return rows


def test_slots_of_each_layer_are_a_budget() -> None:
    rows = simulated_rows(SMALL_TRACE, "--strategy", "lru", "--layer-slots", "3,9,9,3")
    assert [(row["strategy"], row["expert_memory"], row["slots_per_layer"]) for row in rows] == [
        ("lru", "3,9,9,3", 6.0),
        ("belady", "3,9,9,3", 6.0),
    ]
    reader = TraceReader(SMALL_TRACE)
    result = played(reader, "lru", reader.metadata.shape, [3, 9, 9, 3])
    assert rows[0]["hit_rate"] == result.hit_rate


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_recorded_is_replayed_by_default(tmp_path: Path, shared: bool) -> None:
    metadata = TraceReader(SMALL_TRACE).metadata
    slots = (26,) if shared else (3, 9, 9, 3)
    metadata = replace(metadata, strategy="lfru", slots=slots, shared=shared)
    path = write_trace(tmp_path / "t", small_records(), metadata)
    rows = simulated_rows(path)
    mean = 6.5 if shared else 6.0
    assert [(row["strategy"], row["expert_memory"], row["slots_per_layer"], row["shared"]) for row in rows] == [
        ("lfru", "recorded", mean, shared),
        ("belady", "recorded", mean, shared),
    ]
    budget = [7, 7, 6, 6] if shared else [3, 9, 9, 3]
    assert rows[0]["hit_rate"] == played(small_records(), "lfru", metadata.shape, budget, shared).hit_rate


def test_one_of_strategy_and_budget_leaves_the_other_to_a_range() -> None:
    rows = simulated_rows(SMALL_TRACE, "--strategy", "lru")
    assert [row["expert_memory"] for row in rows[::2]] == ["10%", "20%", "40%", "60%"]
    rows = simulated_rows(SMALL_TRACE, "--expert-memory", "9")
    assert [row["strategy"] for row in rows] == ["lru", "counts", "oled", "foresight", "belady"]


def test_a_profile_makes_static_possible(tmp_path: Path) -> None:
    made = run("trace", "profile", SMALL_TRACE, tmp_path / "p.npz", "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout.splitlines()[-1])
    assert len(document["mean_active"]) == 4
    assert document["model"] == TraceReader(SMALL_TRACE).metadata.model
    arguments = ["simulate", SMALL_TRACE, "--strategy", "static", "--expert-memory", "9"]
    assert run(*arguments, "--profile", tmp_path / "p.npz").returncode == 0
    refused = run(*arguments)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "relume trace profile" in refused.stderr


def test_a_shared_pool_below_a_pass_is_warned_of() -> None:
    done = run("simulate", SMALL_TRACE, "--shared-pool", "--strategy", "lru", "--expert-memory", "4", "--json")
    assert done.returncode == 0
    assert "one pass uses (36 slots)" in done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows[0]["hit_rate"] == 0.0 < rows[1]["hit_rate"]


def test_trace_info(tmp_path: Path) -> None:
    done = run("trace", "info", SMALL_TRACE, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["forwards"] == {"prefill": 2, "denoise": 59, "commit": 9}
    assert (document["kind"], document["experts_per_layer"], len(document["active_by_layer"])) == (
        "simulated",
        24,
        4,
    )
    assert "tokens per iteration" in done.stdout


def test_trace_info_without_a_denoising_forward(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "empty", [], TraceReader(SMALL_TRACE).metadata)
    done = run("trace", "info", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout.splitlines()[-1])
    assert (document["active_by_layer"], document["hit_rate"]) == ([], None)
    assert "0 denoise" in done.stdout and "by layer" not in done.stdout


def test_trace_synth_shows_its_figures_next_to_the_published(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    done = run("trace", "synth", out, "--requests", 1, "--blocks", 1, "--prompt-tokens", 8, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document["targets"]) == set(TARGETS)
    for name in TARGETS:
        assert name.replace("_", " ") in done.stdout
    assert TraceReader(out).num_forwards == document["forwards"]["denoise"] > 5
    again = run("trace", "synth", tmp_path / "u.parquet", "--requests", 1, "--blocks", 1, "--prompt-tokens", 8)
    assert again.returncode == 0
    assert out.read_bytes() == (tmp_path / "u.parquet").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "/nowhere/trace"], "no such trace"),
        (["simulate", "SMALL", "--strategy", "static"], "relume trace profile"),
        (["simulate", "SMALL", "--expert-memory", "2%"], "holds 1 experts"),
        (["simulate", "SMALL", "--expert-memory", "9", "--layer-slots", "9,9,9,9"], "not both"),
        (["simulate", "SMALL", "--shared-pool", "--layer-slots", "9,9,9,9"], "no slots of one layer"),
        (["simulate", "SMALL", "--layer-slots", "9,9,9"], "3 numbers of slots for 4 MoE layers"),
        (["simulate", "SMALL", "--profile", "/nowhere/profile"], "no such profile"),
        (["trace", "info", "/etc/passwd"], "truncated or damaged"),
        (["trace", "synth", "/nowhere/trace"], "cannot be written (No such file or directory)"),
    ],
)
def test_failures_print_one_line_and_exit_1(arguments: list[str], message: str) -> None:
    done = run(*[SMALL_TRACE if part == "SMALL" else part for part in arguments])
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert done.stderr.startswith("relume: ")
    assert message in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "SMALL", "--strategy", "magic"],
        ["simulate", "SMALL", "--expert-memory", "lots"],
        ["trace", "nonsense"],
        ["trace", "synth", "x", "--blocks", "0"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = run(*[SMALL_TRACE if part == "SMALL" else part for part in arguments])
    assert done.returncode == 2, done.stderr
    assert "Error" in done.stderr and "Traceback" not in done.stderr


def test_progress_on_a_terminal_and_an_interrupt(tmp_path: Path) -> None:
    """Long enough for a second process, which must go down too."""
    metadata = TraceReader(SMALL_TRACE).metadata
    path = write_trace(tmp_path / "long", itertools.islice(itertools.cycle(small_records()), 15_000), metadata)
    sweep = ["--strategy", "lru,lfu,lfru,counts"]  # times four budgets
    terminal = Terminal("simulate", path, *sweep, size=(40, 100))
    terminal.read_until("replaying")
    terminal.read_until("/300000")
    time.sleep(0.5)
    terminal.write("\x03")
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.output
    quiet = subprocess.Popen(
        [RELUME, "simulate", path, *sweep], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(2.0)
    quiet.send_signal(signal.SIGINT)
    _, errors = quiet.communicate(timeout=30)
    assert (quiet.returncode, errors) == (130, "")
