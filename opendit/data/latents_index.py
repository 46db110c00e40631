"""The index of a folder of cached latents, and what all data sets of them share.

``index.json`` of safetensors files (version 1) is of pictures of one size; that of tars (version 2) holds one such
index for every size. It is written last: shards that no index names are unfinished.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from opendit.common.json_file import checked, read_json
from opendit.common.safe_files import replacing
from opendit.common.tensor_files import write_file
from opendit.common.utils import hash_parts, shown
from opendit.data.base import MediaDataset, flip_note
from opendit.data.latents_check import REPAIR, check_index
from opendit.data.latents_schema import LATENTS_INDEX, LATENTS_SIZES
from opendit.data.medium import Medium, of_moments

INDEX = "index.json"
FORMAT, FILES_VERSION, TARS_VERSION = "opendit-latents", 1, 2


@dataclass(frozen=True)
class ShardForm:
    """The format of a cache's shards. pattern: of their names. name: (shard, shards) -> a name. header: path ->
    (samples, settings, skipped files), None of what is no whole shard. write: (path, tensors, settings, skipped) ->
    its SHA-256; a shard that exists is complete. version: of the index."""

    pattern: str
    name: Callable[[int, int], str]
    header: Callable[[Path], tuple[int, dict[str, Any], list[str]] | None]
    write: Callable[[Path, dict[str, Any], dict[str, Any], list[str]], str]
    version: int = FILES_VERSION


def check_indexes(index: Any, source: str) -> list[dict[str, Any]] | None:
    """The indexes, checked, in what an index.json says, one for each size; None if it is something else's. Raises
    ValueError for one that can't be true, and for another version's."""
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    version = index.get("version")
    if version not in (FILES_VERSION, TARS_VERSION):
        raise ValueError(
            f"--data_path {Path(source).parent}: its latents have format version {shown(version)}, this program reads "
            f"{FILES_VERSION} and {TARS_VERSION}; make them again with preprocess.py latents"
        )
    kind = LATENTS_INDEX if version == FILES_VERSION else LATENTS_SIZES
    index = checked(index, kind, Path(source))
    found = [index] if version == FILES_VERSION else index["sizes"]
    for each in found:
        check_index(each, Path(source))
    return [{**each, "version": version} for each in found]


def read_indexes(folder: Path) -> list[dict[str, Any]] | None:
    """Read and check the indexes of a folder, see :func:`check_indexes`; None if there are none. Raises ValueError for
    a damaged one."""
    path = folder / INDEX
    try:
        content = read_json(path, LATENTS_SIZES.most_bytes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if any(folder.glob("latents-*.safetensors")) or any(folder.glob("latents-*.tar")):
            raise ValueError(f"{path} can't be read ({error}); {REPAIR}") from error
        return None
    return check_indexes(content, str(path))


def choose_index(indexes: list[dict[str, Any]], name: str, image_size: int) -> dict[str, Any]:
    """That of pictures of this size. Raises ValueError, which begins with ``name``."""
    found = next((index for index in indexes if index["image_size"] == image_size), None)
    if found is None:
        sizes = [str(index["image_size"]) for index in indexes]
        raise ValueError(
            f"{name}: holds latents made at --image_size {' and '.join(sizes)}, but this run has --image_size "
            f"{image_size}; pass --image_size {' or '.join(sizes)} or make latents for {image_size}"
        )
    return found


def write_index(folder: Path, version: int, indexes: list[dict[str, Any]]) -> None:
    """Write the index: in version 1 the only one of ``indexes``, in version 2 all, the smallest pictures first."""
    plain = [{key: value for key, value in index.items() if key not in ("format", "version")} for index in indexes]
    content: dict[str, Any] = {"sizes": sorted(plain, key=lambda index: index["image_size"])}
    content = plain[0] if version == FILES_VERSION else content
    text = json.dumps({"format": FORMAT, "version": version, **content}, indent=1) + "\n"
    with replacing(folder / INDEX, temporary=INDEX + ".partial") as new:
        write_file(new, iter([text.encode()]))  # synced: else the new name may survive a power cut that it doesn't


class CachedLatents(MediaDataset):
    """The base of data sets of cached latents: all that follows from their index, for any kind of shards."""

    kind = "latents"

    def _take(
        self,
        index: dict[str, Any],
        name: str,
        random_flip: bool | None,
        use_video: bool,
        num_frames: int,
        frame_interval: int,
        fps: float | None,
    ) -> None:
        """Takes over what an index says. Raises ValueError, which begins with ``name``, for what a run asks for and the
        latents are not."""
        made = index.get("video")
        if use_video != (made is not None):
            what = (
                "clips; add --use_video"
                if made
                else ("pictures; make them again with preprocess.py latents --use_video, or leave --use_video out")
            )
            raise ValueError(f"{name}: holds latents of {what}")
        for flag, value in (("num_frames", num_frames), ("frame_interval", frame_interval), ("fps", fps)):
            if not made or (of_made := made.get(flag)) == value:
                continue
            if of_made is None or value is None:  # of a flag that one of them does not have
                there, here, fix = (
                    ("without", f"has --{flag} {value:g}", "leave it out")
                    if of_made is None
                    else (f"at --{flag} {of_made:g}", "does not have it", f"pass --{flag} {of_made:g}")
                )
                raise ValueError(
                    f"{name}: holds latents made {there}, but this run {here}; {fix} or make latents for it"
                )
            raise ValueError(
                f"{name}: holds latents made at --{flag} {of_made:g}, but this run has --{flag} {value:g}; pass "
                f"--{flag} {of_made:g} or make latents for {value:g}"
            )
        if random_flip and not index["flips"]:
            raise ValueError(f"{name}: holds no mirrored latents; make them again with --flip")
        self.index, self.vae = index, index["vae"]
        self.random_flip = index["flips"] if random_flip is None else random_flip
        self.class_names = index["class_names"]
        # One number, or one a channel, which JSON knows as a list only.
        scale_and_shift = index["scaling_factor"], index["shift_factor"]
        self.scaling_factor, self.shift_factor = (tuple(v) if isinstance(v, list) else v for v in scale_and_shift)
        channels, *sides = index["latent_shape"]
        self.sample_shape = (2 * channels, *sides)
        self.conditioning = index.get("conditioning", "label")

    def frame_rates(self) -> list[float]:
        return [self.index["data_fps"]] if "data_fps" in self.index else []

    @property
    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each file that the index has one of."""
        of_shards = {shard["file"]: shard["sha256"] for shard in self.index["shards"] if "sha256" in shard}
        return of_shards | self.index.get("checksums", {})

    def identity(self) -> str:
        # Without checksums and counts: a cache of an earlier version has none, and is the same one when it gets them.
        shards = [{key: value for key, value in shard.items() if key != "sha256"} for shard in self.index["shards"]]
        index = {key: value for key, value in self.index.items() if key not in ("checksums", "captions")}
        return hash_parts(json.dumps({**index, "shards": shards}, sort_keys=True))

    def cached_captions(self) -> list[str]:
        if self.text_encoder is None:
            return []
        most = f"the {self.max_tokens:,} tokens of --text_encoder {self.text_encoder}"
        if (found := self.index.get("captions")) is None:
            return [f"captions: an earlier version embedded them, and did not count those that it cut to {most}"]
        if not found["cut"]:
            return []
        among = f"of the {found['counted']:,} looked at among {found['rows']:,}"
        return [
            f"captions: {found['cut']:,} {among} were cut to {most} when they were embedded; the longest had "
            f"{found['longest']:,}"
        ]

    def _looked(self, moments: Tensor) -> tuple[Medium, np.ndarray]:
        """Latents in false colours; the medium is the picture or clip that they were made of."""
        video, size = self.index.get("video"), self.index["image_size"]
        length = video["num_frames"] if video and moments.shape[1] == self.sample_shape[1] else 1
        return Medium(length, size, size), of_moments(moments)[1]

    def _described(self, name: str, clips: int) -> str:
        shape, size = "x".join(map(str, self.index["latent_shape"])), self.index["image_size"]
        what = f"{len(self):,} pictures"
        if self.index.get("video"):
            what = f"{clips:,} clips" + (f" and {len(self) - clips:,} pictures" if clips < len(self) else "")
        text = f"with captions ({f'encoded by {self.text_encoder}' if self.text_encoder else 'not encoded'})"
        words = text if self.conditioning == "text" else f"of {self.num_classes:,} classes"
        unchecked = "" if self.checksums else ", without checksums (made by an earlier version)"
        return (
            f"{name}: cached latents ({shape}, --vae {self.vae}) of {what} {words}, {size}x{size}, "
            f"{flip_note(self)}{unchecked}{self.note}"
        )
