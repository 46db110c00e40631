"""Tar headers are read as tarfile reads them, and forged tars are refused."""

import io
import os
import re
import tarfile
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendit.data.shards.index import BLOCK, MOST_EXTENSION, TarError, members, scan, split_name
from tests.data.shards.tars import picture

END = bytes(2 * BLOCK)
GIB = 1 << 30


def header(name=b"a.png", size=0, kind=b"0", prefix=b"", magic=b"ustar\x0000", size_field=None):
    """Return a header that is valid except for what the arguments change."""
    block = bytearray(BLOCK)
    block[: len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136] = b"%011o\0" % size if size_field is None else size_field
    block[136:148], block[156:157], block[257:265] = b"00000000000\0", kind, magic
    block[345 : 345 + len(prefix)] = prefix
    return sealed(block)


def sealed(block):
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(content=b"x", **options):
    return header(size=len(content), **options) + content + bytes(-len(content) % BLOCK)


def pax(*records, kind=b"x"):
    return member(b"".join(record(*each) for each in records), kind=kind, name=b"pax")


def record(key, value):
    length = len(key) + len(value) + 3
    while len(b"%d %s=%s\n" % (length, key, value)) != length:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def found(content):
    return list(members(io.BytesIO(content)))


def of_tarfile(path):
    with tarfile.open(path, "r:") as tar:
        return [(m.name, m.offset, m.offset_data, m.size) for m in tar if m.isreg()]


def of_ours(path):
    with open(path, "rb") as file:
        return [(m.name, m.offset, m.offset_data, m.size) for m in members(file) if m.isreg()]


NAMES = st.text(st.sampled_from("ab./é\n_- 0\udcff"), min_size=1, max_size=20).filter(lambda name: name.strip("/."))
LONG = st.tuples(NAMES, st.integers(1, 40)).map(lambda pair: "/".join([pair[0].strip("/")] * pair[1]))
KINDS = st.sampled_from([tarfile.REGTYPE] * 4 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(NAMES | LONG, st.binary(max_size=1100), KINDS, NAMES | LONG), min_size=1, max_size=6),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.booleans(),
)
def test_sound_tars_read_as_by_tarfile(tmp_path_factory, wanted, form, with_global):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    options = {"pax_headers": {"comment": "é" * 30}} if with_global and form == tarfile.PAX_FORMAT else {}
    with tarfile.open(path, "w", format=form, **options) as tar:
        for name, content, kind, target in wanted:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, target, 0.5  # PAX writes a record for a fractional time
            info.size = len(content) if kind == tarfile.REGTYPE else 0
            try:
                tar.addfile(info, io.BytesIO(content))
            except ValueError:  # too long for ustar
                continue
    assert of_ours(path) == of_tarfile(path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_more_than_8_gib(tmp_path, form):
    """GNU writes their size in binary, PAX in an extra header."""
    path, infos = tmp_path / "x.tar", [tarfile.TarInfo("a.mp4"), tarfile.TarInfo("b.mp4")]
    infos[0].size, infos[1].size = 9 * GIB, 3
    with open(path, "wb") as file:
        file.write(infos[0].tobuf(form))
        file.seek(9 * GIB, os.SEEK_CUR)
        file.write(infos[1].tobuf(form) + b"abc" + bytes(509) + END)
    assert of_ours(path) == of_tarfile(path) and of_ours(path)[0][3] == 9 * GIB


def test_old_and_odd_headers_read_as_by_tarfile(tmp_path):
    path = tmp_path / "x.tar"
    parts = [
        member(kind=b"\0", magic=bytes(8)),
        header(name=b"folder/", kind=b"\0", magic=bytes(8)),
        member(kind=b"7", name=b"c.png", prefix=b"under"),
        member(kind=b"Z", name=b"unknown"),
        header(kind=b"1", name=b"link.png", size=700),  # links have no content, whatever size they declare
        member(name=b"d.png", size_field=b"         1 \0"),
        pax((b"path", b"n\xff.png/"), (b"size", b"1")) + member(name=b"e"),
        member(b"long name.png\0", kind=b"L") + member(b"to", kind=b"K") + member(),
    ]
    path.write_bytes(b"".join(parts) + END)
    assert of_ours(path) == of_tarfile(path) and len(of_ours(path)) == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (header(kind=b"x", size=7 * GIB), "an extension header of 7,516,192,768 bytes"),
        (header(kind=b"L", size=7 * GIB), "an extension header of 7,516,192,768 bytes"),
        (header(kind=b"K", size=7 * GIB), "an extension header of 7,516,192,768 bytes"),
        (header(kind=b"g", size=7 * GIB), "an extension header of 7,516,192,768 bytes"),
        (header(kind=b"X", size=MOST_EXTENSION + 1), "an extension header of 1,048,577 bytes"),
        (header(kind=b"x", size_field=b"\x80" + b"\xff" * 11), "an extension header of 309,485,009"),
        (pax((b"path", b"a.png")) * 5000, "RecursionError"),
        (member(b"a.png", kind=b"L") * 5000, "RecursionError"),
        (pax((b"path", b"a.png")) + END, "can't be read as a tar (end of file header)"),
        (pax((b"size", b"-1")) + member() + END, "a.png has no valid size or name"),
        (pax((b"size", b"9" * 19)) + header() + END, "truncated inside of a.png"),
        (pax((b"path", b"a/" * 5000)) + member() + END, "has no valid size or name"),
        (pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0")) + member(b"0\n") + END, "a.png with holes"),
        (pax((b"GNU.sparse.map", b"0,1" * 9)) + member() + END, "stores a.png with holes"),
        (member(kind=b"S"), "stores a.png with holes"),
        (member() + header(size_field=b"\xff" * 12) + END, "a negative size"),
        (member() + header(size_field=b"-0000000001\0") + END, "a negative size"),
        (member() + header(size_field=b"\x80" + b"\xff" * 11, kind=b"Z"), "truncated inside of a.png"),
        (member() + header(size=10), "truncated inside of a.png"),
        (member(), "no end-of-archive mark"),
        (member() + b"x" * BLOCK + END, "no member's header at byte 1,024"),
        (member()[:-1], "truncated or damaged after byte"),
        (b"x" * 2000, "can't be read as a tar"),
        (b"", "can't be read as a tar (empty"),
    ],
)
def test_forged_tars_are_refused_in_little_memory(tmp_path, content, says):
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    if "extension header of" in says:
        os.truncate(path, 8 * GIB)  # a hole: reading what the header declares would take all memory
    tracemalloc.start()
    begin = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        scan(path)
    assert tracemalloc.get_traced_memory()[1] < 30 << 20 and time.monotonic() - begin < 30
    tracemalloc.stop()
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_byte_that_is_changed_gives_a_tar_or_one_error(data):
    content = bytearray(pax((b"path", b"n.png")) + member() + member(b"long.png", kind=b"L") + member() + END)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # make the headers' checksums right again
        for at in (0, 1024, 2048, 3072):
            content[at : at + BLOCK] = sealed(content[at : at + BLOCK])
    try:
        found(bytes(content))
    except TarError:
        pass


WEBDATASET = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
META = re.compile(r"__[^/]*__($|/)")


@settings(deadline=None, max_examples=2000)
@given(st.text(st.sampled_from("aB./\n_"), max_size=12))
def test_names_are_cut_as_webdataset_cuts_them(name):
    cut = None if META.match(name) else WEBDATASET.match(name)
    assert split_name(name, True) == (cut and cut.groups())


@pytest.mark.parametrize("name", ["a/" * 10**6, "a/" * 10**6 + ".b", "a./" * 10**6 + "b", "__/" * 10**6, "_" * 10**6])
def test_names_with_many_slashes_take_no_time(name):
    begin = time.monotonic()
    split_name(name)
    assert time.monotonic() - begin < 30


def test_a_pipe_or_socket_in_place_of_a_tar(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(ValueError, match="x.tar is no regular file"):
        scan(tmp_path / "x.tar")
    (tmp_path / "y.tar").mkdir()
    with pytest.raises(ValueError, match="y.tar is no regular file"):
        scan(tmp_path / "y.tar")


def test_long_lists_of_what_is_left_out_stay_short(tmp_path):
    """An index with a very long example could not be read again."""
    path = tmp_path / "x.tar"
    parts = [member(name=b"k." + b"%d." % i + b"e" * 80) for i in range(1000)]
    path.write_bytes(b"".join([*parts, member(picture(0), name=b"a.png"), END]))
    assert max(map(len, scan(path)[0].examples)) <= 500
