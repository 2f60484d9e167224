"""Machines to charge time on: named profiles, a user's own, and this computer as it was measured."""

from __future__ import annotations

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np

from relume.config import require
from relume.core import Registry, RelumeError
from relume.machine.figures import KernelTimes, MachineProfile
from relume.machine.profile import load_profile

#: Of a host's RAM, for experts; the rest is for everything else that runs there.
HOST_SHARE = 0.8
#: What this computer is called, as it was measured.
THIS = "this"
#: Files of the shipped profiles by name; `load_hardware` reads one.
HARDWARE: Registry[Path] = Registry(
    "hardware profile", {path.stem: path for path in sorted((Path(__file__).parent / "profiles").glob("*.toml"))}
)

_BYTES = {"GB": 1e9, "GiB": 2.0**30}
_BYTES_A_SECOND = {"GB/s": 1e9, "MB/s": 1e6}
_OPERATIONS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3}
_SHARE, _LAUNCHES = {"share": 1.0}, {"launches": 1.0}
#: Constants of a profile, all of which its file must give, and what each unit is in bytes, seconds and operations.
_UNITS: Mapping[str, Mapping[str, float]] = {
    "device.memory": _BYTES,
    "device.bandwidth": _BYTES_A_SECOND,  # of the data sheet, of which `bandwidth_share` is attained
    "device.bandwidth_share": _SHARE,
    "device.bfloat16": _OPERATIONS,  # dense, of the data sheet, of which `compute_share` is attained
    "device.float32": _OPERATIONS,
    "device.compute_share": _SHARE,
    "device.launch": _SECONDS,  # of one kernel
    "device.expert_launches": _LAUNCHES,  # an expert's
    "device.layer_launches": _LAUNCHES,  # a layer's, outside its routed experts
    "device.sampling": _SECONDS,  # from logits to commits, and those to the host
    "link.pcie_generation": {"generation": 1.0},  # told, not used: `bandwidth` is what counts
    "link.pcie_lanes": {"lanes": 1.0},
    "link.bandwidth": _BYTES_A_SECOND,  # attained from pinned memory
    "link.latency": _SECONDS,  # of one copy
    "link.router_sync": _SECONDS,  # until the host has a layer's expert ids
    "host.memory": _BYTES,
    "host.bandwidth": _BYTES_A_SECOND,  # attained while the link copies
    "host.bfloat16": _OPERATIONS,  # attained with few rows
    "host.float32": _OPERATIONS,
    "host.call": _SECONDS,  # of one expert
    "host.start": _SECONDS,  # activations down, results up, and waiting for both
    "disk.bandwidth": _BYTES_A_SECOND,
}


@dataclass(frozen=True)
class Constant:
    """One number of a machine, and where it is from: a data sheet, a published measurement, or `assumed: ...`."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Hardware(ABC):
    """What things take on a machine, in seconds.

    Attributes:
        name: to choose it by.
        title: device and host, in words.
        constants: everything that it knows, by `part.name`.
    """

    name: str
    title: str
    constants: Mapping[str, Constant]

    #: Whether what crosses the link comes from the disk itself, as where device and host are the same.
    link_is_disk = False

    def si(self, key: str) -> float:
        """A constant in bytes, seconds or operations; 0 if the machine has none of that name."""
        constant = self.constants.get(key)
        return 0.0 if constant is None else constant.value * _UNITS[key][constant.unit]

    @property
    def layer_overhead_s(self) -> float:
        """Launches of a layer outside its routed experts."""
        return self.si("device.layer_launches") * self.si("device.launch")

    def host_experts(self, expert_bytes: int) -> int:
        """Experts that host memory holds, `HOST_SHARE` of it."""
        return int(HOST_SHARE * self.si("host.memory")) // expert_bytes

    @abstractmethod
    def device_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """Of the device for each expert alone, `[n]` float64.

        Args:
            counts: `[n]` tokens that use each expert, positive.
            parameters: of one expert.
            itemsize: 2 if it is computed in bfloat16, 4 if in float32.
            weight_bytes: of one expert's weights; by default `parameters * itemsize`, less if quantised.
        """

    @abstractmethod
    def host_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """The same of the host; infinite if it computes nothing."""

    @abstractmethod
    def transfer_s(self, num_bytes: float) -> float:
        """Of the link for one copy from host to device."""

    @abstractmethod
    def disk_s(self, num_bytes: float) -> float:
        """Of reading from disk."""

    @abstractmethod
    def dense_s(self, parameters: float, tokens: float, itemsize: int) -> float:
        """Of the device for a product of `tokens` rows with weights that all of them use, launches apart."""


@dataclass(frozen=True)
class ProfiledHardware(Hardware):
    """A machine by its constants: reading and computing overlap, so the longer of the two counts."""

    def __post_init__(self) -> None:
        for key, constant in self.constants.items():
            require(key in _UNITS, f"unknown key {key}: known are {', '.join(_UNITS)}")
            units = _UNITS[key]
            require(constant.unit in units, f"{key} is in {constant.unit!r}: use {' or '.join(units)}")
            may_be_zero = units in (_SECONDS, _LAUNCHES)
            found, limit = constant.value, 1.0 if units is _SHARE else inf
            require(
                isfinite(found) and (0 < found <= limit or (found == 0 and may_be_zero)),
                f"{key} is {found}: it must be {'a share above 0 and up to 1' if units is _SHARE else 'positive'}",
            )
            require(bool(constant.source.strip()), f"{key} has no source: say where the number is from")
        missing = [key for key in _UNITS if key not in self.constants]
        require(not missing, f"{', '.join(missing)} missing: give value, unit and source")

    def with_constant(self, key: str, value: float, unit: str, source: str) -> Self:
        """The same machine but for one constant, which its name then says: `rtx4090:link.bandwidth=12`.

        Raises:
            RelumeError: there is no such constant, or it cannot have this value.
        """
        constants = {**self.constants, key: Constant(value, unit, source)}
        return replace(self, name=f"{self.name}:{key}={value:g}", constants=constants)

    def device_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """See `Hardware`."""
        read_s = (weight_bytes or parameters * itemsize) / self._device_bandwidth
        launch_s = self.si("device.expert_launches") * self.si("device.launch")
        return launch_s + np.maximum(read_s, counts * (2 * parameters / self._operations(itemsize)))

    def host_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """See `Hardware`."""
        read_s = (weight_bytes or parameters * itemsize) / self.si("host.bandwidth")
        token_s = 2 * parameters / self.si("host.bfloat16" if itemsize == 2 else "host.float32")
        return self.si("host.call") + np.maximum(read_s, counts * token_s)

    def transfer_s(self, num_bytes: float) -> float:
        """See `Hardware`."""
        return self.si("link.latency") + num_bytes / self.si("link.bandwidth")

    def disk_s(self, num_bytes: float) -> float:
        """See `Hardware`."""
        return num_bytes / self.si("disk.bandwidth")

    def dense_s(self, parameters: float, tokens: float, itemsize: int) -> float:
        """See `Hardware`."""
        read_s = parameters * itemsize / self._device_bandwidth
        return max(read_s, 2 * parameters * tokens / self._operations(itemsize))

    @cached_property
    def _device_bandwidth(self) -> float:
        return self.si("device.bandwidth") * self.si("device.bandwidth_share")

    def _operations(self, itemsize: int) -> float:
        return self.si("device.bfloat16" if itemsize == 2 else "device.float32") * self.si("device.compute_share")


@dataclass(frozen=True)
class MeasuredHardware(Hardware):
    """A computer without a GPU as `relume machine` measured it.

    Its processor is the device and its disk the link: nothing lies in host memory but the slots themselves, so
    there is nothing that a host could compute beside them. Times are of kernels in `kernel`, whose calls take the
    place of launches; a quantised expert is charged as if it were not.
    """

    kernel: KernelTimes

    link_is_disk = True

    def device_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """See `Hardware`."""
        del weight_bytes
        distinct, positions = np.unique(counts, return_inverse=True)
        return np.array([self._product_s(count, parameters, itemsize) for count in distinct.tolist()])[positions]

    def host_kernel_s(
        self, counts: np.ndarray, parameters: int, itemsize: int, weight_bytes: int | None = None
    ) -> np.ndarray:
        """See `Hardware`."""
        del parameters, itemsize, weight_bytes
        return np.full(len(counts), inf)

    def transfer_s(self, num_bytes: float) -> float:
        """See `Hardware`."""
        return self.disk_s(num_bytes)

    def disk_s(self, num_bytes: float) -> float:
        """See `Hardware`."""
        return num_bytes / self.si("disk.bandwidth")

    def dense_s(self, parameters: float, tokens: float, itemsize: int) -> float:
        """See `Hardware`."""
        read_s = parameters * itemsize / self.si("device.bandwidth")
        return max(read_s, self._product_s(tokens, parameters, itemsize))

    def _product_s(self, tokens: float, parameters: float, itemsize: int) -> float:
        milliseconds = self.kernel.estimate_ms(_dtype(itemsize), tokens, round(parameters))
        assert milliseconds is not None, "measured_hardware has seen to it"
        return milliseconds / 1000


def load_hardware(name: str) -> Hardware:
    """The machine called `name`: a shipped profile, a path of a TOML file of the same form, or `this` computer.

    Raises:
        RelumeError: an unknown name, a file with a missing, unknown or impossible constant, or nothing measured.
    """
    if name == THIS:
        profile = load_profile()
        if profile is None:
            raise RelumeError("nothing was measured on this computer: run `relume machine`")
        return measured_hardware(profile)
    own = name.endswith(".toml")
    known = [*HARDWARE, THIS]
    require(
        own or name in known,
        f"unknown hardware profile {name!r}: choose one of {', '.join(known)}, or give the path of a .toml",
    )
    path = Path(name) if own else HARDWARE[name]
    try:
        return _from_document(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RelumeError(f"{path}: cannot be read ({error.strerror})") from None
    except (RelumeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RelumeError(f"{path}: {error}") from None


def measured_hardware(profile: MachineProfile) -> MeasuredHardware:
    """This computer, from its measured figures; raises `RelumeError` if one of them is missing."""
    kernel, memory, disk = profile.expert_kernel, profile.memory_read, profile.disk_read(direct=True)
    missing = [f"{what} bandwidth" for what, found in (("memory", memory), ("disk", disk)) if found.value is None]
    missing += [
        f"{dtype} kernels" for dtype in map(_dtype, (2, 4)) if kernel.estimate_ms(dtype, 1, kernel.hidden) is None
    ]
    if missing:
        raise RelumeError(f"this computer: {' and '.join(missing)} not measured: run `relume machine`")
    figures = {"device.bandwidth": replace(memory, unit="GB/s"), "disk.bandwidth": replace(disk, unit="MB/s")}
    figures["device.call"] = kernel.call
    for dtype, times in sorted(kernel.times.items()):
        figures |= {f"device.expert.{dtype}.{tokens}": time for tokens, time in sorted(times.items())}
    constants = {
        key: Constant(figure.value, figure.unit, f"measured on {figure.measured_at}")
        for key, figure in figures.items()
        if figure.value is not None
    }
    return MeasuredHardware(THIS, profile.identity, constants, kernel)


def _from_document(name: str, document: Mapping[str, Any]) -> ProfiledHardware:
    title, constants = document.get("title"), {}
    require(isinstance(title, str) and bool(title), "title is missing: name device and host")
    for part, table in document.items():
        if part != "title":
            require(isinstance(table, dict), f"unknown key {part}")
            constants.update({f"{part}.{key}": _constant(f"{part}.{key}", entry) for key, entry in table.items()})
    return ProfiledHardware(name, str(title), constants)


def _constant(key: str, entry: Any) -> Constant:
    require(
        isinstance(entry, dict) and set(entry) == {"value", "unit", "source"},
        f"{key} is {entry!r}: give value, unit and source, and nothing else",
    )
    value, unit, source = entry["value"], entry["unit"], entry["source"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number, f"{key} is {value!r}: its value must be a number")
    require(isinstance(unit, str) and isinstance(source, str), f"{key}: unit and source must be text")
    return Constant(float(value), unit, source)


def _dtype(itemsize: int) -> str:
    return "bfloat16" if itemsize == 2 else "float32"
