"""Records to columns of one Parquet row each, and back. The only place that knows the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from relume.core import Phase, SpanSignals
from relume.trace.record import ForwardRecord


def _lists(value: pa.DataType, depth: int) -> pa.DataType:
    return value if depth == 0 else pa.list_(_lists(value, depth - 1))


#: Of a request in a forward: one entry each, then one list of its tokens each.
_SPAN_SCALARS = {"request": pa.int64(), "start": pa.int64(), "block_length": pa.int64(), "next_start": pa.int64()}
_SPAN_ARRAYS = {
    "token_ids": pa.int64(),
    "masked": pa.bool_(),
    "candidates": pa.int64(),
    "confidences": pa.float32(),
    "committed": pa.bool_(),
    "edited": pa.bool_(),
    "next_token_ids": pa.int64(),
}
#: Of each MoE layer: tokens * k values in a row, and sets of experts.
_EXPERT_SETS = ("misses", "hosted", "arrived")
_LAYER_ARRAYS = {"expert_ids": pa.uint16(), "weights": pa.float32()} | dict.fromkeys(_EXPERT_SETS, pa.uint16())
_SCALARS = {"bytes_loaded": pa.int64(), "wall_s": pa.float64(), "compute_s": pa.float64(), "stall_s": pa.float64()}

SCHEMA = pa.schema(
    [("phase", _lists(pa.string(), 1))]
    + [(name, _lists(kind, 1)) for name, kind in _SPAN_SCALARS.items()]
    + [(name, _lists(kind, 2)) for name, kind in (_SPAN_ARRAYS | _LAYER_ARRAYS).items()]
    + list(_SCALARS.items())
)


def to_batch(records: Sequence[ForwardRecord], schema: pa.Schema) -> pa.RecordBatch:
    """One row a record."""
    spans = [record.spans for record in records]
    phases = [[span.phase.value for span in row] for row in spans]
    columns = {"phase": pa.array(phases, SCHEMA.field("phase").type)}
    for name, kind in _SPAN_SCALARS.items():
        columns[name] = pa.array([[getattr(span, name) for span in row] for row in spans], pa.list_(kind))
    for name, kind in _SPAN_ARRAYS.items():
        columns[name] = _nest([[getattr(span, name) for span in row] for row in spans], kind)
    for name, kind in _LAYER_ARRAYS.items():
        rows = [[layer.reshape(-1) for layer in getattr(record, name)] for record in records]
        columns[name] = _nest(rows, kind)
    for name, kind in _SCALARS.items():
        columns[name] = pa.array([getattr(record, name) for record in records], kind)
    return pa.record_batch([columns[name] for name in SCHEMA.names], schema=schema)


def from_batch(batch: pa.RecordBatch, top_k: int) -> Iterator[ForwardRecord]:
    """The reverse. The arrays are read-only views of the batch where its layout allows."""
    get = {name: _lists_of(batch.column(name)) for name in [*_SPAN_ARRAYS, *_LAYER_ARRAYS]}
    plain = {name: batch.column(name).to_pylist() for name in ["phase", *_SPAN_SCALARS, *_SCALARS]}
    for row in range(batch.num_rows):
        arrays = {name: get[name](row) for name in get}
        spans = []
        for index, phase in enumerate(plain["phase"][row]):
            values: dict[str, Any] = {name: plain[name][row][index] for name in _SPAN_SCALARS}
            values |= {name: arrays[name][index] for name in _SPAN_ARRAYS}
            spans.append(SpanSignals(phase=Phase(phase), **values))
        layers = len(arrays["expert_ids"])
        shape = (layers, sum(len(span.token_ids) for span in spans), top_k)
        yield ForwardRecord(
            spans=tuple(spans),
            expert_ids=_joined(arrays["expert_ids"]).reshape(shape),
            weights=_joined(arrays["weights"]).reshape(shape),
            misses=tuple(arrays["misses"]),
            hosted=tuple(arrays["hosted"]),
            arrived=tuple(arrays["arrived"]),
            **{name: plain[name][row] for name in _SCALARS},
        )


def _joined(rows: list[np.ndarray]) -> np.ndarray:
    """Arrays that lie one after the other, as one."""
    whole: np.ndarray = np.concatenate(rows)
    return whole


def _nest(rows: Sequence[Sequence[np.ndarray]], kind: pa.DataType) -> pa.Array:
    """Lists of lists of numbers from arrays, which is far quicker than from Python lists."""
    inner = [array for row in rows for array in row]
    values = np.concatenate(inner) if inner else np.empty(0)
    lists = pa.ListArray.from_arrays(_offsets(inner), pa.array(values.astype(kind.to_pandas_dtype()), kind))
    return pa.ListArray.from_arrays(_offsets(rows), lists)


def _offsets(parts: Sequence[Any]) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64))), pa.int32())


def _lists_of(column: pa.ListArray) -> Callable[[int], list[np.ndarray]]:
    """A function from a row to its arrays."""
    lists = column.flatten()
    values = lists.flatten().to_numpy(zero_copy_only=False)
    outer = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
    inner = (lists.offsets.to_numpy() - lists.offsets[0].as_py()).tolist()
    return lambda row: [values[inner[i] : inner[i + 1]] for i in range(outer[row], outer[row + 1])]
