"""What tells one checkpoint from another without reading all of it."""

from __future__ import annotations

import hashlib
import json

from relume.checkpoint.files import Files
from relume.checkpoint.folder import Checkpoint
from relume.checkpoint.tensor_file import TensorEntry

#: A tensor gives one sample for each such stretch of bytes.
STRETCH_BYTES = 1 << 22
SAMPLE_BYTES = 64


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hexadecimal BLAKE2b of the configuration, and of every tensor's name, type, shape and samples of its bytes.

    How tensors are divided among files does not matter.

    Raises:
        RelumeError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = Files()
    try:
        digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
        for name in sorted(checkpoint.tensors):
            entry = checkpoint.tensors[name]
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            for offset in _sample_offsets(entry):
                sample = memoryview(bytearray(min(SAMPLE_BYTES, entry.num_bytes)))
                files.fill(entry.path, entry.offset + offset, sample, name)
                digest.update(sample)
    finally:
        files.close()
    return digest.hexdigest()


def _sample_offsets(entry: TensorEntry) -> list[int]:
    """The middle of each stretch."""
    stretches = -(-entry.num_bytes // STRETCH_BYTES)
    last = max(0, entry.num_bytes - SAMPLE_BYTES)
    return [min(last, entry.num_bytes * (2 * index + 1) // (2 * stretches)) for index in range(stretches)]
