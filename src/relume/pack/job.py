"""The whole job: everything but the experts is copied, the experts are put into another format one by one."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from relume.checkpoint.copying import copy_tensors, replace_file, text_files
from relume.checkpoint.fingerprint import fingerprint
from relume.checkpoint.folder import SINGLE_FILE, open_checkpoint
from relume.checkpoint.hub import SHIPPED, resolve_model
from relume.checkpoint.pack import Pack
from relume.checkpoint.pack_writer import PackWriter
from relume.checkpoint.tensor_file import TensorEntry
from relume.config import PackConfig, require
from relume.core import Progress
from relume.experts.formats import ExpertFormat
from relume.experts.packed import PackedExperts, packed_format
from relume.model.families import identify
from relume.model.family import expert_tensors
from relume.pack.report import PackReport, make_report, relative_errors
from relume.pack.source import SourceExperts


def pack_model(
    model: str | Path,
    out: Path,
    packing: PackConfig,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Make a folder that loads like `model`, its experts in a format that is read and computed with in one piece.

    The same model and format give the same bytes. A run that was ended in whatever way is continued by the next.
    A few experts are in memory at a time.

    Args:
        model: a folder, a shipped model, or a hub id.
        out: the folder to make or to complete.
        packing: how experts are stored.
        revision, offline: of a hub id; see `resolve_model`.
        progress: called with (bytes since the last call, bytes in all).

    Returns:
        What was made and measured.

    Raises:
        RelumeError: a model that cannot be read or is packed already, `out` holds something else, no room on the
            disk.
    """
    started = time.perf_counter()
    folder = resolve_model(model, revision, offline)
    checkpoint = open_checkpoint(folder)
    family, config = identify(checkpoint)
    packed = checkpoint.pack
    require(packed is None, f"{folder}: is packed already; pack the folder that it was made from")
    require(len(config.moe_layers) > 0, f"{folder}: the model has no experts: there is nothing to pack")
    expert_format = packed_format(packing, config.hidden_size, config.expert_size)
    prefixes = [family.experts_prefix.format(layer=layer) for layer in config.moe_layers]
    pack = Pack(
        name=packing.experts,
        group_size=packing.group_size,
        num_layers=len(prefixes),
        num_experts=config.router.num_experts,
        hidden_size=config.hidden_size,
        expert_size=config.expert_size,
        expert_bytes=expert_format.slot_bytes,
        source=_name(model, folder),
        source_dtype=str(checkpoint.expert(prefixes[0], 0)[0].dtype).removeprefix("torch."),
        fingerprint=fingerprint(checkpoint),
    )
    left_out = expert_tensors(family, config, checkpoint)
    kept = [entry for name, entry in checkpoint.tensors.items() if name not in left_out]
    reader = SourceExperts(checkpoint, prefixes, config, packing)
    with PackWriter(out, pack, sum(entry.num_bytes for entry in kept)) as writer:
        if not writer.finished:
            _fill(writer, kept, folder, reader, expert_format, pack, progress or (lambda _added, _total: None))
    complete = open_checkpoint(out)
    assert complete.pack is not None
    stored = PackedExperts(out, complete.pack, direct=False)
    original = reader.source(torch.bfloat16)
    try:
        errors = relative_errors(complete.pack, original, stored, expert_format)
    finally:
        stored.close()
        original.close()
    source_bytes = checkpoint.expert_bytes(prefixes[0])
    seconds = time.perf_counter() - started
    return make_report(out, complete.pack, source_bytes, writer.num_kept, errors, seconds)


def _name(model: str | Path, folder: Path) -> str:
    """What a person would call the model: a hub id or a shipped model's name, else the folder's."""
    is_name = folder.parent == SHIPPED or not Path(model).exists()
    return str(model) if is_name else folder.resolve().name


def _fill(
    writer: PackWriter,
    kept: list[TensorEntry],
    folder: Path,
    reader: SourceExperts,
    expert_format: ExpertFormat,
    pack: Pack,
    progress: Progress,
) -> None:
    kept_bytes = sum(entry.num_bytes for entry in kept)
    total = kept_bytes + pack.num_bytes
    progress(writer.num_kept * pack.record_bytes, total)
    with writer.errors():
        for path in text_files(folder):
            replace_file(writer.out / path.name, path.read_bytes())
        target = writer.out / SINGLE_FILE
        if target.exists():
            progress(kept_bytes, total)
        else:
            copy_tensors(
                sorted(kept, key=lambda entry: (entry.path, entry.offset)), target, lambda n: progress(n, total)
            )
    for record in reader.records(writer.missing(), expert_format):
        writer.append(record.numpy().data)
        progress(pack.record_bytes, total)
    writer.finish()
