"""Measured figures of a computer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        value: in `unit`; `None` if it could not be measured.
        measured_at: ISO date.
        reason: why there is no value.
    """

    value: float | None
    unit: str
    measured_at: str
    reason: str | None = None


@dataclass(frozen=True)
class KernelTimes:
    """Milliseconds of one expert of `[hidden, expert_size]`, its weights coming from RAM.

    Attributes:
        call: of an expert with next to no weights: what each call costs anyway.
        times: by dtype and number of tokens.
    """

    hidden: int
    expert_size: int
    call: Measurement
    times: Mapping[str, Mapping[int, Measurement]]

    def estimate_ms(self, dtype: str, num_tokens: float, parameters: int) -> float | None:
        """Milliseconds of `parameters` weights over `num_tokens` tokens; `None` if `dtype` was not measured.

        Linear between the measured token counts and beyond them; what exceeds the call scales with the weights.
        """
        points = [
            (tokens, time.value) for tokens, time in self.times.get(dtype, {}).items() if time.value is not None
        ]
        if len(points) < 2:
            return None
        points.sort()
        (t0, ms0), (t1, ms1) = next(
            (pair for pair in pairwise(points) if num_tokens <= pair[1][0]), (points[-2], points[-1])
        )
        found = ms0 + max(0.0, ms1 - ms0) * (max(num_tokens, t0) - t0) / (t1 - t0)
        call = min(self.call.value or 0.0, found)
        return call + (found - call) * parameters / (3 * self.hidden * self.expert_size)


@dataclass(frozen=True)
class MachineProfile:
    """What was measured on one computer.

    Attributes:
        identity: of the computer.
        folder: whose disk was read.
        read_bytes: of one read, an expert's size.
        memory_read, host_to_device: GB/s.
        disk_direct, disk_buffered: MB/s around and through the page cache.
        compute_threads: with which experts are computed fastest.
        expert_kernel: of the CPU.
    """

    identity: str
    folder: str
    read_bytes: int
    memory_read: Measurement
    disk_direct: Measurement
    disk_buffered: Measurement
    host_to_device: Measurement
    compute_threads: Measurement
    expert_kernel: KernelTimes

    def disk_read(self, direct: bool) -> Measurement:
        """Reading experts from disk; through the page cache also where there is no way around it."""
        return self.disk_direct if direct and self.disk_direct.value is not None else self.disk_buffered

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`. Raises `KeyError`, `TypeError`, `ValueError` for anything else."""
        parts = dict(values)
        kernel = dict(parts.pop("expert_kernel"))
        times = {
            str(dtype): {int(tokens): _measurement(time) for tokens, time in row.items()}
            for dtype, row in dict(kernel.pop("times")).items()
        }
        call = _measurement(kernel.pop("call"))
        for name in ("memory_read", "disk_direct", "disk_buffered", "host_to_device", "compute_threads"):
            parts[name] = _measurement(parts[name])
        return cls(**parts, expert_kernel=KernelTimes(**kernel, call=call, times=times))


def _measurement(values: Mapping[str, Any]) -> Measurement:
    found = Measurement(**values)
    if found.value is not None and not float(found.value) > 0:
        raise ValueError(f"{found.value} {found.unit} is no measurement")
    return found
