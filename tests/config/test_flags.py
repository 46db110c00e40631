"""Documented flags exist with their defaults, and mistakes are answered with the flag and the fix."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendit.config.command_line import parse
from opendit.config.flags import flags_of, headings_of, to_dict
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig

DOCUMENTED_TRAIN = """
    model plugin mixed_precision grad_checkpoint enable_modulate_kernel enable_layernorm_kernel enable_flashattn
    sequence_parallel_size data_path image_size vae num_classes batch_size epochs max_steps lr lr_schedule
    warmup_steps weight_decay grad_accumulation ema_decay grad_clip global_seed num_workers log_every ckpt_every
    sample_every outputs load
""".split()
DEFAULTS = dict(
    model="DiT-XL/2", plugin="zero2", mixed_precision="fp16", image_size=256, data_path="digits", lr=1e-4,
    weight_decay=0.0, ema_decay=0.9999, grad_clip=1.0, global_seed=42, num_workers=4, log_every=10, ckpt_every=1000,
    outputs="./outputs", enable_flashattn=False, grad_checkpoint=False, grad_accumulation=1,
)  # fmt: skip
DOCUMENTED_SAMPLE = """
    model ckpt image_size num_sampling_steps sampler cfg_scale class_labels num_samples seed batch_size vae
    mixed_precision enable_flashattn enable_layernorm_kernel enable_modulate_kernel output npz
""".split()


def test_documented_flags_and_defaults():
    assert {f.name for f in dataclasses.fields(TrainConfig)} >= set(DOCUMENTED_TRAIN)
    assert {f.name for f in dataclasses.fields(SampleConfig)} >= set(DOCUMENTED_SAMPLE)
    flags = parse(TrainConfig, [])
    assert {name: getattr(flags, name) for name in DEFAULTS} == DEFAULTS
    assert parse(SampleConfig, []).num_sampling_steps == 250 and parse(SampleConfig, []).cfg_scale == 4.0


@given(
    st.integers(1, 65_536),
    st.floats(1e-8, 1.0, allow_nan=False),
    st.booleans(),
    st.sampled_from(["zero2", "ddp", "gemini", "fsdp"]),
    st.booleans(),
    st.booleans(),
)
def test_any_spelling_gives_the_value(batch, lr, on, plugin, dashes, equals):
    words = {"batch_size": str(batch), "lr": repr(lr), "plugin": plugin}
    argv = []
    for name, value in words.items():
        name = "--" + (name.replace("_", "-") if dashes else name)
        argv += [f"{name}={value}"] if equals else [name, value]
    argv.append(("--" if on else "--no_") + "grad_checkpoint")
    flags = parse(TrainConfig, argv)
    assert (flags.batch_size, flags.lr, flags.plugin, flags.grad_checkpoint) == (batch, lr, plugin, on)
    assert flags.given == {"batch_size", "lr", "plugin", "grad_checkpoint"}
    assert "given" not in to_dict(flags)


def test_values_with_dashes_are_left_alone():
    flags = parse(TrainConfig, ["--data-path", "my-pictures/a-b", "--outputs=./out-dir"])
    assert flags.data_path == "my-pictures/a-b" and flags.outputs == "./out-dir"


def test_unknown_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(TrainConfig, ["--bacth_size", "4"])
    assert "--bacth_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--model", "DiT-XL/3"], "did you mean DiT-XL/"),
        (["--mixed_precision", "fp16"], "--mixed_precision fp16: needs a GPU"),
        (["--plugin", "gemini", "--mixed_precision", "fp32"], "use --mixed_precision bf16"),
        (["--plugin", "gemini"], "--plugin gemini: works in bf16"),  # the CPU falls back to fp32
        (["--plugin", "gemini", "--mixed_precision", "bf16", "--fp8"], "--fp8: does not work with --plugin gemini"),
        (["--plugin", "fsdp", "--data_parallel_replicate", "3"], "--data_parallel_replicate 3: does not divide the 4"),
        (["--plugin", "fsdp", "--reduce_dtype", "bf16"], "--reduce_dtype bf16: gradients are made in .* fp32"),
        (["--deterministic", "--attention", "cudnn"], "--attention cudnn: adds gradients in any order"),
        (["--batch_size", "0"], "--batch_size 0"),
        (["--lr", "-1"], "--lr"),
        (["--lr", "nan"], "--lr nan: out of range; give a number above 0"),
        (["--lr", "inf"], "--lr inf: out of range; give a number above 0"),
        (["--weight_decay", "nan"], "--weight_decay nan: out of range; give a number from 0 to 1,000"),
        (["--grad_clip", "inf"], "--grad_clip inf: out of range; give a number from 0 to"),
        (["--objective", "edm", "--edm_mean", "nan"], "--edm_mean nan: out of range; give a number from -10 to 10"),
        (["--ema_decay", "nan"], "--ema_decay nan"),
        (["--num_classes", "0"], "--num_classes 0: out of range; give a whole number from 1 to 1,000,000"),
        (["--num_classes", "-5"], "--num_classes -5: out of range; give a whole number from 1 to"),
        (["--label_drop", "1"], "--label_drop"),
        (["--sequence_parallel_size", "3"], "does not divide the 4 processes"),
        (["--grad_clip", "-1"], "--grad_clip"),
    ],
)
def test_mistakes_name_the_flag(argv, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse(TrainConfig, [*argv, "--outputs", str(tmp_path)]).resolve(world_size=4, has_gpu=False)


@pytest.mark.parametrize("flag", ("data_path", "validate_path"))
@pytest.mark.parametrize(
    "sources, message",
    [
        ("digits:0.7,mock:0.3", "mock has random latents"),
        ("digits:0.7,digits:0.3", "names the source digits twice"),
        ("digits:0.7,here.csv", "here.csv has no weight; write SOURCE:WEIGHT"),
        ("digits:0.7,,here.csv:1", "a source without a name has no weight"),
        ("digits:0.7,here.csv:0", "the weight of here.csv must be a number above 0, not 0"),
        ("digits:0.7,here.csv:-1", "not -1"),
        ("digits:0.7,here.csv:nan", "not nan"),
        ("digits:0.7,here.csv:inf", "not inf"),
        ("digits:0.7,here.csv:half", "not half"),
        ("digits:0.7,here.csv:", "not nothing"),
        ("digits:0.7,all.yaml:1", "all.yaml is a blend of its own"),
        ("digits:0.7,nowhere:0.3", "nowhere: doesn't exist"),
    ],
)
def test_mistakes_in_a_blend_of_one_line_are_found_with_the_flags(flag, sources, message, tmp_path):
    with pytest.raises(ValueError, match=f"--{flag} .*{message}"):
        parse(TrainConfig, [f"--{flag}", sources, "--outputs", str(tmp_path)]).resolve(world_size=1, has_gpu=False)


@pytest.mark.parametrize("path", ["http://host:8080/x-{0..3}.tar", "s3://a/b:1,s3://c/d:2", "digits"])
def test_addresses_and_names_are_no_blends_with_mistakes(path, tmp_path):
    parse(TrainConfig, ["--data_path", path, "--outputs", str(tmp_path)]).resolve(world_size=1, has_gpu=False)


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--outputs .*name another folder"):
        parse(TrainConfig, ["--outputs", str(tmp_path / "file" / "below")]).resolve(1, False)


def test_default_precision_falls_back_with_a_note(tmp_path):
    flags = parse(TrainConfig, ["--outputs", str(tmp_path)])
    resolved, notes = flags.resolve(world_size=1, has_gpu=False)
    assert resolved.mixed_precision == "fp32" and "no GPU" in notes[0]
    resolved, notes = flags.resolve(world_size=1, has_gpu=True)
    assert notes == [] and resolved == flags and flags.mixed_precision == "fp16"


@pytest.mark.parametrize("kind", (TrainConfig, SampleConfig))
def test_nobody_changes_flags(kind):
    flags = parse(kind, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        flags.batch_size = 1
    groups = headings_of(kind)
    names = [item.name for items in groups.values() for item in items]
    assert names == [item.name for item in flags_of(kind)] == list(to_dict(flags)) and len(set(names)) == len(names)
    assert all(groups) and max(map(len, groups.values())) <= 15  # a heading describes the flags below it


@pytest.mark.parametrize(
    "words", ["cfg_scale nan", "num_samples 0", "num_frames -4", "frame_interval 0", "cfg_interval 0 nan"]
)
def test_mistakes_in_sampling_name_the_flag(words, tmp_path):
    with pytest.raises(ValueError, match=f"--{words}"):
        parse(SampleConfig, [*f"--{words}".split(), "--output", str(tmp_path)]).resolve(world_size=1, has_gpu=False)
