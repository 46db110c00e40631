"""The flags of preprocess.py's commands, and the checks across them."""

import functools
from pathlib import Path
from typing import Any

from opendit.common.utils import read_size
from opendit.config.architectures import CLIP_FRAMES, PUBLIC, name_of_folder, patch_size, unsupported
from opendit.config.checks import (
    check_data,
    check_exists,
    check_output_file,
    check_rate,
    check_vae,
    check_workers,
    check_writable,
    fetched,
)
from opendit.config.command_line import CommandLine
from opendit.config.console import name_of
from opendit.config.flags import BATCH, FPS, FRAMES, SCALE, SHARE, SIDE, WORKERS, Value, one_of, reject_unused, whole
from opendit.config.names import BASE_PRECISIONS, FOREIGN_FORMS, inline_sources, named_sources

TEXT, PATH, FOLDER, CSV = Value(), Value(unit="path"), Value(unit="folder"), Value(unit="csv")
NAME, FRAMES_OF_A_CLIP, RATE = Value(unit="name"), Value(int, **FRAMES), Value(float, **FPS)
BY_TIME = "frames a second, by the times in a clip's file, instead"
CLIP_FLAGS = ("num_frames", "frame_interval", "fps", "short_clips", "video_reader")
ENERGON = ".nv-meta"  # folder with Energon's metadata in a data set
COOKER = "MODULE:FUNCTION of yours that reads the samples of an Energon folder"
PREFIX, WORDS = "words before every caption; in a folder also for files without one", Value(free=True, unit="words")
PROCESSES = whole(1, WORKERS["at_most"], "processes")
IN_AND_OUT = "Files: what is read and written"


def build_parser(doc: str) -> CommandLine:
    return _parser_of(doc, name_of("preprocess.py"))


@functools.cache
def _parser_of(doc: str, name: str) -> CommandLine:
    parser = CommandLine(name, doc)
    demo = parser.command("demo", "make clips of moving digits with captions")
    demo.heading("Clips: what they show, and where they go")
    demo.option("--output", FOLDER, "folder for demo.csv and the clips", "videos")
    demo.option("--clips", whole(1, 1_000_000, "clips"), "how many", 600)
    demo.option("--size", whole(8, 1024, "pixels"), "side of a frame", 64)
    demo.option("--split", one_of(("train", "test")), "of the digits shown", "train")
    for name, about, root in (
        ("ucf101", "list a UCF101 tree in a CSV", "folder with a folder of clips for every class"),
        ("folder", "list a folder of captioned clips and pictures in a CSV", "searched to any depth"),
    ):
        listing = parser.command(name, about)
        listing.heading(IN_AND_OUT)
        listing.option("root", TEXT, root, metavar="ROOT")
        listing.option("--output", CSV, "the CSV", required=True)
    _add_check(parser.command("check", "drop the rows of a CSV that can't be trained on"))
    _add_look(parser.command("look", "draw a contact sheet and histograms of a data set"))
    _add_latents(parser.command("latents", "encode every picture once with a VAE"))
    shards = parser.command("shards", "pack pictures and clips into tars with an index")
    shards.heading(IN_AND_OUT)
    shards.option(
        "--data_path", PATH, "a folder of pictures or clips, a CSV of media, or cached latents", required=True
    )
    shards.option("--output", FOLDER, "folder for the tars", required=True)
    shards.option("--shard_size", Value(unit="size"), "largest size of a tar: 200MB, 1GB, ...", "1GB")
    shards.option("--num_workers", PROCESSES, "processes, of which each writes a tar", 4)
    index = parser.command("index", "make the index of every tar in a folder")
    index.heading(IN_AND_OUT)
    index.option("root", TEXT, "the folder, of tars as WebDataset has them", metavar="DIR")
    index.option("--num_workers", PROCESSES, "processes, of which each reads a tar", 4)
    index.option("--energon_cooker", NAME, COOKER)
    index.switch("--force", "make existing ones again, too", False)
    index.heading("Latents: of tars that hold some of another program's")
    index.option(
        "--latents",
        one_of(FOREIGN_FORMS),
        "what .npz, .npy or .safetensors files hold: mean and deviation, mean and log variance, or a latent alone",
    )
    index.option("--vae", NAME, "ema, mse or a folder with a VAE: whose they are", "ema")
    index.option("--image_size", Value(int, **SIDE), "side of the pictures that they were made of", 256)
    index.switch("--use_video", "they are of clips")
    index.option("--num_frames", FRAMES_OF_A_CLIP, "frames of a clip", 16)
    index.option("--frame_interval", FRAMES_OF_A_CLIP, "from frame to frame", 1)
    index.option("--fps", RATE, BY_TIME)
    return parser


def _add_columns(parser: CommandLine) -> None:
    parser.option("--file_column", NAME, "of a table or metadata.*: its column of files (default: path, or file_name)")
    parser.option("--caption_column", NAME, "of a table or metadata.*: its column of captions (default: text)")


def _add_check(check: CommandLine) -> None:
    check.heading(IN_AND_OUT)
    check.option("csv", TEXT, "a table with path, text and any other columns, or a folder", metavar="CSV")
    _add_columns(check)
    check.option("--output", Value(unit="csv2"), "the CSV of the rows that are left", required=True)
    check.option("--num_workers", PROCESSES, "processes that decode", 2)
    check.heading("Samples: what training will take of a file")
    check.option("--num_frames", FRAMES_OF_A_CLIP, "frames of a training clip", 16)
    check.option("--frame_interval", FRAMES_OF_A_CLIP, "from frame to frame", 1)
    check.option("--fps", RATE, BY_TIME)
    check.option(
        "--image_size",
        whole(0, SIDE["at_most"], "pixels"),
        "count what training at this size would enlarge; it is kept",
        0,
    )
    pixels = whole(0, SIDE["at_most"], "pixels")
    check.option("--min_size", pixels, "drop what has fewer pixels on its shorter side; 0: none", 0)


def _add_look(look: CommandLine) -> None:
    look.heading(IN_AND_OUT)
    look.option("data_path", TEXT, "whatever --data_path of train.py takes", metavar="DATA")
    look.option("--output", FOLDER, "folder for two PNGs and an HTML page that holds both", "look")
    look.option("--split", one_of(("train", "test")), "of a data set that has both", "train")
    look.option("--samples", whole(0, 1_000_000_000, "rows"), "to look into, spread evenly, by weight; 0: all", 1000)
    look.option("--pictures", whole(1, 10_000, "pictures"), "of these, at most, on the contact sheet", 48)
    look.option("--energon_cooker", NAME, COOKER)
    _add_columns(look)
    look.option("--caption_prefix", WORDS, PREFIX)
    look.option("--num_workers", PROCESSES, "processes that decode", 2)
    look.heading("Tokens: what they are counted at")
    look.option("--image_size", Value(int, **SIDE), "side of a picture (default: 256)")
    look.option("--num_frames", FRAMES_OF_A_CLIP, "most frames of a clip (default: 16)")
    look.option("--frame_interval", FRAMES_OF_A_CLIP, "from frame to frame (default: 1)")
    look.option("--fps", RATE, BY_TIME)
    look.option("--token_pixels", whole(1, 4096, "pixels"), "side of a token: VAE x patch", 16)
    look.option("--token_frames", whole(1, 4096, "frames"), "of a token: VAE x patch", 1)


def _add_latents(latents: CommandLine) -> None:
    latents.heading(IN_AND_OUT)
    latents.option("--data_path", PATH, "digits, a folder, a torchvision set, a CSV or tars", required=True)
    latents.option("--output", FOLDER, "folder for the latents", required=True)
    latents.option("--shard_size", Value(unit="size"), "of a tar; or a number of pictures or clips", "1GB")
    latents.heading("Encoding: what is made of a picture")
    latents.option("--pretrained", FOLDER, "of a public model, for its VAE and text encoders")
    latents.switch("--download", "fetch --pretrained OWNER/NAME[@REVISION] from the hub", False)
    latents.option("--vae", NAME, "ema, mse or a folder with a VAE", "ema")
    latents.option("--image_size", Value(int, **SIDE), "side of the pictures", 256)
    latents.option(
        "--bucket_tokens", whole(1, 2**30, "tokens"), "crop to shapes of at most this many tokens, as in train.py"
    )
    latents.option("--repa", FOLDER, "vision transformer, whose features are stored too")
    latents.option("--model", NAME, "whose tokens (default: --pretrained's or DiT-XL/2)")
    latents.option(
        "--max_upscale", Value(float, **SCALE), "of --bucket_tokens: enlarge nothing by more than this", 1.25
    )
    latents.switch("--flip", "the mirror images too; --no_flip: half the size", True)
    latents.option(
        "--mixed_precision",
        one_of(("auto", "fp16", "bf16", "fp32")),
        "auto: fp16 on a GPU, fp32 on a CPU and with --pretrained, whose text encoders are always in bf16 on a GPU",
        "auto",
    )
    latents.option("--batch_size", Value(int, **BATCH), "pictures at once", 64)
    latents.heading("Loader: how files are read")
    latents.option("--num_workers", Value(int, **WORKERS), "processes that read", 4)
    latents.option("--max_bad", Value(float, **SHARE), "share of unreadable files at which it stops", 0.05)
    latents.option(
        "--data_timeout", Value(float, at_least=0, at_most=10_000_000, unit="seconds"), "for one file; 0: any", 300.0
    )
    latents.heading("Clips and captions: of a CSV")
    latents.switch("--use_video", "encode the clips of a CSV, and its pictures as such")
    latents.option("--num_frames", FRAMES_OF_A_CLIP, "frames of a clip; 17 of public models", 16)
    latents.option("--frame_interval", FRAMES_OF_A_CLIP, "from frame to frame", 1)
    latents.option("--fps", RATE, BY_TIME)
    latents.option(
        "--short_clips",
        one_of(("skip", "interval")),
        "interval: read clips that are too short at a smaller interval",
        "skip",
    )
    latents.option(
        "--video_reader",
        one_of(("auto", "torchcodec", "decord", "pyav")),
        "what decodes clips: the fastest that works here, or this one",
        "auto",
    )
    latents.option("--energon_cooker", NAME, COOKER)
    _add_columns(latents)
    latents.option("--caption_prefix", WORDS, PREFIX)
    latents.option("--text_encoder", NAME, "also encode the captions: clip, t5 or a folder (default: keep words)")
    latents.option("--text_precision", one_of(BASE_PRECISIONS), "as in train.py", "bf16")
    latents.option("--max_text_tokens", whole(1, 16_384, "tokens"), "captions are cut to this (default: the encoder's)")


def check(command: str, options: dict[str, Any], given: set[str]) -> None:
    """Check a command's flags, and resolve sizes such as 1GB in ``options``. Raises ValueError."""
    if "num_workers" in options:
        check_workers(options["num_workers"], "num_workers" in given)
    check_rate(options.get("fps"), given)
    if command == "demo":
        check_writable(options["output"], "--output")
    elif command in ("ucf101", "folder"):
        check_exists(options["root"], "ROOT", "the folder to list")
    elif command == "check":
        check_exists(options["csv"], "CSV", "a CSV of path,text, or a folder")
    elif command == "shards":
        check_exists(options["data_path"], "--data_path", "a folder of pictures or a CSV that does")
        options["shard_size"] = read_size(options["shard_size"], "--shard_size")
        check_writable(options["output"], "--output")
    elif command == "look":
        inline_sources(options["data_path"], "DATA")  # raises its errors
        check_data(options["data_path"], "DATA")
        if options["data_path"] in named_sources():
            reject_unused(given, {"energon_cooker": f"does nothing with DATA {options['data_path']}"})
        check_writable(options["output"], "--output")
    elif command == "index":
        check_exists(options["root"], "DIR", "a folder of tars")
        if not Path(options["root"], ENERGON).is_dir():
            reject_unused(given, {"energon_cooker": f"does nothing with DIR {options['root']}, which has no {ENERGON}"})
        if options["latents"] is None:
            of_latents = ("vae", "image_size", "use_video", "num_frames", "frame_interval", "fps")
            reject_unused(given, dict.fromkeys(of_latents, "does nothing without --latents"))
        else:
            reject_unused(given, {"energon_cooker": "does not go with --latents"})
            if not options["use_video"]:
                clips = ("num_frames", "frame_interval", "fps")
                reject_unused(given, dict.fromkeys(clips, "does nothing without --use_video"))
            if options["vae"] == "none":
                raise ValueError("--vae none: has no latents; give the VAE that they are of")
            check_vae(options["vae"])
    else:
        _check_latents(options, given)
    if command in ("ucf101", "folder", "check"):
        check_output_file(options["output"], "--output", makes_folder=True)


def _resolve_public(options: dict[str, Any], given: set[str]) -> None:
    """Set model, VAE, text encoders and sizes from a public model, unless the user sets them. Raises ValueError."""
    source = options["pretrained"] = fetched(options["pretrained"], "--pretrained", options["download"])
    check_exists(source, "--pretrained", "a folder of a public model, as diffusers writes it")
    folder, name = Path(source).expanduser(), name_of_folder(source)
    family = PUBLIC.get((name or "").partition("/")[0])
    if family is None or not (folder / "model_index.json").is_file():
        raise ValueError(
            unsupported(folder)
            or f"--pretrained {source}: is no pipeline of {', '.join(PUBLIC)}; give the folder that has its "
            "model_index.json, vae and text_encoder"
        )
    if options["use_video"] == isinstance(family.patch, int):
        fix = "leave --use_video out" if options["use_video"] else "add --use_video"
        raise ValueError(f"--pretrained {source}: takes {'pictures' if options['use_video'] else 'clips'}; {fix}")
    options |= {"pretrained": str(folder), "vae": options["vae"] if "vae" in given else str(folder / "vae")}
    options["text_encoder"] = options["text_encoder"] or str(folder)
    options["model"] = options["model"] or name
    if "image_size" not in given:
        options["image_size"] = family.image_size
    if options["use_video"] and "num_frames" not in given:
        options["num_frames"] = CLIP_FRAMES


def _patch_of(options: dict[str, Any]) -> tuple[int, ...]:
    """Return --model's patch for --bucket_tokens and --repa, or () without these flags.

    The patch is (frames, rows, columns) for clips, (rows, columns) for pictures. Raises ValueError if the model is
    missing, unknown or for other media.
    """
    tokens, model = options["bucket_tokens"], options["model"]
    if tokens is None and options["repa"] is None:
        return ()
    for flag in ("bucket_tokens", "use_video"):
        if options["repa"] is not None and options[flag]:
            raise ValueError(f"--repa {options['repa']}: is for pictures of one size; leave --{flag} out")
    if tokens is None:
        model = model or "DiT-XL/2"
    if model is None:
        raise ValueError(f"--bucket_tokens {tokens}: tokens of an unknown model; add --model, such as DiT-XL/2")
    patch = patch_size(model)
    if options["use_video"] == isinstance(patch, int):
        fix = "leave --use_video out" if options["use_video"] else "add --use_video"
        raise ValueError(f"--model {model}: takes {'pictures' if options['use_video'] else 'clips'}; {fix}")
    return (patch, patch) if isinstance(patch, int) else patch


def _check_latents(options: dict[str, Any], given: set[str]) -> None:
    if options["pretrained"] is not None:
        _resolve_public(options, given)
    unused = {}
    if not options["use_video"]:
        unused |= dict.fromkeys(CLIP_FLAGS, "does nothing without --use_video")
    if options["pretrained"] is None:
        unused["download"] = "does nothing without --pretrained"
    if options["text_encoder"] is None:
        unused |= dict.fromkeys(("max_text_tokens", "text_precision"), "does nothing without --text_encoder")
    if options["data_path"] in named_sources():
        unused["energon_cooker"] = f"does nothing with --data_path {options['data_path']}"
    if options["bucket_tokens"] is None:
        unused["max_upscale"] = "does nothing without --bucket_tokens"
        if options["repa"] is None:
            unused["model"] = "does nothing without --bucket_tokens or --repa"
    reject_unused(given, unused)
    options["patch"] = _patch_of(options)
    del options["download"], options["model"]
    data, vae, encoder = (options[name] for name in ("data_path", "vae", "text_encoder"))
    size, options["tar_bytes"] = options["shard_size"], None
    if size.isascii() and size.isdigit():
        if not 1 <= int(size[:9]) <= 1_000_000 or len(size) > 7:
            raise ValueError(f"--shard_size {size[:40]}: no number of pictures up to 1,000,000; give one, or 1GB")
        options["shard_size"] = int(size)
    else:
        options["tar_bytes"], options["shard_size"] = read_size(size, "--shard_size"), 4096
    if vae == "none":
        raise ValueError("--vae none: has no latents to cache; train on the pictures themselves")
    check_vae(vae)
    if options["repa"] is not None:
        check_exists(options["repa"], "--repa", "the folder of a vision transformer")
    if encoder == "bytes":
        raise ValueError("--text_encoder bytes: is trained with the model, so it can't be cached; leave it out")
    inline_sources(data)
    check_data(data, "--data_path")
    check_writable(options["output"], "--output")
