"""Faults: untrusted data sets (YAML, tars, indexes, web servers) that would take unlimited time or memory."""

import http.server
import io
import os
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.faults.lab import Lab, add, fault
from benchmarks.faults.materials import pictures
from benchmarks.faults.media import train_on

BLOCK, GIB = tarfile.BLOCKSIZE, 1 << 30

# ------------------------------------------------------------------------------------------ YAML


def refused_yaml(text: str, says: str) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        path = lab.folder / "blend.yaml"
        path.write_text(text)
        lab.refused(train_on(lab, path), f"error: .*blend.yaml.*{says}")

    return make


def laughs(line: str) -> str:
    """Return ten lines, each with nine aliases of the line before."""
    lines = ["a0: &a0 " + ("{k: 1}" if "<<" in line else "[x]")]
    lines += [f"a{i}: &a{i} " + line.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 10)]
    return "\n".join(lines)


YAML = {
    "yaml_brackets": ("50,000 opening brackets", "[" * 50_000, "line 1: nested more than"),
    "yaml_dashes": ("500,000 dashes in a row", "- " * 500_000, "nested more than"),
    "yaml_aliases": ("aliases that repeat each other", laughs("[{}]"), "aliases"),
    "yaml_merges": ("merge keys that repeat each other", laughs("{{<<: [{}]}}"), "aliases"),
    "yaml_circle": ("a list inside of itself", "sources: &s [*s]", "line 1: .*inside of what it repeats"),
    "yaml_tag": ("a truth value that is none", "sources: !!bool maybe", "line 1: the tag .*bool is not read"),
    "yaml_python": ("a tag that calls a program", "!!python/object/apply:os.system [true]", "line 1: the tag"),
    "yaml_date": ("a date as a weight", "sources: [{path: a, weight: 2024-99-99}]", "must be a number above 0"),
    "yaml_twice": ("a key twice", "sources: 1\nsources: 2", "line 2: the key .*twice"),
}
for _name, (_what, _text, _says) in YAML.items():
    add(_name, "sets", f"a blend of {_what}", refused_yaml(_text, _says))


@fault("metadatasets that name each other, eight wide and eight deep")
def metadatasets_wide_and_deep(lab: Lab) -> None:
    prepared = lab.folder / "set" / ".nv-meta"
    prepared.mkdir(parents=True)
    (prepared / ".info.json").write_text('{"shard_counts": {"0.tar": 1}}')
    for level in range(8):
        entry = f"    - {{path: ./{f'{level + 1}.yaml' if level < 7 else 'set'}}}\n"
        head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        (lab.folder / f"{level}.yaml").write_text(head + entry * 8)
    lab.refused(train_on(lab, lab.folder / "0.yaml"), "error: .*leads to more than 1,000 folders")


# ------------------------------------------------------------------------------------------ tars


def tars(lab: Lab) -> Path:
    """Create a folder with one tar of eight pictures with classes 0 and 1, without an index, for this fault."""
    folder, source = lab.folder / "tars", pictures(lab)
    folder.mkdir()
    with tarfile.open(folder / "x.tar", "w") as tar:
        for number, path in enumerate(sorted(source.glob("*/0[0-3].png"))):
            for name, content in ((f"{number}.png", path.read_bytes()), (f"{number}.cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return folder


def index(lab: Lab, folder: Path) -> None:
    program = lab.start("preprocess.py", "index", folder, "--num_workers", 1)
    lab.programs.wait(lambda: program.code() is not None, 60, "preprocess.py index")
    if program.code():
        raise RuntimeError(program.said())


def refused_tar(content: Callable[[], bytes], says: str, size: int = 0) -> Callable[[Lab], None]:
    """Return a fault: the index command must refuse a tar with these bytes, followed by a hole up to ``size``."""

    def make(lab: Lab) -> None:
        folder = lab.folder / "tars"
        folder.mkdir()
        (folder / "x.tar").write_bytes(content())
        os.truncate(folder / "x.tar", max(size, len(content())))
        lab.refused(lab.start("preprocess.py", "index", folder, "--num_workers", 1), f"error: .*x.tar .*{says}")

    return make


def header(kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo("a.png")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def extensions() -> bytes:
    return (header(tarfile.GNUTYPE_LONGNAME, 5) + b"a.png".ljust(BLOCK, b"\0")) * 20_000


add(
    "tar_pax_10_gb",
    "sets",
    "a tar with a PAX header of 10 GB",
    refused_tar(lambda: header(tarfile.XHDTYPE, 10 * GIB), "extension header of", 11 * GIB),
)
add(
    "tar_name_10_gb",
    "sets",
    "a tar with a name of 10 GB",
    refused_tar(lambda: header(tarfile.GNUTYPE_LONGNAME, 10 * GIB), "extension header of", 11 * GIB),
)
add("tar_chain", "sets", "a tar of 20,000 headers that extend one another", refused_tar(extensions, "read as a tar"))


def forged(row: int, says: str, **values: int) -> Callable[[Lab], None]:
    """Return a fault: one record of an index has other values, and training must not begin."""

    def make(lab: Lab) -> None:
        from opendit.data.shards.index import TarIndex, index_of, write_index

        folder = tars(lab)
        index(lab, folder)
        found = TarIndex(index_of(folder / "x.tar"))
        rows, keys = np.array(found.rows), found.path.read_bytes()[-found.header.key_bytes :]
        for name, value in values.items():
            rows[name][row] = value
        write_index(found.path, found.header, rows, keys)
        lab.refused(train_on(lab, folder), f"error: .*x.tar.index is damaged: .*sample {row}.*{says}")

    return make


for _name, (_what, _values) in {
    "index_label": ("a class that the model has not", {"label": 2}),
    "index_suffix": ("a suffix that is not in its list", {"suffix": 9}),
    "index_end": ("a picture beyond the tar's end", {"medium_at": 1 << 40}),
}.items():
    add(_name, "sets", f"an index of a tar, one record of which has {_what}", forged(3, "out of range", **_values))


@fault("labels beyond the names of the classes")
def label_without_name(lab: Lab) -> None:
    folder = tars(lab)
    index(lab, folder)
    (folder / "class_names.json").write_text('["cat"]')
    lab.refused(train_on(lab, folder), "error: .*the labels go to 1 .*x.tar: 1")


@fault("a named pipe in the place of a tar's index")
def pipe_as_index(lab: Lab) -> None:
    folder = tars(lab)
    os.mkfifo(folder / "x.tar.index")
    lab.refused(train_on(lab, folder), "error: .*x.tar.index is no regular file")


@fault("a named pipe in the place of a tar that is indexed")
def pipe_as_tar(lab: Lab) -> None:
    folder = tars(lab)
    (folder / "x.tar").unlink()
    os.mkfifo(folder / "x.tar")
    lab.refused(lab.start("preprocess.py", "index", folder), "error: .*x.tar is no regular file")


# ------------------------------------------------------------------------------------------ addresses


class WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """A web server that answers each request with the whole file."""

    def log_message(self, *_: object) -> None:
        pass


class Endless(WithoutRanges):
    """A web server whose files have no end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass


def served(handler: type[http.server.SimpleHTTPRequestHandler], says: str, code: int) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        folder = tars(lab)
        index(lab, folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/x.tar"
            cache = {"OPENDIT_SHARD_CACHE": str(lab.folder / "cache")}
            lab.refused(train_on(lab, address, **cache), f"error: .*x.tar.*{says}", code=code)
        finally:
            server.shutdown()
            server.server_close()

    return make


add("web_no_ranges", "sets", "a web server that does not know ranges", served(WithoutRanges, "requests of ranges", 1))
add("web_endless", "sets", "a web server whose answers have no end", served(Endless, "sent more than", 2))
for _name, _address in {"web_no_host": "http://", "s3_no_bucket": "s3://"}.items():
    add(
        _name,
        "sets",
        f"the address {_address}",
        lambda lab, address=_address: lab.refused(train_on(lab, address), f"error: .*{address}.*names no"),
    )
