"""From what a user calls a model to a local folder; downloads from the hub what the index names."""

from __future__ import annotations

import re
from pathlib import Path

from relume.checkpoint.folder import CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, shard_names
from relume.checkpoint.json_file import exists
from relume.checkpoint.pack import PACK_FILE
from relume.checkpoint.tokenizer import TOKENIZER_FILES
from relume.core import RelumeError

#: Models that come with the package, each a folder named as users call it.
SHIPPED = Path(__file__).parent.parent / "shipped"

_HUB_ID = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}(?<![.-])")


def resolve_model(
    model: str | Path, revision: str | None = None, offline: bool = False, weights: bool = True
) -> Path:
    """The folder of `model`: a shipped one (`demo`, `demo-dmoe`), a path, or a hub id `organisation/name`.

    A hub id is downloaded, or an interrupted download resumed.

    Args:
        model: a shipped model's name wins over a folder (write `./demo` for that), a folder over a hub id.
        revision: branch, tag or commit on the hub.
        offline: use only what was downloaded before.
        weights: also fetch the shards, not only configuration, index and tokenizer.

    Raises:
        RelumeError: neither a folder nor a hub id, or the download failed.
    """
    shipped = {folder.name: folder for folder in SHIPPED.iterdir()}
    path = shipped.get(str(model), Path(model))
    if exists(path) or not _HUB_ID.fullmatch(str(model)):
        if revision is not None:
            raise RelumeError(f"{model}: a local folder has no revision; leave --revision out")
        if not exists(path):
            raise RelumeError(f"{model}: no such folder, and not a hub id of the form organisation/name")
        return path
    return _download(str(model), revision, offline, weights)


def _download(hub_id: str, revision: str | None, offline: bool, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(names: list[str]) -> Path:
        # The library resumes partial files and shows its own progress in bytes.
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=names, local_files_only=offline))

    try:
        folder = fetch([CONFIG_FILE, GENERATION_CONFIG_FILE, INDEX_FILE, PACK_FILE, *TOKENIZER_FILES])
        return fetch(shard_names(folder)) if weights else folder
    except GatedRepoError:
        raise RelumeError(
            f"{hub_id}: access is gated; accept its terms on the hub and log in (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise RelumeError(f"{hub_id}: the hub has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise RelumeError(
            f"{hub_id}: no folder here and no model on the hub has this name (or it is private)"
        ) from None
    except LocalEntryNotFoundError:
        way_out = (
            "download it once without --offline" if offline else "check the network and try again; it resumes"
        )
        raise RelumeError(
            f"{hub_id}: not all of it is on this machine and the hub was not reached; {way_out}"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RelumeError(f"{hub_id}: the download failed ({reason}); run it again to resume") from None
