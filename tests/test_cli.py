"""The command line as a user runs it: real processes, exit codes, terminals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoints import LLADA2, make_tensors, write_checkpoint
from relume import Engine
from terminal import RELUME, Terminal, run

SHORT = ["--block-length", "8", "--max-tokens", "12", "--temperature", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "model"
    return write_checkpoint(folder, LLADA2, make_tensors(LLADA2, 1), tokenizer=True)


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    write_checkpoint(folder, LLADA2, make_tensors(LLADA2, 1), tokenizer=True)
    message = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    template = message + "{% if add_generation_prompt %}Z{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_prompt_as_argument_file_and_standard_input_give_the_api_s_answer(model: Path, tmp_path: Path) -> None:
    expected = Engine.load(model).generate("HELLO", block_length=8, max_tokens=12, temperature=1.0)
    (tmp_path / "prompt.txt").write_text("HELLO")
    for arguments, stdin in (
        (["HELLO"], None),
        (["--file", tmp_path / "prompt.txt"], None),
        (["-"], "HELLO"),
    ):
        done = run("generate", model, *arguments, *SHORT, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{expected.text}\n"
        assert done.stderr == ""


def test_json_is_the_last_line(model: Path) -> None:
    done = run("generate", model, "HELLO", "--json", *SHORT)
    document = json.loads(done.stdout.splitlines()[-1])
    assert set(document) == {"text", "token_ids", "finish_reason", "statistics"}
    assert document["statistics"]["num_tokens"] == len(document["token_ids"]) > 0
    assert document["statistics"]["kind"] == "measured"


def test_the_chat_template_is_used_unless_raw(chat_model: Path) -> None:
    engine = Engine.load(chat_model)
    options: dict[str, Any] = {"block_length": 8, "max_tokens": 12, "temperature": 1.0}
    cases = {
        ("HI",): engine.generate("uHIZ", **options),
        ("HI", "--raw"): engine.generate("HI", **options),
        ("HI", "--system", "S"): engine.generate("sSuHIZ", **options),
    }
    for arguments, expected in cases.items():
        assert run("generate", chat_model, *arguments, *SHORT).stdout == f"{expected.text}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "MODEL", "HI", "--no-such-option"],
        ["generate", "MODEL", "HI", "--temperature", "-1"],
        ["generate", "MODEL", "HI", "--max-tokens", "many"],
        ["generate", "MODEL", "HI", "--decoder", "magic"],
        ["generate", "MODEL", "HI", "--dtype", "int3"],
        ["generate", "MODEL", "HI", "--mode", "fast"],
        ["generate", "MODEL", "HI", "--device", "warp"],
        ["generate", "MODEL", "HI", "--prefill-blocks", "0"],
        ["generate", "MODEL", "HI", "--seed", "99999999999999999999"],
        ["generate", "MODEL", "HI", "--temperature", "inf"],
        ["generate", "MODEL", "HI", "--file", "x"],
        ["generate", "MODEL", "HI", "--raw", "--system", "x"],
        ["synth", "x", "--like", "gpt7"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_2(model: Path, arguments: list[str]) -> None:
    done = run(*[str(model) if part == "MODEL" else part for part in arguments])
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nowhere/at/all", "HI"], "no such folder"),
        (["generate", "MODEL", "--file", "/nowhere/prompt"], "cannot be read"),
        (["generate", "MODEL", "--file", "/"], "cannot be read"),
        (["generate", "MODEL", ""], "the prompt is empty"),
        (["generate", "MODEL", "HI", "--revision", "main"], "leave --revision out"),
        (["chat", "MODEL"], "no chat template"),
    ],
)
def test_failures_print_one_line_and_exit_1(model: Path, arguments: list[str], message: str) -> None:
    done = run(*[str(model) if part == "MODEL" else part for part in arguments])
    assert done.returncode == 1
    assert done.stderr.startswith("relume: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_a_missing_shard_fails_generate_and_shows_in_inspect(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLADA2, make_tensors(LLADA2), num_shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    done = run("generate", folder, "HI")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "model-00001-of-00002.safetensors" in done.stderr
    assert json.loads(run("inspect", folder, "--json").stdout)["weights_complete"] is False


def test_text_that_is_no_utf8(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"AB\xff")
    for arguments, stdin in ((["--file", str(tmp_path / "prompt")], b""), ([], b"AB\xff"), ([b"AB\xff"], b"")):
        done = subprocess.run(
            [RELUME, "generate", model, *arguments], input=stdin, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
        assert b"UTF-8" in done.stderr


def test_a_full_disk_under_the_output(model: Path) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [RELUME, "inspect", model, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "relume: the output cannot be written (No space left on device)\n"


def test_version() -> None:
    assert run("--version").stdout == "relume 0.1.0\n"


def test_inspect(model: Path) -> None:
    document = json.loads(run("inspect", model, "--json").stdout)
    assert document["family"] == "llada2"
    assert document["bytes_per_expert"] == 3 * 32 * 24 * 4
    assert sum(document["bytes"].values()) == document["bytes_to_load"]
    assert document["weights_complete"] is True
    assert "bytes per expert" in run("inspect", model).stdout


def test_a_reader_that_leaves_is_no_error(model: Path) -> None:
    done = subprocess.run(
        f"{RELUME} generate {model} HELLO {' '.join(SHORT)} | true",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_loading_shows_bytes_rate_and_time_left(model: Path) -> None:
    terminal = Terminal("generate", model, "HELLO", *SHORT)
    assert terminal.wait() == 0
    assert "loading" in terminal.output and "KiB" in terminal.output
    assert "B/s" in terminal.output and re.search(r"\d:\d\d:\d\d", terminal.output)


def test_live_shows_the_canvas_and_leaves_the_terminal_clean(model: Path) -> None:
    terminal = Terminal("generate", model, "HELLO", "--live", *SHORT)
    assert terminal.wait() == 0
    assert "░" in terminal.output
    assert "block 0, iteration 1" in terminal.output
    assert terminal.output.rfind("\x1b[?25h") > terminal.output.rfind("\x1b[?25l"), (
        "the cursor must be shown again"
    )
    expected = Engine.load(model).generate("HELLO", block_length=8, max_tokens=12, temperature=1.0)
    assert terminal.output.rstrip().endswith(expected.text or "")


def test_live_without_a_terminal_leaves_every_picture(model: Path) -> None:
    done = run("generate", model, "HELLO", "--live", *SHORT)
    assert done.returncode == 0
    assert "░" in done.stderr and "block 0, iteration 1\n" in done.stderr
    assert done.stderr.count("iteration") == len(re.findall(r"^ block \d+, iteration \d+$", done.stderr, re.M)) > 2


def test_ctrl_c_leaves_the_terminal_clean(model: Path) -> None:
    terminal = Terminal(
        "generate", model, "HELLO", "--live", "--max-tokens", "500", "--ignore-eos", "--threshold", "1"
    )
    terminal.read_until("iteration 3")
    terminal.write("\x03")
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.output
    assert terminal.output.rfind("\x1b[?25h") > terminal.output.rfind("\x1b[?25l")


def test_sigint_without_a_terminal_exits_130(model: Path) -> None:
    process = subprocess.Popen(
        [RELUME, "generate", model, "HELLO", "--max-tokens", "500", "--ignore-eos", "--threshold", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_an_interrupt_while_modules_are_imported_exits_130() -> None:
    code = (
        "import sys, importlib.abc\n"
        "class Interrupt(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'relume.cli.generate': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from relume.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_live_keeps_to_the_screen(model: Path) -> None:
    """Whatever scrolls off a terminal stays there: the picture must never be taller than the screen."""
    terminal = Terminal("generate", model, "HELLO", "--live", "--max-tokens", "200", "--ignore-eos", size=(8, 30))
    assert terminal.wait() == 0
    for frame in terminal.output.split("\x1b[2K")[1:]:
        assert frame.count("\n") < 9 or "iteration" not in frame
    assert "iteration" in terminal.output


def test_chat_remembers_clears_and_ends(chat_model: Path) -> None:
    engine = Engine.load(chat_model)

    def answer(text: str) -> str:
        return engine.generate(text, block_length=8, max_tokens=12, temperature=1.0).text or ""

    first = answer("uHIZ")
    second = answer(f"uHIa{first}uMEZ")
    again = answer("uHIZ")
    terminal = Terminal("chat", chat_model, *SHORT)
    for line, expected in (("HI", first), ("ME", second), ("/clear", "> "), ("HI", again)):
        terminal.read_until("> ")
        terminal.output = ""
        terminal.write(f"{line}\n")
        terminal.read_until(expected)
    terminal.write("/exit\n")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output


def test_synth_makes_a_model_that_generates(tmp_path: Path) -> None:
    out = tmp_path / "made"
    sizes = [
        "--layers",
        "3",
        "--hidden",
        "64",
        "--experts",
        "32",
        "--top-k",
        "4",
        "--vocab",
        "600",
        "--groups",
        "4",
    ]
    done = run("synth", out, "--like", "llada2-mini", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kind"] == "measured"
    assert report["num_experts"] == 64
    for name in report["targets"]:
        assert name.replace("_", " ") in done.stdout
    answer = run("generate", out, "Hello", "--max-tokens", "20", "--json")
    assert json.loads(answer.stdout.splitlines()[-1])["statistics"]["num_tokens"] == 20
    again = run("synth", out, "--like", "llada2-mini", *sizes)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert str(out) in again.stderr


def test_synth_sizes_that_make_no_model(tmp_path: Path) -> None:
    done = run("synth", tmp_path / "x", "--like", "llada2-mini", "--experts", "30", "--layers", "2")
    assert done.returncode == 1
    assert "n_group" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run("synth", tmp_path / "x", "--like", "llada2-mini", "--experts", "0").returncode == 2
