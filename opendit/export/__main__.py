"""Weights in and out: our checkpoints <-> diffusers' folders and LoRA files, and Meta's .pt files.

opendit export diffusers --ckpt outputs/000-DiT-XL-2 --output dit-pipeline
opendit export meta --ckpt outputs/000-DiT-XL-2 --output DiT-XL-2.pt
opendit export opendit --ckpt dit-pipeline --output weights.safetensors
opendit export opendit --ckpt outputs/001-vDiT-7B --output model.safetensors --max_shard_size 5GB
opendit export opendit --ckpt DiT-XL-2-256x256.pt --model DiT-XL/2 --output weights.safetensors
opendit export diffusers --ckpt outputs/002-flux --base FLUX.1-dev --output flux-tuned
opendit export lora --ckpt outputs/003-flux --format comfyui --output my-style.safetensors
"""

import os
import sys
from pathlib import Path

from opendit.checkpoint.run_folders import checkpoint_at
from opendit.common.utils import read_size
from opendit.config.architectures import canonical_name
from opendit.config.checks import check_can_be_made, check_exists, check_output_file, check_vae, check_weights
from opendit.config.command_line import CommandLine
from opendit.config.console import name_of, prepare_console
from opendit.config.flags import Value, one_of, reject_unused

READERS = {"diffusers": "", "comfyui": "ComfyUI reads it from models/loras, ", "kohya": "kohya's trainers read it, "}
MAX_SHARD_SIZE = "50GB"  # the default of transformers' save_pretrained since version 5


def build_parser() -> CommandLine:
    parser = CommandLine(name_of("python -m opendit.export"), __doc__ or "")
    parser.heading("Conversion: from what to what")
    parser.option("to", one_of(("diffusers", "meta", "opendit", "lora")), "the format to write", metavar="FORMAT")
    parser.option(
        "--ckpt",
        Value(unit="path"),
        "what to convert: a file, a checkpoint, a run or a pipeline; latest: the newest run",
        required=True,
    )
    parser.option("--outputs", Value(unit="folder"), "where --ckpt latest looks for runs", "./outputs")
    parser.option("--output", Value(unit="path"), "the folder of a pipeline, or the file to write", required=True)
    parser.option("--model", Value(unit="name"), "where --ckpt does not say (Meta's .pt)")
    parser.option(
        "--base", Value(unit="path"), "of a public model (FLUX.1, Z-Image, Wan): its folder, for all but the weights"
    )
    parser.option("--format", one_of(tuple(READERS)), "whose names a lora file has (default: diffusers)")
    parser.option("--vae", Value(unit="name"), "ema, mse or a folder; from --ckpt when left out")
    parser.option(
        "--max_shard_size", Value(unit="size"), "weights above it go into several files with an index (default: 50GB)"
    )
    return parser


def main(argv: list[str]) -> None:
    prepare_console()
    parser = build_parser()
    options, given = parser.read(argv)
    to, ckpt, output, model, vae, base = (options[name] for name in ("to", "ckpt", "output", "model", "vae", "base"))
    form = options["format"] or "diffusers"
    try:
        if ckpt == "latest":
            ckpt = str(checkpoint_at(ckpt, options["outputs"]))
            print(f"--ckpt latest: {ckpt}", flush=True)
        else:
            reject_unused(given, {"outputs": "does nothing without --ckpt latest"})
        check(to, ckpt, output, model, vae, given, base)
        most_bytes = read_size(options["max_shard_size"] or MAX_SHARD_SIZE, "--max_shard_size")
    except ValueError as error:
        parser.fail(error)
    try:
        if Path(output).exists() and not (Path(output).is_dir() and not os.listdir(output)):
            print(f"{output} is there already and will be replaced", flush=True)
        convert(to, ckpt, Path(output), model, vae, base, form, most_bytes)
    except (ValueError, OSError) as error:
        parser.fail(error)


def check(
    to: str, ckpt: str, output: str, model: str | None, vae: str | None, given: set[str], base: str | None = None
) -> None:
    """Check the flags before any weights are read. Raises ValueError that names the flag and the fix."""
    if base is not None:
        if to not in ("diffusers", "lora"):
            raise ValueError(f"--base {base}: is for the formats diffusers and lora; leave it out with {to}")
        why = "does nothing with --base, whose folder says it"
        reject_unused(given, {"model": why, "vae": why})
        check_exists(base, "--base", "the folder of a public model")
        if os.path.realpath(base) == os.path.realpath(output):
            raise ValueError(f"--output {output}: is what --base names; name another place")
    if to == "lora":
        reject_unused(given, dict.fromkeys(("model", "vae", "max_shard_size"), "does nothing with the format lora"))
    else:
        reject_unused(given, {"format": f"does nothing with the format {to}; it is for lora"})
    if to == "meta":
        idle = {
            "vae": "does nothing with the format meta, which holds no VAE",
            "max_shard_size": "does nothing with the format meta, which is one file",
        }
        reject_unused(given, idle)
    if model is not None:
        canonical_name(model)
    if vae is not None:
        check_vae(vae)
    check_weights(ckpt, "--ckpt", pipeline=True)
    if Path(output).exists() and os.path.samefile(ckpt, output):
        raise ValueError(f"--output {output}: is what --ckpt names; name another place")
    if to != "diffusers":
        if to in ("opendit", "lora") and not output.endswith(".safetensors"):
            raise ValueError(f"--output {output}: the format {to} is a .safetensors file; name one")
        check_output_file(output, "--output")
        return
    path = Path(output)
    if path.is_dir() and os.listdir(path) and not (path / "model_index.json").is_file():
        raise ValueError(f"--output {output}: is a folder of something else, no pipeline; name another folder")
    check_can_be_made(path, "--output")


def convert(
    to: str, ckpt: str, output: Path, model: str | None, vae: str | None, base: str | None, form: str, most_bytes: int
) -> None:
    from opendit.export import conversion  # imports torch, so not at the top

    notes, message = [], f"wrote {output}"
    if to == "lora":
        notes, reader = conversion.export_lora(ckpt, output, base, form)
        how = f"reads it by pipeline.{reader}" if reader else "needs --format diffusers instead"
        message += f"; {READERS[form]}diffusers {how}"
    elif base is not None:
        notes = conversion.export_run(ckpt, output, base, most_bytes)
    elif to == "diffusers":
        conversion.export_diffusers(ckpt, output, model, vae, most_bytes)
        message += (
            "\nA stock DiTPipeline differs slightly from the trained model (its downscale_freq_shift is 1); "
            "opendit.export.load_pipeline(folder) sets it right."
        )
    elif to == "meta":
        conversion.export_meta(ckpt, output, model)
    else:
        name, written = conversion.import_weights(ckpt, output, model, vae, most_bytes)
        message = f"wrote {written}: {name}"
    for line in notes:
        print(f"note: {line}", flush=True)
    print(message)


if __name__ == "__main__":
    main(sys.argv[1:])
