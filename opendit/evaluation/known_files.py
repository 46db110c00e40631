"""Files of feature networks that the field's figures rest on: where they come from, and the SHA-256 that they have."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

_INCEPTION = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


@dataclass(frozen=True)
class KnownFile:
    """A file by its usual name. sha256: None where none has been published, so that any is taken."""

    name: str
    sha256: str | None
    address: str
    clips: bool = False


KNOWN = (
    KnownFile(
        "pt_inception-2015-12-05-6726825d.pth",
        _INCEPTION,
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
    ),
    KnownFile(
        "weights-inception-2015-12-05-6726825d.pth",
        _INCEPTION,
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
    ),
    KnownFile(
        "inception-2015-12-05.pt",
        None,
        "https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
    ),
    KnownFile(
        "i3d_torchscript.pt",
        "bec6519f66ea534e953026b4ae2c65553c17bf105611c746d904657e5860a5e2",
        "https://www.dropbox.com/s/ge9e5ujwgetktms/i3d_torchscript.pt?dl=1",
        clips=True,
    ),
)


def default_folder() -> Path:
    """Return the folder of torch.hub, where torch-fidelity and pytorch-fid put their files too."""
    return Path(torch.hub.get_dir()) / "checkpoints"


def find_default(clips: bool, flag: str) -> Path:
    """The known network of pictures, or of clips, in its usual folder. Nothing is downloaded.

    Raises FileNotFoundError with the file that is missing, its address, and where to put it.
    """
    files = [file for file in KNOWN if file.clips == clips]
    for file in files:
        if (path := default_folder() / file.name).is_file():
            return path
    raise FileNotFoundError(
        f"{flag}: no network of features is there; fetch {files[0].address} and put it into {default_folder()}, or "
        f"give {flag} PATH"
    )


def check_known(path: Path, sha256: str) -> None:
    """Raises ValueError for a file that has a known name and other contents."""
    for file in KNOWN:
        if path.name == file.name and file.sha256 not in (None, sha256):
            raise ValueError(
                f"{path} has the SHA-256 {sha256}, and the file of this name that figures rest on has {file.sha256}: "
                f"it is damaged, or another. Fetch it again ({file.address}), or rename it to use it as it is"
            )


def is_known(sha256: str) -> bool:
    return any(file.sha256 == sha256 for file in KNOWN)


def shown(path: str | os.PathLike[str]) -> str:
    """A file's or folder's own name, for results."""
    return Path(path).resolve().name
