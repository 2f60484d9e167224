"""Gathers a model's profile from a trace, and keeps it in one small file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from relume.core import Phase, RelumeError
from relume.machine.profile import cache_file
from relume.strategy.foresight.statistics import NUM_BINS, TokenStatistics, confidence_bins
from relume.strategy.profile import DEFAULT_STABILITY, Profile
from relume.strategy.refresh.curves import RefreshCurves
from relume.strategy.use import ExpertShape, span_slices
from relume.trace.record import ForwardRecord
from relume.trace.refresh import RefreshGauge
from relume.trace.views import expert_counts, phase_of, votes_of

VERSION = 3
#: Beside a checkpoint, the profile that is used unless another is named.
PROFILE_NAME = "relume-profile.npz"

#: Choices that the default stability counts for.
_STABILITY_USES = 20.0
_ARRAYS = ("popularity", "mean_active", "reuse", "stability")


def cached_profile(model: str) -> Path:
    """Where the profile of a model is kept unless told otherwise. Raises `OSError` if there is no home folder."""
    return cache_file().parent / "profiles" / f"{model}.npz"


def gather_profile(records: Iterable[ForwardRecord], shape: ExpertShape, model: str = "") -> Profile:
    """The profile of `model`, from a trace of it.

    Raises:
        RelumeError: the trace has no denoising forward.
    """
    size = (shape.num_layers, shape.num_experts)
    popularity, active, reuse = np.zeros(size), np.zeros(shape.num_layers), np.zeros(size)
    kept, seen = np.zeros(NUM_BINS + 1), np.zeros(NUM_BINS + 1)
    statistics = TokenStatistics(shape)
    gauge = RefreshGauge(shape)
    num_forwards = num_denoising = num_pairs = 0
    ranked: np.ndarray | None = None  # experts by the votes of the forward before
    for record in records:
        num_forwards += 1
        gauge.take(record)
        votes = expert_counts(record.expert_ids[:, votes_of(record)], shape.num_experts)
        popularity += votes
        if phase_of(record) is Phase.DENOISE:
            used = expert_counts(record.expert_ids, shape.num_experts) > 0
            num_denoising += 1
            active += used.sum(axis=1)
            if ranked is not None:
                num_pairs += 1
                reuse += np.take_along_axis(used, ranked, axis=1)
        ranked = np.argsort(-votes, axis=1, kind="stable")
        for span, place in zip(record.spans, span_slices(record.spans), strict=True):
            ids = record.expert_ids[:, place].astype(np.int64)
            before = statistics.latest(span.request, span.start) if span.phase is Phase.DENOISE else None
            if before is not None:
                again = (before.expert_ids[..., :, None] == ids[..., None, :]).any(axis=-1)
                bins = confidence_bins(before.span.confidences)
                np.add.at(kept, bins, again.sum(axis=(0, 2)))
                np.add.at(seen, bins, again.shape[0] * again.shape[2])
            statistics.take(span, ids)
    if not num_denoising:
        raise RelumeError("the trace has no denoising forward: record at least one answer")
    return Profile(
        shape=shape,
        popularity=popularity / num_forwards,
        mean_active=active / num_denoising,
        reuse=reuse / max(1, num_pairs),
        stability=(kept + _STABILITY_USES * np.array(DEFAULT_STABILITY)) / (seen + _STABILITY_USES),
        statistics=statistics,
        refresh=gauge.curves(),
        model=model,
    )


def write_model_profile(profile: Profile, path: Path) -> None:
    """Write one `.npz` file, whole or not at all.

    Raises:
        RelumeError: it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    shape = np.array([profile.shape.num_layers, profile.shape.num_experts, profile.shape.top_k])
    arrays = {name: getattr(profile, name) for name in _ARRAYS}
    arrays |= {f"tokens_{name}": array for name, array in profile.statistics.to_arrays().items()}
    if profile.refresh is not None:
        curves = profile.refresh
        arrays |= {f"refresh_{name}": np.asarray(getattr(curves, name)) for name in curves.names()}
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, version=VERSION, shape=shape, model=profile.model, **arrays)
        part.replace(path)
    except OSError as error:
        raise RelumeError(f"{path}: the profile cannot be written ({error.strerror})") from None
    finally:
        with suppress(OSError):  # a profile that was written has its name already
            part.unlink()


def read_model_profile(path: Path, shape: ExpertShape) -> Profile:
    """Read the profile of a model of this shape; whether it is of the same name is for the caller to see.

    Raises:
        RelumeError: there is none, it is damaged, of another version, or of a model of another shape.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise zipfile.BadZipFile("it is no .npz file")
            file.seek(0)
            with np.load(file) as archive:
                arrays = dict(archive)
        version = int(arrays["version"])
        profile = _from_arrays(arrays) if version == VERSION else None
    except FileNotFoundError:
        raise RelumeError(f"{path}: no such profile; make one with `relume trace profile`") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        # numpy's own words would advise to unpickle what is no array
        reason = "it holds no such arrays" if isinstance(error, ValueError) else error
        raise RelumeError(
            f"{path}: no profile, or a damaged one ({reason}); make one with `relume trace profile`"
        ) from None
    if profile is None:
        raise RelumeError(f"{path}: a profile of version {version}, not {VERSION}: make it again")
    try:
        profile.check(shape)
    except RelumeError as error:
        raise RelumeError(f"{path}: {error}") from None
    return profile


def _from_arrays(arrays: dict[str, np.ndarray]) -> Profile:
    shape = ExpertShape(*arrays["shape"].tolist())
    size = (shape.num_layers, shape.num_experts)
    sizes = {
        "popularity": size,
        "mean_active": size[:1],
        "reuse": size,
        "stability": (NUM_BINS + 1,),
    }
    for name, expected in sizes.items():
        if arrays[name].shape != expected:
            raise ValueError(f"{name} has the shape {arrays[name].shape}, not {expected}")
    return Profile(
        shape,
        **{name: arrays[name] for name in _ARRAYS},
        statistics=TokenStatistics.from_arrays(shape, _with_prefix("tokens_", arrays)),
        refresh=_curves(_with_prefix("refresh_", arrays)),
        model=str(arrays["model"]),
    )


def _curves(arrays: dict[str, np.ndarray]) -> RefreshCurves | None:
    if not arrays:
        return None
    numbers = {name: array.item() for name, array in arrays.items() if array.ndim == 0}
    return RefreshCurves(**{name: arrays[name] for name in RefreshCurves.names()} | numbers)


def _with_prefix(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
