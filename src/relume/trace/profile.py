"""What a trace teaches about a model, in one small file."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from relume.core import Phase, RelumeError
from relume.strategy.use import ExpertShape
from relume.trace.record import ForwardRecord
from relume.trace.views import expert_counts, phase_of, votes_of

VERSION = 1


@dataclass(frozen=True)
class Profile:
    """Habits of a model's routing.

    Attributes:
        shape: of the model.
        popularity: `[layers, E]` float64, voting tokens of a forward that use each expert, mean over all forwards.
        mean_active: `[layers]` float64, distinct experts of a denoising forward.
        model: the name that the trace had of it; empty if that is not known.
    """

    shape: ExpertShape
    popularity: np.ndarray
    mean_active: np.ndarray
    model: str = ""

    @classmethod
    def from_records(cls, records: Iterable[ForwardRecord], shape: ExpertShape, model: str = "") -> Self:
        """Gather it from a trace of `model`.

        Raises:
            RelumeError: the trace has no denoising forward.
        """
        popularity = np.zeros((shape.num_layers, shape.num_experts))
        active = np.zeros(shape.num_layers)
        num_forwards = num_denoising = 0
        for record in records:
            num_forwards += 1
            popularity += expert_counts(record.expert_ids[:, votes_of(record)], shape.num_experts)
            if phase_of(record) is Phase.DENOISE:
                num_denoising += 1
                active += (expert_counts(record.expert_ids, shape.num_experts) > 0).sum(axis=1)
        if not num_denoising:
            raise RelumeError("the trace has no denoising forward: record at least one answer")
        return cls(shape, popularity / num_forwards, active / num_denoising, model)

    def save(self, path: Path) -> None:
        """Write one `.npz` file, whole or not at all.

        Raises:
            RelumeError: it cannot be written.
        """
        part = path.with_name(path.name + ".part")
        shape = np.array([self.shape.num_layers, self.shape.num_experts, self.shape.top_k])
        try:
            with part.open("wb") as file:
                np.savez_compressed(
                    file,
                    version=VERSION,
                    shape=shape,
                    popularity=self.popularity,
                    mean_active=self.mean_active,
                    model=self.model,
                )
            part.replace(path)
        except OSError as error:
            raise RelumeError(f"{path}: the profile cannot be written ({error.strerror})") from None
        finally:
            with suppress(OSError):  # a profile that was written has its name already
                part.unlink()

    @classmethod
    def load(cls, path: Path, shape: ExpertShape) -> Self:
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
            if version == VERSION:
                found = ExpertShape(*arrays["shape"].tolist())
                profile = cls(found, arrays["popularity"], arrays["mean_active"], str(arrays.get("model", "")))
        except FileNotFoundError:
            raise RelumeError(f"{path}: no such profile; make one with `relume trace profile`") from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            # numpy's own words would advise to unpickle what is no array
            reason = "it holds no such arrays" if isinstance(error, ValueError) else error
            raise RelumeError(
                f"{path}: no profile, or a damaged one ({reason}); make one with `relume trace profile`"
            ) from None
        if version != VERSION:
            raise RelumeError(f"{path}: a profile of version {version}, not {VERSION}: make it again")
        if found != shape:
            raise RelumeError(f"{path}: a profile of {_words(found)}, the model has {_words(shape)}: make its own")
        return profile


def _words(shape: ExpertShape) -> str:
    return f"{shape.num_layers} layers of {shape.num_experts} experts, {shape.top_k} a token"
