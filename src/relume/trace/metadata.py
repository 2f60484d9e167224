"""What a trace file says about itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from relume import __version__
from relume.core import RelumeError
from relume.machine.work import WorkShape
from relume.strategy.refresh.costs import RefreshCosts
from relume.strategy.use import ExpertShape

#: Version of the columns and of these keys.
SCHEMA_VERSION = 2
_KEY = b"relume.trace"


@dataclass(frozen=True)
class TraceMetadata:
    """Where a trace comes from.

    Attributes:
        model: its name or path.
        shape: of its experts.
        block_length: tokens of a block.
        strategy: that was in charge when the misses were recorded.
        slots: of each MoE layer, or a single number if `shared`.
        shared: whether all layers shared one pool.
        expert_bytes: of one expert in the tier that holds the slots.
        kind: `measured` or `simulated`.
        hardware: that was measured, or what simulated it.
        work: sizes that take time in a forward, where they are known.
        profile: path of the model's profile that the strategy began with; empty if there was none.
        costs: of the machine, as the strategy weighed them, if it did.
        intervals: that the strategy followed in each layer when the recording began, if it refreshes in intervals.
        routing: with which tokens chose their experts.
        relume_version: that wrote the file.
    """

    model: str
    shape: ExpertShape
    block_length: int
    strategy: str
    slots: tuple[int, ...]
    shared: bool
    expert_bytes: int
    kind: str
    hardware: str
    work: WorkShape | None = None
    profile: str = ""
    costs: RefreshCosts | None = None
    intervals: tuple[int, ...] = ()
    routing: str = "native"
    relume_version: str = __version__

    def __post_init__(self) -> None:
        expected = 1 if self.shared else self.shape.num_layers
        if len(self.slots) != expected:
            raise RelumeError(f"a trace with {len(self.slots)} numbers of slots: {expected} were expected")
        if self.kind not in {"measured", "simulated"}:
            raise RelumeError(f"a trace of kind {self.kind!r}: it is either measured or simulated")

    def encode(self) -> dict[bytes, bytes]:
        """As metadata of a Parquet schema."""
        costs = None if self.costs is None else self.costs.to_dict()
        return {_KEY: json.dumps({"version": SCHEMA_VERSION} | asdict(self) | {"costs": costs}).encode()}

    @classmethod
    def decode(cls, path: object, metadata: Mapping[bytes, bytes] | None) -> Self:
        """The reverse; `path` is named in errors.

        Raises:
            RelumeError: there is none, of another version, or it is malformed.
        """
        text = (metadata or {}).get(_KEY)
        if text is None:
            raise RelumeError(f"{path}: a Parquet file, but no trace of relume's; make one with `relume trace`")
        try:
            values: dict[str, Any] = json.loads(text)
            version = values.pop("version")
            if version != SCHEMA_VERSION:
                raise RelumeError(
                    f"{path}: a trace of version {version}, this relume reads version {SCHEMA_VERSION}: "
                    "record it again, or read it with the relume that wrote it"
                )
            values |= {"shape": ExpertShape(**values["shape"]), "slots": tuple(values["slots"])}
            values["intervals"] = tuple(values.get("intervals", ()))
            work = values.get("work")
            values["work"] = None if work is None else WorkShape(**work)
            costs = values.get("costs")
            values["costs"] = None if costs is None else RefreshCosts.from_dict(costs)
            known = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in values.items() if name in known})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, RelumeError):
                raise
            raise RelumeError(f"{path}: the trace's metadata are damaged ({error}): record it again") from None
