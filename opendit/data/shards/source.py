"""Open a folder of tars, or a single tar, as a data set."""

import shlex
from collections.abc import Sequence

from opendit.common.json_file import parse_json
from opendit.common.json_models import checked
from opendit.common.utils import DataError
from opendit.data.files import Ignored, list_folder, name_few, printable
from opendit.data.latents import LatentDataset
from opendit.data.latents_index import choose_index
from opendit.data.picture_file import picture_suffixes
from opendit.data.shards.dataset import IndexedTar, ShardDataset
from opendit.data.shards.index import CLASS_NAMES, NAMES_OF_CLASSES, TarIndex, index_of, read_class_names
from opendit.data.shards.latents import check_tar, fetch_latents_indexes
from opendit.data.shards.store import FileCache, Remote, RemoteTars, expand, fetch_indexes, size_problem
from opendit.data.sources import Request
from opendit.data.text_cache import EMPTY, MOST_EMPTY, read_empty_caption


def open_source(asked: Request) -> ShardDataset | None:
    if asked.path is None:
        return _open_remote(asked)
    folder, ignored = asked.path, Ignored()
    if folder.is_dir():
        names, folders = list_folder(str(folder), picture_suffixes() | {".tar"}, ignored)
        tars = [folder / name for name in names if name.lower().endswith(".tar")]
        # A folder of pictures may also contain unrelated tars.
        if not tars or len(tars) < len(names) + len(folders) and not any(index_of(tar).exists() for tar in tars):
            return None
    elif folder.suffix.lower() == ".tar":
        tars, folder = [folder], folder.parent
    else:
        return None
    if missing := [printable(tar.name) for tar in tars if not index_of(tar).exists()]:
        raise ValueError(
            f"{asked.shown}: no index beside {name_few(missing)}; make it: python preprocess.py index "
            f"{shlex.quote(printable(folder))}"
        )
    shards = []
    for tar in tars:
        try:
            index = TarIndex(index_of(tar))
            if (size := tar.stat().st_size) != index.header.tar_bytes:
                raise ValueError(size_problem(str(tar), size, index.header.tar_bytes))
        except (ValueError, OSError) as error:
            raise ValueError(f"{asked.shown}: {error}") from error
        shards.append(IndexedTar(str(tar), str(tar), index))
    return _dataset(asked, shards, read_class_names(folder))


def _open_remote(asked: Request) -> ShardDataset:
    remote, cache = Remote(asked.data_path), FileCache.of_environment()
    try:
        found = expand([asked.data_path])
        if (latents := _open_latents(asked, remote, cache)) is not None:
            return latents
        tars = remote.list_tars(asked.data_path) if not found[0].lower().endswith(".tar") else found
        if not tars:
            raise ValueError("holds no .tar files; give s3://BUCKET/FOLDER, or http://HOST/train-{0000..0099}.tar")
        indexes = [TarIndex(path) for path in fetch_indexes(tars, remote, cache)]
        path = f"{tars[0].rpartition('/')[0]}/{CLASS_NAMES}"
        content = remote.read_if_there(path, NAMES_OF_CLASSES.most_bytes)
        names = () if content is None else checked(parse_json(content, path), NAMES_OF_CLASSES, path)
    except (DataError, ValueError, OSError) as error:
        raise ValueError(f"{asked.shown}: {str(error).removeprefix(f'{asked.shown}: ')}") from error
    contents = [index.header.sha256 for index in indexes]
    shards = [IndexedTar(tar, tar, index) for tar, index in zip(tars, indexes, strict=True)]
    sizes = [index.header.tar_bytes for index in indexes]
    return _dataset(asked, shards, names, RemoteTars(tars, contents, sizes, remote, cache))


def _open_latents(asked: Request, remote: Remote, cache: FileCache) -> LatentDataset | None:
    """Open cached latents in tars behind an address. Return None if their folder has no index.json.

    Raises ValueError, DataError or OSError."""
    folder, indexes = asked.data_path.rstrip("/"), fetch_latents_indexes(asked.data_path, remote)
    if indexes is None:
        return None
    index = choose_index(indexes, asked.shown, asked.image_size)
    addresses = [f"{folder}/{shard['file']}" for shard in index["shards"]]
    found, tars = [TarIndex(path) for path in fetch_indexes(addresses, remote, cache)], []
    for address, each, shard in zip(addresses, found, index["shards"], strict=True):
        tars.append(IndexedTar(address, address, check_tar(each, shard, address)))
    kept = [tar for tar in tars if len(tar)]
    contents, sizes = ([getattr(tar.index.header, what) for tar in kept] for what in ("sha256", "tar_bytes"))
    store, empty = RemoteTars([tar.path for tar in kept], contents, sizes, remote, cache), None
    if text := index.get("text"):
        name = f"{folder}/{EMPTY}"
        empty = read_empty_caption(remote.read_all(name, MOST_EMPTY), text, name)
    options = asked.of_latents() | {"empty_caption": empty, "max_bad": asked.max_bad}
    return LatentDataset(asked.shown, index, tars, store=store, **options)


def _dataset(
    asked: Request, shards: list[IndexedTar], names: Sequence[str], store: RemoteTars | None = None
) -> ShardDataset:
    return ShardDataset(asked.shown, shards, asked.image_size, store=store, class_names=names, **asked.of_clips())
