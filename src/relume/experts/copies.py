"""How bytes get into slots: written by a reader thread, or copied over a link while the device computes.

Three orders must hold where copies and kernels run beside each other. Each is an event; the thread that computes
waits for none of them:

1. A slot is overwritten after the kernels that read what it held: `freed` records, the copy waits.
2. Kernels read a slot after the copy into it: the copy records, `use` waits.
3. A staging buffer is filled again after the copy out of it: the reader thread that fills it waits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from relume.checkpoint.files import Pause
from relume.experts.formats import ExpertFormat, Views
from relume.experts.source import ExpertSource
from relume.experts.streams import CudaStream, Event, Stream, Timings
from relume.machine.memory import PinError, allocate_bytes, pin, pinned_copy, unpin

#: Staging buffers of a reader: it fills one while the other is copied.
STAGING_BUFFERS = 2
#: One copy in so many is timed: events that tell times are dearer.
_TIMED_COPIES = 8


class CopyLane(ABC):
    """Fills slots, and keeps their readers and writers apart.

    Attributes:
        asynchronous: kernels run later than they are launched, beside copies.
        poisoned: slots that are freed are filled with NaN, so that whoever still reads one shows it; for tests.
        batch: misses that are computed at once, `None` for all that have come.
    """

    asynchronous = False
    poisoned = False
    batch: int | None = None

    @abstractmethod
    def fill(
        self, layer: int, expert: int, slot: int, views: Views, pause: Pause | None = None, ahead: bool = False
    ) -> int:
        """Fill a slot's tensors, on a reader thread; returns the bytes read from disk.

        Raises as `ExpertSource.read`.
        One that is brought `ahead` has arrived when this returns. Others are on their way: see `use`.
        """

    def start(self, layer: int, expert: int, slot: int, views: Views) -> bool:
        """Begin to fill a slot if that needs no thread; whether it did."""
        del layer, expert, slot, views
        return False

    def freed(self, slot: int, views: Views) -> None:
        """No kernel that is launched from now on reads the slot."""
        if self.poisoned:
            _poison(views)

    def use(self, slot: int) -> None:  # noqa: B027 (a thread has written it)
        """Kernels that are launched from now on may read the slot."""

    def launch(self, kernels: Callable[[], object]) -> None:
        """Launch kernels."""
        kernels()

    def join(self) -> None:  # noqa: B027 (they have run)
        """Kernels from now on may read what those before have written."""

    def timing(self, lane: str, predicted_s: float) -> AbstractContextManager[None]:
        """Time the kernels that are launched within; see `measured`."""
        del lane, predicted_s
        return nullcontext()

    def measured(self) -> Iterable[tuple[str, float, float]]:
        """(lane, predicted seconds, seconds) of what was timed and has ended since.

        Copies are in the lane `transfer`, and predicted to take 0: they are all alike.
        """
        return ()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, where the kernels are."""
        return tensor

    def settle(self) -> None:  # noqa: B027 (they have run)
        """Wait for all copies and kernels."""

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Release what is held."""


class DirectCopies(CopyLane):
    """Slots in RAM: a reader thread writes into them."""

    def __init__(self, source: ExpertSource) -> None:
        self._source = source

    def fill(
        self, layer: int, expert: int, slot: int, views: Views, pause: Pause | None = None, ahead: bool = False
    ) -> int:
        """See `CopyLane`."""
        del slot, ahead
        return self._source.read(layer, expert, views, pause)


class _Staging:
    """A reader's buffers, in turn."""

    def __init__(self, make: Callable[[], Views]) -> None:
        self.buffers = [make() for _ in range(STAGING_BUFFERS)]
        self.copied: list[Event | None] = [None] * STAGING_BUFFERS
        self._turn = 0

    def take(self) -> int:
        """The buffer whose turn it is, once it has been copied."""
        self._turn = (self._turn + 1) % STAGING_BUFFERS
        copied = self.copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._turn


class StreamCopies(CopyLane):
    """Slots on a device with streams: one for kernels, one for copies.

    An expert in pinned host memory is copied from where it lies, without a thread. All others are read into a
    pinned staging buffer by a reader thread. Experts in host memory that is not pinned go that way too: a copy
    from there would keep whoever starts it waiting.

    Args:
        source: where experts come from.
        expert_format: of slots and staging buffers.
        compute, copying: the two streams.
        synchronise: waits for the device.
        pinned: whether host memory can be pinned for fast transfers.
        device: of the slots.
    """

    asynchronous = True
    # Half of the transit slots: one half is computed and filled again while copies into the other are under way.
    # So a prefill, which brings nearly all experts, keeps the link busy through two buffers of this size.
    batch = 4

    def __init__(
        self,
        source: ExpertSource,
        expert_format: ExpertFormat,
        compute: Stream,
        copying: Stream,
        synchronise: Callable[[], None],
        device: torch.device,
        pinned: bool = True,
    ) -> None:
        self._source = source
        self._format = expert_format
        self._compute = compute
        self._copying = copying
        self._synchronise = synchronise
        self._device = device
        self._pinned = pinned
        self._free: dict[int, Event] = {}  # by slot: after the last kernel that read it
        self._arriving: dict[int, Event] = {}  # by slot: after the copy into it
        self._timings = Timings()
        self._num_copies = 0
        self._own = threading.local()
        self._memory: list[torch.Tensor] = []

    def fill(
        self, layer: int, expert: int, slot: int, views: Views, pause: Pause | None = None, ahead: bool = False
    ) -> int:
        """See `CopyLane`."""
        held = self._pinned_views(layer, expert)
        if held is not None:
            num_bytes, copied = 0, self._copy(slot, held, views)
        else:
            staging: _Staging | None = getattr(self._own, "staging", None)
            if staging is None:
                staging = self._own.staging = _Staging(self._make_buffer)
            turn = staging.take()
            num_bytes = self._source.read(layer, expert, staging.buffers[turn], pause)
            copied = staging.copied[turn] = self._copy(slot, staging.buffers[turn], views)
        if ahead:
            # So that at most one of them is in the way of an expert that is waited for.
            copied.synchronize()
        return num_bytes

    def start(self, layer: int, expert: int, slot: int, views: Views) -> bool:
        """See `CopyLane`."""
        held = self._pinned_views(layer, expert)
        if held is None:
            return False
        self._copy(slot, held, views)
        return True

    def freed(self, slot: int, views: Views) -> None:
        """See `CopyLane`."""
        arriving = self._arriving.pop(slot, None)  # of one that nobody used; the next copy is behind it anyway
        if self.poisoned:
            if arriving is not None:
                self._compute.wait(arriving)
            self._compute.run(lambda: _poison(views))
        self._free[slot] = self._compute.record()

    def use(self, slot: int) -> None:
        """See `CopyLane`."""
        arriving = self._arriving.pop(slot, None)
        if arriving is not None:
            self._compute.wait(arriving)

    def launch(self, kernels: Callable[[], object]) -> None:
        """See `CopyLane`."""
        self._compute.run(kernels)

    def timing(self, lane: str, predicted_s: float) -> AbstractContextManager[None]:
        """See `CopyLane`."""
        return self._timings.span(self._compute, lane, predicted_s)

    def measured(self) -> Iterable[tuple[str, float, float]]:
        """See `CopyLane`."""
        return self._timings.ended()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `CopyLane`."""
        if tensor.device.type == self._device.type:
            return tensor
        return pinned_copy(tensor).to(self._device, non_blocking=True)

    def settle(self) -> None:
        """See `CopyLane`."""
        self._synchronise()
        self._free.clear()
        self._arriving.clear()
        self._timings.forget()

    def close(self) -> None:
        """See `CopyLane`."""
        self._synchronise()
        while self._memory:
            unpin(self._memory.pop())

    def _pinned_views(self, layer: int, expert: int) -> Views | None:
        return self._source.held(layer, expert) if self._source.pinned(layer, expert) else None

    def _copy(self, slot: int, source: Views, views: Views) -> Event:
        copying = self._copying
        free = self._free.pop(slot, None)
        if free is not None:
            copying.wait(free)
        self._num_copies += 1
        timed = self._num_copies % _TIMED_COPIES == 0
        with self._timings.span(copying, "transfer", 0.0) if timed else nullcontext():
            copying.run(lambda: _copy_views(source, views))
        copied = self._arriving[slot] = copying.record()
        return copied

    def _make_buffer(self) -> Views:
        memory = allocate_bytes(self._format.slot_bytes, torch.device("cpu"))
        if self._pinned:
            try:
                memory.zero_()  # pages that are there
                pin(memory)
                self._memory.append(memory)
            except PinError as error:
                line = f"staging buffers are not pinned, so transfers are slower: {error}"
                if line not in self._source.fallbacks:
                    self._source.fallbacks.append(line)
        return self._format.views(memory)


def copy_lane(source: ExpertSource, expert_format: ExpertFormat, device: torch.device) -> CopyLane:
    """What suits a device."""
    if device.type == "cpu":
        return DirectCopies(source)
    return StreamCopies(
        source,
        expert_format,
        CudaStream(device),
        CudaStream(device, torch.cuda.Stream(device)),
        lambda: torch.cuda.synchronize(device),
        device,
    )


def _copy_views(source: Views, views: Views) -> None:
    for part, out in zip(source, views, strict=True):
        out.copy_(part, non_blocking=True)


def _poison(views: Views) -> None:
    """All bits set: NaN in every float type."""
    for view in views:
        view.view(torch.uint8).fill_(0xFF)
