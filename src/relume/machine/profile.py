"""Measures this computer, and keeps the figures in a file in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from relume.core import Progress
from relume.machine import bandwidth
from relume.machine.cgroup import read_fields, read_text
from relume.machine.figures import KernelTimes, MachineProfile, Measurement
from relume.machine.threads import effective_cores

#: Of the file; another one is measured again.
VERSION = 2
#: Tokens and types for which an expert is timed.
KERNEL_TOKENS = (1, 2, 4, 8, 16, 32)
KERNEL_DTYPES = ("float32", "bfloat16")

_KERNEL_REPEATS = 50
_TINY = 16  # hidden and expert size of an expert that costs a call and nothing else

#: Gives for (hidden, expert size, tokens, dtype) what computes such an expert once, its weights coming from RAM.
ExpertKernel = Callable[[int, int, int, str], Callable[[], object]]


def measure_profile(
    kernel: ExpertKernel,
    layer_seconds: Callable[[int], float],
    folder: Path,
    hidden: int,
    expert_size: int,
    num_readers: int,
    progress: Progress,
) -> MachineProfile:
    """Measure everything; takes some ten seconds.

    Args:
        kernel: makes the computations to time.
        layer_seconds: of a layer's experts with a number of threads.
        folder: whose disk is read, through a scratch file that is gone afterwards.
        hidden, expert_size: of the expert that is timed, and read from disk in bfloat16.
        num_readers: threads that read experts.
        progress: called with (figures since the last call, figures in all).
    """
    total = 6 + len(KERNEL_TOKENS) * len(KERNEL_DTYPES)

    def measure(run: Callable[[], float], unit: str) -> Measurement:
        try:
            found = Measurement(float(f"{run():.4g}"), unit, today())
        except bandwidth.NotMeasuredError as error:
            found = Measurement(None, unit, today(), str(error))
        progress(1, total)
        return found

    def milliseconds(hidden: int, expert_size: int, tokens: int, dtype: str) -> Measurement:
        return measure(
            lambda: 1000 * bandwidth.median_seconds(kernel(hidden, expert_size, tokens, dtype), _KERNEL_REPEATS),
            "ms",
        )

    def disk(direct: bool) -> Measurement:
        def run() -> float:
            with bandwidth.scratch_file(folder, read_bytes) as path:
                return bandwidth.disk_read(path, read_bytes, direct, num_readers)

        return measure(run, "MB/s")

    read_bytes = 2 * 3 * hidden * expert_size
    return MachineProfile(
        identity=machine_identity(),
        folder=str(folder.resolve()),
        read_bytes=read_bytes,
        memory_read=measure(bandwidth.memory_read, "GB/s"),
        disk_direct=disk(direct=True),
        disk_buffered=disk(direct=False),
        host_to_device=measure(bandwidth.host_to_device, "GB/s"),
        compute_threads=measure(lambda: best_num_threads(layer_seconds, effective_cores()), "threads"),
        expert_kernel=KernelTimes(
            hidden=hidden,
            expert_size=expert_size,
            call=milliseconds(_TINY, _TINY, 1, "float32"),
            times={
                dtype: {tokens: milliseconds(hidden, expert_size, tokens, dtype) for tokens in KERNEL_TOKENS}
                for dtype in KERNEL_DTYPES
            },
        ),
    )


def best_num_threads(layer_seconds: Callable[[int], float], cores: int) -> int:
    """The number of threads up to `cores`, all or a power of two, that is fastest; a few percent win for fewer."""
    candidates = sorted({cores, *(1 << power for power in range(cores.bit_length()) if 1 << power <= cores)})
    seconds = {number: layer_seconds(number) for number in candidates}
    return next(number for number in candidates if seconds[number] <= 1.05 * min(seconds.values()))


def today() -> str:
    """ISO date, of the moment."""
    return datetime.now(UTC).date().isoformat()


def machine_identity(root: Path = Path("/")) -> str:
    """Processor, cores and RAM: a home folder that moves to another computer takes no figures along."""
    names = [
        line.partition(":")[2].strip()
        for line in read_text(root / "proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    ram = read_fields(root / "proc/meminfo").get("MemTotal", 0)
    return f"{name}, {effective_cores()} cores, {ram / 2**30:.0f} GiB"


def cache_file() -> Path:
    """Where figures are kept. Raises `OSError` if there is no home folder."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"  # noqa: PTH117
    except RuntimeError:
        raise OSError(0, "there is no home folder") from None
    return base / "relume" / "machine.json"


def load_profile() -> MachineProfile | None:
    """What was measured on this computer, without measuring; `None` if nothing readable is there."""
    return read_profile()[0]


def read_profile() -> tuple[MachineProfile | None, str | None]:
    """The kept figures of this computer; and a note if the file is there but of no use."""
    path = None
    try:
        path = cache_file()
        kept = _read(path).get(machine_identity())
        return (None if kept is None else MachineProfile.from_json(kept)), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path or 'cache folder'}: cannot be read ({error.strerror})"
    except (AttributeError, KeyError, TypeError, ValueError):
        return None, f"{path}: is damaged or of another version; measuring again"


def save_profile(profile: MachineProfile) -> str | None:
    """Keep the figures beside those of other computers; a note if that is not possible."""
    path = None
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            machines = _read(path)
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            machines = {}
        content = json.dumps({"version": VERSION, "machines": machines | {profile.identity: asdict(profile)}})
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_text(content)
            made.replace(path)  # whole or not at all
    except OSError as error:
        return f"{path or 'cache folder'}: cannot be written ({error.strerror}); the figures are not kept"
    return None


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if document.get("version") != VERSION or not isinstance(document["machines"], dict):
        raise ValueError("another version")
    return document["machines"]
