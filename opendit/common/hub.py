"""Find models on the Hugging Face hub by name: OWNER/NAME or OWNER/NAME@REVISION.

Models are read from the hub's local cache, and downloaded only on request.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any

from opendit.common.utils import sha256_of

# Files to download for a network or a pipeline's folders. A pipeline stored as a single file is not downloaded.
WANTED = ["model_index.json", "config.json", "diffusion_pytorch_model*.json", "diffusion_pytorch_model*.safetensors"]
WANTED += [f"*/*.{kind}" for kind in ("json", "safetensors", "txt", "model", "jinja")]
UNWANTED = ["*.fp16.*", "*.bf16.*", "*.fp16-*", "*.bf16-*"]  # half-precision variants are not used
NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w][\w./-]{0,199}))?", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")


def on_hub(name: str) -> tuple[str, str | None] | None:
    """Return (OWNER/NAME, REVISION or None), or None for an existing path or any other text."""
    found = NAME.fullmatch(name)
    if found is None or ".." in name or Path(name).expanduser().exists():
        return None
    return found[1], found[2]


def fetched(name: str, flag: str, download: bool, commit: str | None = None) -> str:
    """Return the local folder of a model on the hub. Any other ``name`` is returned unchanged.

    Args:
        flag: the flag that has the value ``name``, for messages.
        download: download the model, or its missing files, from the hub.
        commit: commit to use if ``name`` has no @REVISION, for a resumed run. A cached commit needs no network.

    Raises:
        ValueError: a download is needed, but ``download`` is False or the download failed.
    """
    asked = on_hub(name)
    if asked is None:
        return name
    repository, revision = asked
    if commit is not None and revision in (None, commit):
        revision = commit
    if revision is not None and COMMIT.fullmatch(revision) and (there := cached(repository, revision)):
        return there
    if not download:
        raise ValueError(
            f"{flag} {name}: doesn't exist; name a file or folder that does, or add --download if it is a model on the "
            "hub"
        )
    return download_snapshot(repository, revision, f"{flag} {name}")


def cached(repository: str, commit: str) -> str | None:
    from huggingface_hub import snapshot_download

    try:
        options: dict[str, Any] = dict(allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True)
        return str(snapshot_download(repository, revision=commit, **options))
    except Exception:  # some files are not in the cache, but the hub may have them
        return None


@functools.cache  # flags are resolved several times, and each time must get one commit
def download_snapshot(repository: str, revision: str | None, what: str) -> str:
    """Download a revision from the hub and return its snapshot folder. ``what`` begins a ValueError's message."""
    from huggingface_hub import constants, errors, snapshot_download

    place = f"{repository} on the hub"
    try:
        probe_hub(constants.ENDPOINT)  # fail early, because a download tries six times with growing pauses
        options: dict[str, Any] = dict(allow_patterns=WANTED, ignore_patterns=UNWANTED)
        folder = Path(snapshot_download(repository, revision=revision, **options))
    except errors.GatedRepoError:
        why = f"{place} is gated; accept its terms on its page, then log in with: hf auth login"
    except errors.RevisionNotFoundError:
        why = f"{place} has no revision {revision}"
    except errors.RepositoryNotFoundError:
        why = f"there is no {place}, or it is private and you are not logged in"
    except Exception as error:  # errors of requests, httpx and the hub
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        why = f"the hub can't be reached, or broke off ({type(error).__name__}: {reason}); name a folder instead"
    else:
        if (folder / "model_index.json").is_file() or (folder / "config.json").is_file():
            return str(folder)
        why = f"{place} has no model_index.json or config.json, as diffusers writes them"
    raise ValueError(f"{what}: {why}")


def probe_hub(endpoint: str) -> None:
    """Raise an exception if HF_HUB_OFFLINE is set, or the hub does not answer within 5 seconds."""
    from huggingface_hub.utils import get_session

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConnectionError("HF_HUB_OFFLINE is set")
    get_session().head(endpoint, timeout=5)


def snapshot_of(folder: str | Path) -> tuple[Path, str, str] | None:
    """Return (snapshot's folder, OWNER/NAME, commit) if ``folder`` is a cached snapshot or is in one, else None."""
    real = Path(folder).expanduser().resolve()
    for path in (real, *real.parents[:1]):
        owner, dashes, name = path.parent.parent.name.removeprefix("models--").partition("--")
        if path.parent.name == "snapshots" and dashes and path.parent.parent.name.startswith("models--"):
            return path, f"{owner}/{name}", path.name
    return None


def folder_name(folder: str | Path) -> str:
    snapshot = snapshot_of(folder)
    return Path(folder).expanduser().resolve().name if snapshot is None else snapshot[1].partition("/")[2]


def origin(folder: str | Path) -> dict[str, Any] | None:
    """Return repository, commit and file hashes of a folder in the hub's cache; None for another folder.

    A snapshot's files are links to files that are named by hash: SHA-256 for large files, else git's SHA-1.
    """
    snapshot = snapshot_of(folder)
    if snapshot is None:
        return None
    place, repository, commit = snapshot
    files = sorted(path for path in place.rglob("*") if path.is_file())
    hashes = [path.resolve().name if path.is_symlink() else sha256_of(path) for path in files]
    names = [str(path.relative_to(place)) for path in files]
    return {"repository": repository, "commit": commit, "files": dict(zip(names, hashes, strict=True))}
