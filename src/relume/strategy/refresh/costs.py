"""What moving and computing an expert costs, and what a layer takes that is refreshed or left as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import erf, inf
from typing import Any, Self

import numpy as np

from relume.machine.hardware import Hardware
from relume.machine.work import WorkShape
from relume.strategy.refresh.curves import RefreshCurves

#: scipy has one too, and takes megabytes of every process that imports it.
_ERF = np.vectorize(erf, otypes=[np.float64])


@dataclass(frozen=True)
class RefreshCosts:
    """Seconds for one expert (TIDE's C_IO and C_CPU, and what they overlap with).

    Attributes:
        transfer_s: to bring it over the link.
        device_s: for the device to compute it.
        host_s: for the host to compute it; infinite if it cannot, and every miss has to cross the link.
        host_start_s: that the host lane of a layer takes besides.
        disk_share: of all experts, those that the host's memory does not hold: they have to cross the link.
        disk_s: that one of them takes more than `transfer_s`.
        link_share: of the time of the experts' layers for which the link may be busy.
    """

    transfer_s: float
    device_s: float
    host_s: float
    host_start_s: float
    disk_share: float = 0.0
    disk_s: float = 0.0
    link_share: float = 1.0

    @classmethod
    def of(cls, hardware: Hardware, work: WorkShape, curves: RefreshCurves) -> Self:
        """Of a machine, for experts that are used by as many tokens as the curves' on average."""
        num_experts = curves.num_layers * curves.num_experts
        not_held = 1.0 - min(1.0, hardware.host_experts(work.expert_bytes) / num_experts)
        expert = (work.expert_parameters, work.itemsize, work.expert_bytes)
        return cls(
            transfer_s=hardware.transfer_s(work.expert_bytes),
            device_s=float(hardware.device_kernel_s(np.array([curves.hit_tokens]), *expert)[0]),
            host_s=float(hardware.host_kernel_s(np.array([curves.missed_tokens]), *expert)[0]),
            host_start_s=hardware.si("host.start"),
            disk_share=0.0 if hardware.link_is_disk else not_held,
            disk_s=0.0 if hardware.link_is_disk else hardware.disk_s(work.expert_bytes),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The reverse of `to_dict`. Raises `TypeError` for other keys."""
        return cls(**{key: inf if value is None else float(value) for key, value in values.items()})

    def to_dict(self) -> dict[str, float | None]:
        """As plain values; what is infinite is `None`."""
        return {key: None if value == inf else value for key, value in asdict(self).items()}

    def lanes(
        self, hits: np.ndarray, brought: np.ndarray, missed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds that link, device and host are busy with a layer, by mean numbers of experts, of any shape.

        Args:
            hits: active and resident.
            brought: that cross the link to stay.
            missed: the other active ones, which the host computes where it can.
        """
        on_disk = (brought + missed) * self.disk_share
        forced = missed if self.host_s == inf else missed * self.disk_share
        crossing, left = brought + forced, missed - forced
        link = crossing * self.transfer_s + on_disk * self.disk_s
        host_s = 0.0 if self.host_s == inf else self.host_s
        return link, (hits + crossing) * self.device_s, left * host_s + np.minimum(left, 1.0) * self.host_start_s

    def layer_s(
        self,
        hits: np.ndarray,
        brought: np.ndarray,
        missed: np.ndarray,
        brought_sd: np.ndarray,
        missed_sd: np.ndarray,
    ) -> np.ndarray:
        """Expected seconds until the last lane ends; the device computes what has arrived as the rest arrives.

        Numbers vary from forward to forward, and the mean of the longer lane is more than the longer mean. Link
        and host are taken as independent and normal (C. E. Clark, 1961).
        """
        link, device, host = self.lanes(hits, brought, missed)
        forced = 1.0 if self.host_s == inf else self.disk_share
        # Which of the misses lie on disk is chance, too.
        thinned_sd = np.sqrt((forced * missed_sd) ** 2 + missed * forced * (1.0 - forced))
        on_disk_s = self.transfer_s + self.disk_s if forced < 1.0 else self.transfer_s
        link_sd = np.hypot(brought_sd * self.transfer_s, thinned_sd * on_disk_s)
        host_sd = missed_sd * (0.0 if self.host_s == inf else (1.0 - forced) * self.host_s)
        arriving = link + np.where(link > 0, self.device_s, 0.0)
        return np.asarray(np.maximum(_mean_of_longer(arriving, host, np.hypot(link_sd, host_sd)), device))


def _mean_of_longer(one: np.ndarray, other: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Mean of the larger of two normal variables, by their means and the deviation of their difference."""
    spread = np.maximum(deviation, 1e-30)
    apart = (one - other) / spread
    density = np.exp(-(apart**2) / 2) / np.sqrt(2 * np.pi)
    below = 0.5 * (1.0 + _ERF(apart / np.sqrt(2)))
    return np.asarray(one * below + other * (1.0 - below) + spread * density)
