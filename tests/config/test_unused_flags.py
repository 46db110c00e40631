"""Flags without effect: rejected on the command line, noted if a recipe sets them."""

import json

import pytest
from safetensors.torch import save_file

import sample
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config.command_line import overridden, parse, read_flags
from opendit.config.recipes import RECIPES
from opendit.config.sample import SampleConfig
from opendit.config.train import TrainConfig
from opendit.models.conditioning import TextConfig
from opendit.models.zoo import build_model, model_config

CLIPS = "--model vDiT-Ti/122 --use_video --data_path mock"


@pytest.mark.parametrize(
    ("unused", "used"),
    [
        ("--lora_alpha 8", "--lora 4 --pretrained base.safetensors"),
        ("--lora_targets qkv", "--lora 4 --pretrained base.safetensors"),
        ("--num_frames 4", CLIPS),
        ("--frame_interval 2", "--model vDiT-Ti/122 --use_video --data_path clips.csv"),
        ("--short_clips interval", "--model vDiT-Ti/122 --use_video --data_path clips.csv"),
        ("--flow_shift 3", "--objective flow"),
        ("--edm_std 1", "--objective edm"),
        ("--full_attention", f"--model ST-DiT-Ti/122 {CLIPS[20:]}"),
        ("--expert_capacity 4", "--model EC-DiT-Ti/2"),
        ("--recompute_blocks 2", "--grad_checkpoint"),
        ("--keep_gathered", "--dry_run --sequence_parallel_size 2"),
        ("--sequence_parallel_type ring", "--dry_run --sequence_parallel_size 2"),
        ("--max_bad 0.5", "--data_path clips.csv"),
        ("--ckpt_keep 3 --no_save", "--save"),
        ("--ckpt_every 5 --no_save --sample_every 7", "--save"),
        ("--data_path mock --random_flip", "--data_path digits"),
        ("--data_path mock --sample_steps 3", "--data_path digits"),
        ("--warmup_steps 9 --max_steps 8", "--max_steps 9"),
        ("--reshard never", "--plugin fsdp"),
        ("--offload average", "--plugin fsdp"),
        ("--no_gather_fp8 --fp8", "--plugin fsdp"),
        ("--no_gather_fp8 --plugin fsdp", "--fp8"),
        ("--reduce_dtype bf16 --mixed_precision bf16", "--plugin fsdp"),
        ("--load there --pretrained base.safetensors", "--lora 4"),
    ],
)
def test_of_train(unused, used, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "checkpoints" / "step_0000001").mkdir(parents=True)
    for name in ("base.safetensors", "clips.csv"):
        (tmp_path / name).touch()
    read_flags(TrainConfig, [*unused.split(), *used.split()])
    with pytest.raises(SystemExit) as stop:
        read_flags(TrainConfig, unused.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and any(word in said for word in unused.split() if word.startswith("--")), said


def test_a_recipe_s_are_noted(tmp_path):
    """A class model replaces a recipe's clip model. The recipe's flags for clips are then noted and not refused."""
    argv = "--recipe st_dit_xl --no_use_video --model DiT-XL/2 --objective ddpm --no_cross_attention --data_path digits"
    flags = parse(TrainConfig, [*argv.split(), "--outputs", str(tmp_path)])
    assert "objective" in overridden(flags)
    _, notes = flags.resolve(1, has_gpu=True)
    assert "--num_frames of --recipe st_dit_xl does nothing without --use_video" in notes
    assert "--flow_times of --recipe st_dit_xl belongs to --objective flow" in notes
    flags = parse(TrainConfig, ["--recipe", "digits", "--max_steps", "20", "--outputs", str(tmp_path)])
    assert any("--warmup_steps 100: the run ends before" in note for note in flags.resolve(1, has_gpu=True)[1])


@pytest.mark.parametrize("name", [name for name in RECIPES if "--pretrained" not in RECIPES[name].flags])
def test_no_recipe_sets_what_it_does_not_use(name):
    flags = parse(TrainConfig, ["--recipe", name, "--dry_run", "64"])
    notes = flags.resolve(64, has_gpu=True)[1]
    assert not [note for note in notes if "--" in note and "recipe" in note and " follows " not in note]


PICTURES = {"name": "DiT-Ti/2", "num_classes": 10}
CAPTIONS = {"name": "DiT-Ti/2", "text": TextConfig("bytes", 64, 16, False)}


@pytest.mark.parametrize(
    ("model", "argv", "message"),
    [
        (PICTURES, "--cfg_scale 1 --cfg_interval 0 1", "--cfg_interval: does nothing with --cfg_scale 1"),
        (PICTURES, "--cfg_scale 1 --cfg_channels 1", "--cfg_channels: does nothing with --cfg_scale 1"),
        (PICTURES, "--cfg_scale 1 --guidance_every 2", "--guidance_every: does nothing with --cfg_scale 1"),
        (PICTURES, "--guidance_every 2 --cache taylor:3", "leave one of them out"),
        (
            PICTURES,
            "--num_sampling_steps 3 --cache taylor:3",
            "at most half the 3 sampling steps",
        ),
        (PICTURES, "--cache first", "--cache first: no such form; give first_block[:THRESHOLD] or taylor:K[:ORDER]"),
        (PICTURES, "--cfg_channels 2", "--cfg_channels 2: "),
        (PICTURES, "--weights model", "--weights: does nothing with a file as --ckpt"),
        (PICTURES, "--outputs elsewhere", "--outputs: does nothing with --ckpt PATH"),
        (PICTURES, "--sequence_parallel_type ring", "--sequence_parallel_type: does nothing without"),
        (PICTURES, "--text_encoder t5", "--text_encoder: "),
        (CAPTIONS, "--text_encoder t5", "--text_encoder: "),
        (CAPTIONS, "--class_labels 1", "--class_labels: "),
        (PICTURES, "--prompt one", "--prompt: "),
        (PICTURES, "--num_frames 4", "--num_frames: "),
        (PICTURES, "--frame_interval 4", "--frame_interval: "),
        (PICTURES, "--num_classes 10", "--num_classes 10: "),
        (PICTURES, "--npz .", "--npz .: is a folder"),
        (PICTURES, "--npz nowhere/x", "its folder does not exist"),
    ],
)
def test_of_sample(model, argv, message, tmp_path, monkeypatch, capsys, no_ranks):
    monkeypatch.chdir(tmp_path)
    config = model_config(**model, input_size=(8, 8), in_channels=1)
    info = {"model": model["name"], "config": config.to_dict(), "vae": "none", "image_size": 8}
    save_file(build_model(config).state_dict(), "base.safetensors", {METADATA_KEY: json.dumps(info)})
    with pytest.raises(SystemExit) as stop:
        sample.main(["--ckpt", "base.safetensors", *argv.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_an_npz_is_given_its_suffix(tmp_path):
    """numpy appends .npz, so the name that is checked and shown must have it as well."""
    for name in ("figures", "figures.npz"):
        flags = parse(SampleConfig, ["--output", str(tmp_path), "--npz", str(tmp_path / name)])
        flags, _ = flags.resolve(1, has_gpu=False)
        assert flags.npz == str(tmp_path / "figures.npz")
