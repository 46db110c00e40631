"""Faults: broken pictures, clips and tables. They must be skipped and named, or refused with a line naming the fix."""

import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from benchmarks.faults.lab import Lab, add, fault
from benchmarks.faults.materials import pictures


def train_on(lab: Lab, path: Path | str, *more: object, **options) -> list:
    return lab.train("--data_path", path, "--max_steps", 12, *more, **options)


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """Return a grey PNG with one bit per pixel. The rows compress to almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = bytes((1 + (width + 7) // 8) * height) if rows is None else rows
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


# ------------------------------------------------------------------------------------------ pictures


def one_among_good(harm: Callable[[Path], None], says: str = "") -> Callable[[Lab], None]:
    """Return a fault with one odd entry in a folder of good pictures. Training must continue without this entry, and
    must print ``says``, if any."""

    def make(lab: Lab) -> None:
        folder = pictures(lab)
        harm(folder / "cat")
        lab.goes_on(train_on(lab, folder), 0, says)

    return make


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return harm


def cut(folder: Path) -> None:
    for path in sorted(folder.iterdir())[:1]:
        os.truncate(path, path.stat().st_size // 2)


def loop(folder: Path) -> None:
    (folder / "up").symlink_to(folder.parent, target_is_directory=True)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")


def device(folder: Path) -> None:
    (folder / "zero.png").symlink_to("/dev/zero")


def bytes_in_name(folder: Path) -> None:
    source = (folder / "00.png").read_bytes()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe name\n.png")).write_bytes(source)


def other_suffixes(folder: Path) -> None:
    Image.new("RGB", (20, 16)).save(folder / "a.jp2")
    (folder / "notes.docx").touch()
    (folder / "noextension").touch()


def deep(folder: Path) -> None:
    Image.new("I;16", (20, 16), 40_000).save(folder / "sixteen.png")
    Image.new("F", (20, 16), 0.5).save(folder / "float.tiff")
    Image.new("RGBA", (20, 16), (255, 0, 0, 0)).save(folder / "transparent.png")


def profiles(folder: Path) -> None:
    picture = Image.new("RGB", (20, 16), (60, 200, 60))
    picture.save(folder / "noise.png", icc_profile=random.Random(0).randbytes(3000))
    picture.save(folder / "large.tif", icc_profile=bytes(1 << 24))


def profile_bomb(folder: Path) -> None:
    Image.new("RGB", (20, 16)).save(folder / "profile.png")
    content, data = (folder / "profile.png").read_bytes(), b"name\0\0" + zlib.compress(bytes(1 << 26))
    chunk = struct.pack(">I", len(data)) + b"iCCP" + data + struct.pack(">I", zlib.crc32(b"iCCP" + data))
    at = content.index(b"IDAT") - 4
    (folder / "profile.png").write_bytes(content[:at] + chunk + content[at:])


ODD = {
    "profiles": ("profiles of noise, and of 16 MiB", profiles, ""),
    "profile_bomb": ("a profile of 64 MiB in 64 KiB", profile_bomb, "profile.png"),
    "png_1_by_60000": ("a PNG of 1 x 60,000 pixels and a few bytes", write("thin.png", png(1, 60_000)), ""),
    "png_60000_by_1": ("a PNG of 60,000 x 1 pixels", write("flat.png", png(60_000, 1)), ""),
    "png_bomb": ("a PNG of 30,000 x 30,000 pixels in 110 KB", write("bomb.png", png(30_000, 30_000)), "bomb.png"),
    "png_cut": ("a truncated picture", cut, "00.png"),
    "png_empty": ("a picture of no bytes", write("empty.png", b""), "empty.png"),
    "png_text": ("a text called .jpg", write("text.jpg", b"hello\n"), "text.jpg"),
    "link_loop": ("a link that leads back up", loop, "up"),
    "pipe": ("a named pipe called .png", pipe, "pipe.png"),
    "device": ("a link to /dev/zero called .png", device, "zero.png"),
    "name_not_utf8": ("a name with a newline that is not UTF-8", bytes_in_name, ""),
    "other_suffixes": ("a .jp2, a .docx and a file without a suffix", other_suffixes, "docx"),
    "deep_pictures": ("pictures of 16 bits, of floats, and transparent ones", deep, ""),
}
for _name, (_what, _harm, _says) in ODD.items():
    add(_name, "media", f"among good pictures, {_what}", one_among_good(_harm, _says))


@fault("every second picture is truncated")
def half_cut(lab: Lab) -> None:
    folder = pictures(lab)
    for path in sorted((folder / "cat").iterdir()):
        os.truncate(path, path.stat().st_size - 30)
    lab.refused(train_on(lab, folder), "error: .*cat/", code=1)


@fault("pictures vanish while training reads them")
def pictures_vanish(lab: Lab) -> None:
    folder = pictures(lab)
    programs = train_on(lab, folder, "--max_steps", 400)
    lab.reach(8, programs)
    lab.now()
    for path in folder.glob("*/*.png"):
        path.unlink()
    lab.ends(programs, {1}, "error: .*(can't be read|No such file)")
    lab.untouched()


@fault("a class folder without pictures")
def empty_class(lab: Lab) -> None:
    folder = pictures(lab)
    (folder / "bird").mkdir()
    lab.refused(train_on(lab, folder), "error: .*bird")


# ------------------------------------------------------------------------------------------ tables


def table(text: str | bytes) -> Callable[[Lab], Path]:
    """Return a function that writes a CSV next to the pictures ``cat/00.png`` and so on. ``{rows}`` stands for eight
    good lines."""

    def make(lab: Lab) -> Path:
        folder = pictures(lab)
        path = folder / "table.csv"
        rows = "".join(f"cat/{number:02d}.png,a cat\n" for number in range(8))
        content = text if isinstance(text, bytes) else text.replace("{rows}", rows).encode("utf-8", "surrogateescape")
        path.write_bytes(content)
        return path

    return make


def refused_table(text: str | bytes, says: str) -> Callable[[Lab], None]:
    def make(lab: Lab) -> None:
        path = table(text)(lab)
        lab.refused(train_on(lab, path), f"error: .*({says})")
        lab.ends(lab.start("preprocess.py", "check", path, "--output", path.with_name("out.csv")), {2}, says)

    return make


def accepted_table(text: str, says: str = "") -> Callable[[Lab], None]:
    """Return a fault with a table of odd but valid captions. Training must use them and end well. says: expected
    output."""

    def make(lab: Lab) -> None:
        path = table(text)(lab)
        grids = "--sample_every 6 --sample_steps 2 --sample_cfg_scale 1".split()
        lab.goes_on(train_on(lab, path, *grids), 0, says)
        lab.require(list(lab.run.glob("samples/*.png")), "no grid was drawn")

    return make


TABLES = {
    "csv_swapped": ("a header text,path whose columns are the other way round", "text,path\n{rows}", "line 2|path"),
    "csv_semicolons": ("columns parted by ;", "path;text\ncat/00.png;a cat\n", ";|delimiter|semicolon"),
    "csv_tabs": ("columns parted by tabs", "path\ttext\ncat/00.png\ta cat\n", "tab|delimiter"),
    "csv_nul": ("a NUL byte", b"path,text\ncat/00.png,a \0 cat\n", "NUL|line"),
    "csv_twice": ("two columns called path", "path,path,text\ncat/00.png,x,a cat\n", "path"),
    "csv_no_text": ("no column of captions", "path,label\ncat/00.png,3\n", "text"),
    "csv_nobody": ("a path in ~nobody_here/", "path,text\n~nobody_here/x.png,a cat\n", "nobody_here"),
    "csv_utf16": ("UTF-16", "path,text\ncat/00.png,a cat\n".encode("utf-16"), "UTF"),
    "csv_quote": ("a quote that is never closed", 'path,text\ncat/00.png,"a cat\n', "line"),
    "csv_columns": ("a line of five columns", "path,text\ncat/00.png,a,b,c,d\n", "line 2"),
    "csv_empty": ("no line", "", "empty"),
    "csv_nul_path": ("a path with a NUL byte, quoted", b'path,text\n"cat/\x0000.png",x\n', "NUL|line"),
}
for _name, (_what, _text, _says) in TABLES.items():
    add(_name, "media", f"a CSV with {_what}", refused_table(_text, _says))

CAPTIONS = {
    "caption_newline": ("newlines and tabs", 'path,text\n{rows}cat/09.png,"a\n\tcat\r\nhere"\n'),
    "caption_long": ("5,000 characters", "path,text\n{rows}cat/09.png," + "long " * 1000 + "\n"),
    "caption_rtl": ("right-to-left text", "path,text\n{rows}cat/09.png,\u202eقطة صغيرة\u202c \u200f\n"),
    "caption_control": ("control characters", "path,text\n{rows}cat/09.png,a \x1b[2J\x07\x7f cat\n"),
    "caption_none": ("no character at all", "path,text\n{rows}cat/09.png,\n"),
    "caption_emoji": ("emoji and lone surrogates", "path,text\n{rows}cat/09.png,\U0001f408\u200d⬛ \ufffd\n"),
}
for _name, (_what, _text) in CAPTIONS.items():
    _all = _text.replace("{rows}", "") + _text.split("\n{rows}")[1] * 7
    add(_name, "media", f"captions with {_what}", accepted_table(_all))

COUNTED = {  # messages of a run about its captions before it starts
    "caption_late": ("200 bytes that tell them apart after the 64th", "x" * 64 + "y" * 200, "bytes takes 320 tokens"),
    "caption_cut": ("more bytes than the encoder takes", "long " * 200, "8 of 8 are longer than the 512 tokens .* cut"),
    "caption_nan": ("nan, as a table writes what is missing", "nan", "8 of 8 are words for a missing value"),
    "caption_blank": ("blanks that can't be seen", "\u200b \u3000", "8 of 8 are empty"),
}
for _name, (_what, _text, _says) in COUNTED.items():
    _rows = "".join(f"cat/{number:02d}.png,{_text}\n" for number in range(8))
    add(_name, "media", f"captions with {_what}", accepted_table(f"path,text\n{_rows}", f"note: captions: .*{_says}"))


# ------------------------------------------------------------------------------------------ clips


def clips(lab: Lab) -> Path:
    """Return the table of a copy of twelve clips with captions for this fault."""

    def fill(folder: Path) -> None:
        program = lab.start("preprocess.py", "demo", "--output", folder, "--clips", 12, "--size", 16)
        lab.programs.wait(lambda: program.code() is not None, 120, "preprocess.py demo")
        if program.code():
            raise RuntimeError(program.said())

    own = lab.folder / "media"
    shutil.copytree(lab.shared.once("clips", fill), own)
    return own / "demo.csv"


def one_bad_clip(harm: Callable[[Path], None]) -> Callable[[Lab], None]:
    """Return a fault with one harmed clip. Training must continue with the others and name the harmed clip; ``check``
    must drop it."""

    def make(lab: Lab) -> None:
        table = clips(lab)
        victim = sorted(table.parent.rglob("*.mp4"))[5]
        harm(victim)
        flags = "--model vDiT-Ti/222 --use_video --num_frames 4 --max_bad 0.5".split()
        lab.goes_on(train_on(lab, table, *flags), 0, victim.name)
        out = table.with_name("checked.csv")
        check = ("check", table, "--output", out, "--num_frames", 4, "--num_workers", 1)
        lab.ends(lab.start("preprocess.py", *check), {0}, victim.name, within=60, anywhere=True)
        lab.require(out.exists() and victim.name not in out.read_text(), "check keeps it")

    return make


def noise_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = range(len(content) // 4, 3 * len(content) // 4)
    content[middle.start : middle.stop] = random.Random(0).randbytes(len(middle))
    path.write_bytes(content)


def half_of_it(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def text_inside(path: Path) -> None:
    path.write_text("not a clip\n" * 100)


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def huge_animation(path: Path) -> None:
    frames = [Image.new("P", (8, 8), number) for number in range(4)]
    frames[0].save(path, "GIF", save_all=True, append_images=frames[1:], duration=40)
    content = bytearray(path.read_bytes())
    content[6:10] = struct.pack("<HH", 65535, 65535)
    path.write_bytes(content)


def unknown_colours(path: Path) -> None:
    import av

    with av.open(str(path), "w", format="matroska") as file:
        stream = file.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.colorspace = 14  # ICtCp in H.273
        for _ in range(24):
            file.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(stream.encode())


def hide_the_first_frames(path: Path) -> None:
    """Write an edit list that begins a second later, like a cut without re-encoding."""
    content = bytearray(path.read_bytes())
    at = content.index(b"elst") + 4
    length, start = struct.unpack_from(">Ii", content, at + 8)
    ticks = struct.unpack_from(">I", content, content.index(b"mdhd") + 4 + 12)[0]
    struct.pack_into(">Ii", content, at + 8, length - 1000, start + ticks)
    path.write_bytes(content)


@fault("clips of which an edit list hides half: as long as players show them", name="clip_hidden_frames")
def hidden_frames(lab: Lab) -> None:
    table = clips(lab)
    for path in table.parent.rglob("*.mp4"):
        hide_the_first_frames(path)
    out = table.with_name("checked.csv")
    flags = ("--output", out, "--num_frames", 30, "--num_workers", 1)
    lab.ends(lab.start("preprocess.py", "check", table, *flags), {2}, "too short", within=60, anywhere=True)
    train = "--model vDiT-Ti/222 --use_video --num_frames 4".split()
    lab.goes_on(train_on(lab, table, *train), 0, "")


@fault("clips read both at a rate and at an interval: refused in one line", name="clip_two_speeds")
def two_speeds(lab: Lab) -> None:
    flags = "--model vDiT-Ti/222 --use_video --num_frames 4 --fps 8 --frame_interval 2".split()
    lab.ends(train_on(lab, clips(lab), *flags)[0], {1, 2}, "--fps 8: ", within=60)


for _name, (_what, _harm) in {
    "clip_huge_animation": ("an animation of 65,535 x 65,535 pixels in it", huge_animation),
    "clip_unknown_colours": ("colours that nothing converts", unknown_colours),
    "clip_noise": ("noise in the middle of its file", noise_in_the_middle),
    "clip_half": ("half of its bytes", half_of_it),
    "clip_text": ("text in it", text_inside),
    "clip_pipe": ("a named pipe in its place", pipe_instead),
}.items():
    add(_name, "media", f"a clip among others with {_what}", one_bad_clip(_harm))
