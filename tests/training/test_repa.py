"""train.py --repa: training on one or two ranks, resuming, sampling, and combinations that are refused."""

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import opendit
import train
from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.encoders.vision import VisionTeacher
from tests.ranks import run_ranks
from tests.training.test_train import TINY, log_of, start

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
FLAGS = [*TINY, *"--objective flow --lr 3e-3 --sample_every 0 --repa_block 2".split()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("teacher")
    Dinov2Model(Dinov2Config(**SMALL, patch_size=7, mlp_ratio=2)).save_pretrained(folder)
    return str(folder)


def losses(folder):
    return [line["loss"] for line in log_of(folder / "000-DiT-Ti-2")]


def test_features_are_one_for_each_token_of_the_normalised_picture(teacher, tmp_path):
    made = VisionTeacher(teacher, (3, 5), 0.5, False, torch.device("cpu"), torch.float32)
    pixels = torch.rand(2, 1, 21, 35) * 2 - 1
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((pixels.expand(-1, 3, -1, -1) + 1) / 2 - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    wanted = Dinov2Model.from_pretrained(teacher)(x).last_hidden_state[:, 1:]
    torch.testing.assert_close(made.alignment(pixels).features, wanted, rtol=1e-4, atol=1e-4)
    ViTModel(ViTConfig(**SMALL, patch_size=4, intermediate_size=16)).save_pretrained(tmp_path)
    vit = VisionTeacher(str(tmp_path), (4, 4), 0.5, True, torch.device("cpu"), torch.float32)
    assert vit.alignment(torch.zeros(2, 3, 8, 8)).features.shape == (2, 16, 12)


def test_two_ranks_train_what_one_does_a_resume_goes_on_and_the_run_draws(teacher, tmp_path, no_ranks, capsys):
    flags = [*FLAGS, "--repa", teacher, "--repa_projector", "conv", "--route", "2:4:0.5"]
    two, one = tmp_path / "two", tmp_path / "one"
    run_ranks(2, start, [*flags, "--batch_size", "8", "--max_steps", "3", "--no_save", "--outputs", str(two)])
    flags += ["--batch_size", "16", "--outputs", str(one), "--load", "latest"]
    train.main([*flags, "--max_steps", "2"])
    train.main([*flags, "--max_steps", "3"])
    said = capsys.readouterr().out
    assert f" aligned     after 2 of 4 blocks with --repa {teacher}: weight 0.5, projector conv\n" in said
    assert " route       50 % of tokens skip blocks 2 to 3 (TREAD)\n" in said
    torch.testing.assert_close(losses(one), losses(two), rtol=2e-5, atol=0)
    assert losses(one)[0] > 1.3  # the objective's loss plus half of 1 - cosine
    pipe = opendit.load(one / "000-DiT-Ti-2")
    assert pipe([1], steps=2, progress=False)[0].size == (8, 8) and pipe.config.alignment.width == 12
    with pytest.raises(SystemExit):
        train.main([*FLAGS[:-2], "--load", str(one / "000-DiT-Ti-2"), "--outputs", str(one)])
    assert "checkpoint of another model (alignment" in capsys.readouterr().err
    begun = [*FLAGS[:-2], "--pretrained", str(one / "000-DiT-Ti-2"), "--outputs", str(tmp_path / "plain")]
    train.main([*begun, "--max_steps", "1", "--batch_size", "8"])  # the projector is left out
    assert opendit.load(tmp_path / "plain" / "000-DiT-Ti-2").config.alignment is None


@pytest.mark.parametrize(
    "flags,said",
    [
        ("--repa_block 5", "--repa_block 5: .*has 4 blocks"),
        ("--repa_block 2 --route 1:3:0.5", "--repa_block 2: --route 1:3:0.5"),
        ("--sequence_parallel_size 2", "--sequence_parallel_size"),
        ("--pack_tokens 64", "--pack_tokens"),
        ("--data_path mock", "--data_path mock"),
    ],
)
def test_what_it_does_not_work_with_is_named(flags, said, teacher):
    with pytest.raises(ValueError, match=said):
        parse(TrainConfig, ["--model", "DiT-Ti/2", "--repa", teacher, *flags.split()]).resolve(2, has_gpu=True)


def test_a_folder_without_an_encoder_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([*FLAGS, "--repa", str(tmp_path), "--outputs", str(tmp_path)])
    assert "can't be loaded" in (said := capsys.readouterr().err) and "DINOv2" in said
