"""Write weights of a public model as a folder that diffusers loads.

The result is a copy of the published folder with other weights. The configuration and the other components do not
change. The weights have the published names, shapes and dtypes.
"""

import fnmatch
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from torch import Tensor

from opendit.checkpoint.files import file_id
from opendit.checkpoint.lora import Merged, of_run
from opendit.checkpoint.pretrained import read_newest
from opendit.checkpoint.published import STEM, TRANSFORMER, PublishedFolder, is_published, network_of, open_published
from opendit.checkpoint.run_folders import low_noise_of
from opendit.checkpoint.tensor_set import write_weights
from opendit.common.safe_files import link_or_copy, make_folder, refuse_links, remove_tree, rename, sync_folder
from opendit.config.names import WHOLE
from opendit.encoders.folder import CONFIG, PICKLES, PIPELINE_INDEX
from opendit.models.families.base import Family
from opendit.models.lora import check_lora
from opendit.models.weights import Weights

LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
NOT_TAKEN = ("*.py", "*.pyc", *PICKLES)  # files that are never copied: code, and files that run code on loading
MOST_FILES = 10_000  # maximum number of files of a component


def caption_length(weights: Weights, family: Family, notes: list[str]) -> dict[str, str]:
    """Return metadata with the maximum number of caption tokens, and add a message for the user to ``notes``, if a run
    was trained with another number than the default of diffusers' pipeline; otherwise return {}."""
    text = None if weights.config is None else weights.config.text
    if text is None or text.max_tokens == family.text.tokens:
        return {}
    count = text.max_tokens - family.text.beside
    notes.append(f"trained with captions of {count} tokens; give diffusers' pipeline max_sequence_length={count}")
    return {"max_sequence_length": str(count)}


def export_published(
    state: Mapping[str, Tensor],
    source: Path,
    base: PublishedFolder,
    output: Path,
    most_bytes: int,
    more: Mapping[str, str] | None = None,
    low: tuple[Mapping[str, Tensor], Path, PublishedFolder] | None = None,
) -> list[str]:
    """Write a folder that diffusers loads: ``base`` with other weights.

    The files of other components are hard links to the files in ``base`` if both are on one disk, else copies. The new
    folder gets its final name, and replaces an existing folder, after all files are written.

    Args:
        state: weights by OpenDiT's names.
        source: path of the weights, for messages.
        base: the public model's folder.
        most_bytes: largest size of a weights file.
        more: further metadata of the weights file.
        low: ``state``, ``source`` and ``base`` of the low-noise network, if both networks of a pipeline are written.

    Returns:
        The files of ``base`` that were not copied, because they hold code.

    Raises:
        ValueError: the weights do not fit ``base``, a file of ``base`` is a link out of the folder, or ``output`` holds
            something other than a pipeline. The message is one line.
        OSError: a file can't be written.
    """
    output = Path(os.path.abspath(output))
    root = output.parent
    refuse_links(root, [output.name])
    _check_output(output, (base.pipeline or base.transformer, source))
    networks = [(state, source, base), *([] if low is None else [low])]
    written = {
        each.transformer.name if each.pipeline else TRANSFORMER: (each.published(of, path), each)
        for of, path, each in networks
    }
    new, old = (output.with_name(f".{output.name}.{os.getpid()}{end}") for end in ("", ".old"))
    remove_tree(new)
    for inside in written:
        make_folder(new / inside, root=root)
    try:
        left_out = []
        for path, place in _others(base):
            if place.parts[0] in written:
                continue
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in NOT_TAKEN):
                left_out.append(str(place))
                continue
            file_id(path, base.root)
            link_or_copy(path, new / place, root=root, make=True)
        for inside, (weights, each) in written.items():
            link_or_copy(each.transformer / CONFIG, new / inside / CONFIG, root=root)
            # Don't copy the metadata of the run, because they contain captions and paths.
            said = {"base": name_of(base), **({"license": base.family.license} if base.family.license else {})}
            metadata = {**said, **each.files.metadata, **(more or {}), "format": "pt"}
            write_weights(new / inside / (STEM + WHOLE), weights, metadata, most_bytes)
            sync_folder(new / inside, root=root)
        _take_place(new, output, old)
        sync_folder(root)
    finally:
        remove_tree(new)
    return left_out


def _check_output(output: Path, read: tuple[Path, ...]) -> None:
    """Raise ValueError unless the folder is empty or a pipeline, and contains none of the paths in ``read``."""
    if not output.exists():
        return
    inside = next((path for path in read if path.resolve().is_relative_to(output.resolve())), None)
    if inside is not None:
        raise ValueError(f"{output} would be replaced, and holds {inside}; name another place")
    known = (output / PIPELINE_INDEX, output / TRANSFORMER / CONFIG)
    if not output.is_dir() or (os.listdir(output) and not any(path.is_file() for path in known)):
        raise ValueError(f"{output} holds something else than a pipeline; name another place")


def _take_place(new: Path, output: Path, old: Path) -> None:
    """Rename the folder ``new`` to ``output``. An existing ``output`` is first renamed to ``old`` and finally
    removed."""
    if not output.exists() or not os.listdir(output):
        return rename(new, output)
    rename(output, old)
    try:
        rename(new, output)
    except OSError:
        rename(old, output)
        raise
    remove_tree(old)


def _others(base: PublishedFolder) -> Iterator[tuple[Path, Path]]:
    """Yield (file, path relative to the pipeline) for all files except those of the network.

    These are the components in model_index.json, the index itself, and licences.
    """
    if base.pipeline is None:
        return
    for path in sorted(base.pipeline.iterdir()):
        if path.name == PIPELINE_INDEX or any(fnmatch.fnmatch(path.name.upper(), pattern) for pattern in LICENCES):
            if path.is_file():
                yield path, Path(path.name)
    named = base.index if base.index is not None else base.family.components
    for name in sorted(named):
        if name == base.transformer.name or not isinstance(named[name], list | tuple) or not _is_plain(name):
            continue
        found = 0
        for parent, folders, names in os.walk(base.pipeline / name):
            folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
            for file in sorted(names):
                if (found := found + 1) > MOST_FILES:
                    raise ValueError(f"{base.pipeline / name} has more than {MOST_FILES:,} files")
                if not file.startswith("."):
                    yield Path(parent) / file, Path(parent, file).relative_to(base.pipeline)


def _is_plain(name: str) -> bool:
    """Return True if ``name`` contains no folders, so that it can't lead out of the pipeline's folder."""
    return bool(name) and not name.startswith(("_", ".")) and os.sep not in name and "\0" not in name


def name_of(base: PublishedFolder) -> str:
    """Return the name of a public model's folder for metadata.

    In the Hugging Face cache, the name is REPOSITORY@COMMIT. Elsewhere it is the folder's own name.
    """
    folder = (base.pipeline or base.transformer).resolve()
    for path in (folder, folder.parent):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/')}@{path.name}"
    return folder.name if base.pipeline or folder.name != TRANSFORMER else folder.parent.name


def export_run(
    ckpt: str, output: Path, base: str, families: Mapping[str, Family], most_bytes: int, which: str = "ema"
) -> list[str]:
    """Convert a checkpoint or a run of a public model to a folder that diffusers loads (see :func:`export_published`).

    Args:
        ckpt: a checkpoint, a run (whose newest intact checkpoint is read), a weights file, or a public model's folder.
        base: the public model's folder. The user must name it, because a path in a checkpoint is not trusted.
        families: name -> known family.
        which: the set of weights of a checkpoint.

    Returns:
        Messages for the user.

    Raises:
        ValueError, FileNotFoundError: the weights are missing, damaged, or belong to another model.
        OSError: a file can't be written.
    """
    notes: list[str] = []
    if is_published(ckpt, families):
        weights = Weights(open_published(ckpt, families).tensors(), Path(ckpt))
    else:
        weights = read_newest(ckpt, which, notes)
    networks: list[tuple[Mapping[str, Tensor], Path, PublishedFolder]] = []
    with ExitStack() as stack:
        for each in [
            weights,
            *([] if (low := low_noise_of(weights.path)) is None else [read_newest(low, which, notes)]),
        ]:
            opened = stack.enter_context(closing(open_published(network_of(base, each.config), families)))
            state = each.state
            if "lora" in each.info:
                check_lora(each)
                state = Merged(opened.tensors(), *of_run(each))
            networks.append((state, each.path, opened))
        (high, *low), length = networks, caption_length(weights, networks[0][2].family, notes)
        left_out = export_published(*high, output, most_bytes, length, low[0] if low else None)
    return notes + [f"{Path(base) / name} holds code, or may; it was left out" for name in left_out]
