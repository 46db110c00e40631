"""``preprocess.py index DIR --latents FORM``: the indexes of tars with latents that another program made."""

from pathlib import Path

from opendit.common.json_file import checked, open_regular, read_json
from opendit.common.utils import hash_parts
from opendit.data.energon.prepared import is_prepared
from opendit.data.files import printable
from opendit.data.latents_index import FORMAT, INDEX, TARS_VERSION, check_indexes, read_indexes, write_index
from opendit.data.pictures_and_clips import CLIP
from opendit.data.shards.dataset import IndexedTar, classes_of
from opendit.data.shards.fields import Fields
from opendit.data.shards.foreign_latents import SUFFIXES, arrays_of, choose_arrays
from opendit.data.shards.index import CLASS_NAMES, NAMES_OF_CLASSES, Header, TarIndex
from opendit.data.shards.program import count_tars, index_tars
from opendit.encoders.vae import PerChannel
from opendit.encoders.vae_folder import HUB
from opendit.encoders.video_vae import codec_scale, latent_frames, video_geometry

_LOOKED_AT = 100  # samples of which the first that can be read tells the array's name


def index_latents(
    root: str,
    form: str,
    *,
    vae: str = "ema",
    image_size: int = 256,
    use_video: bool = False,
    num_frames: int = 16,
    frame_interval: int = 1,
    fps: float | None = None,
    num_workers: int = 4,
    force: bool = False,
) -> None:
    """Makes the indexes of a folder of tars with latents of ``form`` (see ``foreign_latents``), which then is trained
    on as a folder that ``preprocess.py latents`` made. Of the VAE the configuration is read, not the weights.

    Raises ValueError, which says what to do, for tars that hold no latents of this form, VAE and size, or not all with
    captions or all with classes; OSError."""
    folder, shown = Path(root), f"DIR {printable(root)}"
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else []
    if not tars:
        raise ValueError(f"{shown}: holds no .tar files; give --latents a folder of them")
    if is_prepared(folder):
        raise ValueError(f"{shown}: was prepared by Energon; leave --latents out")
    if any("foreign" not in index for index in read_indexes(folder) or []):
        raise ValueError(f"{shown}: preprocess.py latents made these tars and their indexes; train with them")
    if vae not in HUB:
        vae = str(Path(vae).expanduser().resolve())  # for runs that start in other folders
    shape, scale, shift = _geometry(vae, image_size, num_frames if use_video else None)
    fields, plan = Fields(medium=SUFFIXES), hash_parts("latents of another program")
    indexes = index_tars(tars, fields, plan, num_workers=num_workers, force=force)
    headers = [index.header for index in indexes]
    conditioning = _conditioning(tars, headers, shown)
    names = _names(tars[0], indexes[0], form, shape, shown)
    shards = [
        {"file": tar.name, "count": header.rows, "bytes": header.tar_bytes, "sha256": header.sha256}
        | ({"shape_key": CLIP} if use_video else {})
        for tar, header in zip(tars, headers, strict=True)
    ]
    index = {
        "count": sum(header.rows for header in headers),
        "class_names": [] if conditioning == "text" else _class_names(folder, tars, indexes, shown),
        "image_size": image_size,
        "vae": vae,
        "scaling_factor": scale,
        "shift_factor": shift,
        "latent_shape": [shape[0] // 2, *shape[1:]],
        "flips": len(names) > 1,
        "shards": shards,
        "conditioning": conditioning,
        "foreign": {"form": form, "array": names[0]} | ({"mirrored": names[1]} if len(names) > 1 else {}),
    }
    if use_video:
        index["video"] = {"num_frames": num_frames, "frame_interval": frame_interval, "short_clips": "skip"}
        index["video"] |= {} if fps is None else {"fps": fps}
    check_indexes({"format": FORMAT, "version": TARS_VERSION, "sizes": [index]}, str(folder / INDEX))
    write_index(folder, TARS_VERSION, [index])
    size, arrays = "x".join(map(str, index["latent_shape"])), " and ".join(map(printable, names)) or ".npy files"
    what, words = "clips" if use_video else "pictures", "captions" if conditioning == "text" else "classes"
    print(
        f"latents ({size}; {form} in {arrays}) of {index['count']:,} {what} with {words} in {count_tars(len(tars))}: "
        f"train with --data_path {printable(root)} --image_size {image_size}"
    )


def _geometry(vae: str, image_size: int, frames: int | None) -> tuple[tuple[int, ...], PerChannel, PerChannel]:
    """((2C, [t,] h, w), scaling factor, shift factor). Raises ValueError or FileNotFoundError."""
    scale, shift = codec_scale(vae)
    channels, downscale, temporal = video_geometry(vae, 3)
    if image_size % downscale:
        raise ValueError(f"--image_size {image_size}: no multiple of {downscale}; --vae {vae} needs one")
    if frames is None and temporal > 1:
        raise ValueError(f"--vae {vae}: is of clips; add --use_video")
    length = () if frames is None else (latent_frames(frames, temporal, f"--vae {vae}"),)
    side = image_size // downscale
    return (2 * channels, *length, side, side), scale, shift


def _conditioning(tars: list[Path], headers: list[Header], shown: str) -> str:
    """Return "text" or "label"; latents without either have one class."""
    kinds = {header.conditioning: tar.name for tar, header in zip(tars, headers, strict=True)}
    if len(kinds) > 1:
        words = {"text": "captions", "label": "classes", "none": "neither captions nor classes"}
        each = " and ".join(f"{printable(name)} {words[kind]}" for kind, name in kinds.items())
        raise ValueError(f"{shown}: of its tars has {each}; keep them in folders of their own")
    return "text" if "text" in kinds else "label"


def _class_names(folder: Path, tars: list[Path], indexes: list[TarIndex], shown: str) -> list[str]:
    """Return them as the folder names them, or their numbers. Raises ValueError for a label that has no name."""
    path, names = folder / CLASS_NAMES, []
    if path.exists():
        names = checked(read_json(path, NAMES_OF_CLASSES.most_bytes), NAMES_OF_CLASSES, path)
    found = [IndexedTar(str(tar), str(tar), index) for tar, index in zip(tars, indexes, strict=True)]
    return classes_of(shown, found, names)


def _names(tar: Path, index: TarIndex, form: str, shape: tuple[int, ...], shown: str) -> tuple[str, ...]:
    """Those of ``choose_arrays``, by the first sample of a tar that can be read."""
    problem = "no samples"
    with open(open_regular(tar), "rb") as file:
        for row in range(min(_LOOKED_AT, index.header.rows)):
            record = index.record(row)
            file.seek(record.medium_at)
            try:
                arrays = arrays_of(file.read(record.medium_bytes), index.header.suffixes[record.suffix], shape)
                return choose_arrays(arrays, form, shape)
            except Exception as error:  # of a stranger's bytes
                problem = f"{printable(index.key(row))}: {printable(str(error))}"
    raise ValueError(
        f"{shown}: {printable(tar.name)} holds no latents as --latents {form}, --vae and --image_size say ({problem}); "
        "correct the flags, or call the array moments or latents"
    )
