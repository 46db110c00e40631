"""Every flag of every program refuses bad values in one line, or accepts them for a listed reason.

The programs run in this process, with all their checks and loading, up to where the work would begin."""

import io
import json
import os
import shutil
from contextlib import nullcontext, redirect_stderr, redirect_stdout

import pytest
from PIL import Image
from safetensors.torch import save_file

import opendit.evaluation.__main__ as evaluation
import opendit.export.__main__ as export
import opendit.models.__main__ as listing
import preprocess
import sample
import train
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config import preprocess as preprocess_flags
from opendit.config.evaluate import EvaluateConfig
from opendit.config.flags import flags_of, value_of
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import build_model, model_config

VALUES = {
    "zero": "0", "minus zero": "-0", "below zero": "-1", "huge": "9" * 30, "longer": "9" * 5000, "1e400": "1e400",
    "nan": "nan", "inf": "inf", "-inf": "-inf", "empty": "", "blank": " ", "words": "naïve → 文\n\x1b[31m",
    "underscore": "1_0", "other digits": "٣", "a folder": "folder",
}  # fmt: skip
ZEROS, NUMBERS = ("zero", "minus zero"), ("zero", "minus zero", "below zero", "huge", "1e400", "nan", "inf", "-inf")
NAMES = (*NUMBERS, "words", "underscore", "other digits", "a folder")  # text that may name a file

# Accepted values, with the reason. All others are refused.
TRAIN = {
    "label_drop": {ZEROS: "no label is dropped"},
    "caption_prefix": {("empty",): "no words before captions"},
    "tag_drop": {ZEROS: "no tag is left out"},
    "num_workers": {ZEROS: "the training process loads"},
    "data_timeout": {ZEROS: "any time"},
    "max_bad": {ZEROS: "no file may be unreadable"},
    "lr": {("huge",): "a number of fp32; gradients that are not finite stop the run, which says so"},
    "warmup_steps": {ZEROS: "none"},
    "weight_decay": {ZEROS: "none"},
    "adam_beta1": {ZEROS: "no mean of gradients"},
    "adam_beta2": {ZEROS: "no mean of squares"},
    "grad_clip": {ZEROS: "off", ("huge",): "never reached"},
    "ema_decay": {ZEROS: "the weights themselves"},
    "edm_mean": {ZEROS: "noise of 1 in the middle", ("below zero",): "near its default"},
    "global_seed": {ZEROS: "a seed"},
    "dry_run": {ZEROS: "the processes that there are"},
    "outputs": {NAMES: "a folder of that name"},
    "ckpt_every": {ZEROS: "only at the end"},
    "ckpt_keep": {ZEROS: "all"},
    "sample_every": {ZEROS: "no grids"},
    "validate_every": {ZEROS: "only before saves that may be the best"},
    "validate_share": {ZEROS: "none is held out"},
    "sample_cfg_scale": {ZEROS: "the unconditional half alone"},
    "evaluate_every": {ZEROS: "none"},
}
SAMPLE = {
    "class_labels": {ZEROS: "the first class"},
    "prompt": {(*NAMES, "longer", "empty", "blank"): "a caption may be any text"},
    "negative_prompt": {(*NAMES, "longer", "empty", "blank"): "a caption may be any text"},
    "cfg_scale": {ZEROS: "the unconditional half alone"},
    "cfg_interval": {ZEROS: "from no noise on"},
    "seed": {ZEROS: "a seed"},
    "output": {NAMES: "a folder of that name"},
    "npz": {tuple(name for name in NAMES if name != "a folder"): "a file of that name"},
}
LATER = {("a folder",): "what is in it is looked at later"}
EVALUATE = {
    "dry_run": {ZEROS: "the processes that there are"},
    **dict.fromkeys(("samples", "reference", "features", "video_features", "clip_model"), LATER),
    "outputs": {NAMES: "a folder of that name"},
    "output": {NAMES: "a folder of that name"},
    "save_features": {tuple(name for name in NAMES if name != "a folder"): "a file of that name"},
}
PREPROCESS = {
    "demo --output": {NAMES: "a folder of that name"},
    "ucf101 --output": {tuple(name for name in NAMES if name != "a folder"): "a file of that name"},
    "ucf101 ROOT": {("a folder",): "what is in it is looked at later"},
    "check CSV": {("a folder",): "what is in it is looked at later"},
    **{
        f"{command} --{which}_column": {NAMES: "is looked for in the table"}
        for command in ("check", "look", "latents")
        for which in ("file", "caption")
    },
    **{
        f"{command} --caption_prefix": {(*NAMES, "longer", "empty", "blank"): "a caption may be any text"}
        for command in ("look", "latents")
    },
    "check --image_size": {ZEROS: "none is counted"},
    "check --min_size": {ZEROS: "none is too small"},
    "look DATA": {("a folder",): "what is in it is looked at later"},
    "look --output": {NAMES: "a folder of that name"},
    "look --samples": {ZEROS: "all rows"},
    "shards --data_path": {("a folder",): "what is in it is looked at later"},
    "shards --output": {NAMES: "a folder of that name"},
    "latents --data_path": {("a folder",): "what is in it is looked at later"},
    "latents --repa": {("a folder",): "what is in it is looked at later"},
    "latents --vae": {("a folder",): "what is in it is looked at later"},
    "latents --output": {NAMES: "a folder of that name"},
    "latents --data_timeout": {ZEROS: "any time"},
    "latents --max_bad": {ZEROS: "no file may be unreadable"},
    "latents --num_workers": {ZEROS: "this process reads"},
    "latents --text_encoder": {NAMES: "may be a repository of the hub; it is looked for before anything is encoded"},
}
PREPROCESS["folder --output"] = PREPROCESS["check --output"] = PREPROCESS["ucf101 --output"]
PREPROCESS["folder ROOT"] = PREPROCESS["ucf101 ROOT"]
EXPORT = {
    "diffusers --output": {NAMES: "a folder of that name"},
    "diffusers --vae": {("a folder",): "what is in it is looked at later"},
    "meta --output": {tuple(name for name in NAMES if name != "a folder"): "a file of that name"},
    "opendit --vae": {("a folder",): "what is in it is looked at later"},
}

# Other flags that a flag needs to have an effect.
TINY = "--model DiT-Ti/2 --image_size 8 --vae none --batch_size 4 --num_workers 0"
PRETRAINED = "--pretrained weights.safetensors"
CLIPS = f"{TINY.replace('DiT-Ti/2', 'vDiT-Ti/122')} --use_video --data_path clips.csv"
BESIDE_OF_TRAIN = {
    "num_frames": CLIPS, "frame_interval": CLIPS, "fps": CLIPS, "short_clips": CLIPS, "video_reader": CLIPS,
    "max_bad": f"{TINY} --data_path pictures",
    "lora": f"{TINY} {PRETRAINED}", "lora_alpha": f"{TINY} {PRETRAINED} --lora 4",
    "lora_targets": f"{TINY} {PRETRAINED} --lora 4",
    "text_encoder": f"{TINY} --data_path mock", "max_text_tokens": f"{TINY} --data_path mock --text_encoder bytes",
    **dict.fromkeys(("data_parallel_replicate", "reshard", "reduce_dtype"), f"{TINY} --plugin fsdp"),
    "expert_capacity": f"{TINY} --model EC-DiT-Ti/2", "flow_shift": f"{TINY} --objective flow",
    "flow_shift_tokens": f"{TINY} --objective flow",
    "flow_times": f"{TINY} --objective flow", "edm_mean": f"{TINY} --objective edm",
    "edm_std": f"{TINY} --objective edm", "edm_sigma_data": f"{TINY} --objective edm",
}  # fmt: skip
BESIDE_OF_SAMPLE = {
    "num_frames": "--ckpt clips.safetensors", "frame_interval": "--ckpt clips.safetensors",
    "prompt": "--ckpt words.safetensors", "negative_prompt": "--ckpt words.safetensors", "outputs": "",
}  # fmt: skip
BESIDE_OF_PREPROCESS = {
    "demo": "", "ucf101": "folder --output new.csv", "folder": "folder --output new.csv",
    "check": "clips.csv --output new.csv", "latents": "--data_path digits --output latents",
    "shards": "--data_path pictures --output shards", "index": "folder", "look": "digits",
    "latents --num_frames": "--use_video", "latents --frame_interval": "--use_video", "latents --fps": "--use_video",
    "latents --short_clips": "--use_video", "latents --video_reader": "--use_video",
    "latents --max_text_tokens": "--text_encoder t5", "latents --max_bad": "--data_path pictures",
}  # fmt: skip
VALUED = {cls: [item.name for item in flags_of(cls) if value_of(item)] for cls in (TrainConfig, SampleConfig)}
# Flags that sample.py has, too, are left out.
OF_EVALUATE = [item.name for item in flags_of(EvaluateConfig) if value_of(item) and item.name not in SAMPLE]
OF_EVALUATE = [
    *(name for name in OF_EVALUATE if name not in VALUED[SampleConfig]),
    "num_samples",
    "image_size",
    "output",
]


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    """Return a folder with the files that the flags need."""
    folder = tmp_path_factory.mktemp("needed")
    (folder / "folder").mkdir()
    (folder / "clips.csv").write_text("path,text\nclip.mp4,a clip\n")
    (folder / "weights.pt").touch()
    (folder / "pictures" / "class").mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8)).save(folder / "pictures" / "class" / f"{number}.png")
    for name, model, sizes in (
        ("weights", "DiT-Ti/2", {"num_classes": 10, "in_channels": 1}),
        ("words", "DiT-Ti/2", {"text": TextConfig("bytes", 64, 16, False), "in_channels": 1}),
        ("clips", "vDiT-Ti/122", {"num_classes": 10, "in_channels": 3, "frames": 4}),
    ):
        config = model_config(model, input_size=(8, 8), **sizes)
        info = {"model": model, "config": config.to_dict(), "vae": "none", "image_size": 8}
        path = folder / f"{name}.safetensors"
        save_file(build_model(config).state_dict(), path, {METADATA_KEY: json.dumps(info)})
    return folder


@pytest.fixture
def place(needed, tmp_path, monkeypatch, no_ranks):
    """Start the programs in a folder with links to the needed files, and stop them where their work would begin."""
    shutil.copytree(needed, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("opendit.training.build.build", lambda *_: nullcontext())
    monkeypatch.setattr("opendit.training.run.Run.failed_writes", lambda _: 0)
    monkeypatch.setattr(train, "train", lambda run: None)
    monkeypatch.setattr("sample.draw", lambda *_: None)
    monkeypatch.setattr("opendit.evaluation.program.run", lambda *_: None)
    monkeypatch.setattr(preprocess, "run", lambda *_: None)
    monkeypatch.setattr(export, "convert", lambda *_: None)


def refusal(main, words: list[str]) -> str | None:
    """Return the one line with which a program refuses its flags (exit code 2), or None if it accepts them."""
    errors = io.StringIO()
    with redirect_stderr(errors), redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    if not code:
        return None
    said = errors.getvalue()
    assert code == 2 and said.count("\n") == 1 and len(said) < 1000, (words, code, said)
    assert "\x1b" not in said, words
    return said


def each_value(
    main, argv: list[str], flag: str, accepted: dict[tuple[str, ...], str], named: str | None = None
) -> None:
    """Try ``flag`` with all values after ``argv``. The value of a positional argument is the last word."""
    reasons = {kind: why for kinds, why in accepted.items() for kind in kinds}
    for kind, value in VALUES.items():
        said = refusal(main, [*argv, flag, value] if flag.startswith("-") else [*argv, value])
        if kind in reasons:
            assert said is None, (flag, kind, said)
        else:
            assert said is not None and (named or flag).lower() in said.lower(), (flag, kind, said)


@pytest.mark.parametrize("name", VALUED[TrainConfig])
def test_of_train(name, place):
    beside = BESIDE_OF_TRAIN.get(name, TINY).split()
    each_value(train.main, [*beside, "--outputs", "outputs"], f"--{name}", TRAIN.get(name, {}))


@pytest.mark.parametrize("name", VALUED[SampleConfig])
def test_of_sample(name, place):
    beside = BESIDE_OF_SAMPLE.get(name, "--ckpt weights.safetensors").split()
    main = sample.main
    if name == "cfg_interval":  # two numbers
        main = lambda words: sample.main([*words, "50"])  # noqa: E731
    each_value(main, ["--output", "drawn", *beside], f"--{name}", SAMPLE.get(name, {}))


@pytest.mark.parametrize("name", OF_EVALUATE)
def test_of_evaluate(name, place):
    beside = {"outputs": [], "label_sampling": ["--ckpt", "weights.safetensors"]}.get(name, ["--samples", "pictures"])
    each_value(evaluation.main, beside, f"--{name}", EVALUATE.get(name, {}))


def commands() -> list[tuple[str, str]]:
    parser = preprocess_flags.build_parser("")
    flags = [(command, f"--{name}") for command, sub in parser.commands.items() for name in sub.defaults]
    for switch in ("--force", "--use_video"):
        flags.remove(("index", switch))
    return [*flags, ("ucf101", "ROOT"), ("folder", "ROOT"), ("check", "CSV"), ("look", "DATA")]


@pytest.mark.parametrize(("command", "flag"), commands())
def test_of_preprocess(command, flag, place):
    argv = [command, *BESIDE_OF_PREPROCESS[command].split()]
    if flag.startswith("-"):
        argv += BESIDE_OF_PREPROCESS.get(f"{command} {flag}", "").split()
    else:
        argv = [command, *argv[2:]]
    each_value(preprocess.main, argv, flag, PREPROCESS.get(f"{command} {flag}", {}))


@pytest.mark.parametrize("to", ["diffusers", "meta", "opendit"])
@pytest.mark.parametrize("flag", ["FORMAT", "--ckpt", "--output", "--model", "--vae"])
def test_of_the_export(to, flag, place):
    argv = [to, "--ckpt", "weights.pt", "--output", "new.safetensors"]
    argv = argv[1:] if flag == "FORMAT" else argv
    each_value(export.main, argv, flag, EXPORT.get(f"{to} {flag}", {}))


@pytest.mark.parametrize("flag", ["MODEL", "--image_size", "--num_frames", "--batch_size", "--world"])
def test_of_the_list_of_models(flag, place):
    each_value(listing.main, ["vDiT-XL/222"], flag, {}, "model" if flag == "MODEL" else None)


def test_flags_that_are_on_or_off_take_no_value(place):
    for main, cls in ((train.main, TrainConfig), (sample.main, SampleConfig), (evaluation.main, EvaluateConfig)):
        for name in (item.name for item in flags_of(cls) if value_of(item) is None):
            for words in ([f"--{name}", "1"], [f"--{name}=1"], [f"--no_{name}", ""], [f"--{name}="]):
                assert words[0].partition("=")[0] in refusal(main, words)


def test_every_number_has_a_range():
    for cls in (TrainConfig, SampleConfig, EvaluateConfig):
        for value in filter(None, map(value_of, flags_of(cls))):
            low, high = (value.at_least, value.above), (value.at_most, value.below, value.infinite or None)
            assert value.kind is str or (set(low) != {None} and set(high) != {None})
