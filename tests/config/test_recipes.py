"""Recipes, command-line overrides, --dry_run, and random latents as data."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

import train
from opendit.checkpoint.pretrained import METADATA_KEY
from opendit.config.command_line import overridden, parse
from opendit.config.recipes import RECIPES
from opendit.config.train import TrainConfig
from opendit.data.base import SampleKey
from opendit.data.mock import MockDataset
from opendit.models.zoo import build_model, config_from_dict, model_config
from opendit.parallel.engines import build_engine
from opendit.training.memory import GIB, Setup, estimate
from tests.encoders.published_folders import write_pipeline

NAMED = """
    digits digits_video dit_xl_imagenet256 speedrun_cifar10 speedrun_imagenet256 pretrain_l pretrain_xl pretrain_7b
    pretrain_7b_256p_joint pretrain_28b moviegen_5b moviegen_30b st_dit_xl ec_dit_1b
""".split()
GPUS = 64
OF_A_FOLDER = {
    f"{mock}{name}" for name in ("wan_14b_finetune", "lora") for mock in ("", "mock_")
}  # the folder determines their model


def dry_run(argv: list[str], capsys) -> str:
    train.main(["--dry_run", *argv])
    return capsys.readouterr().out


def test_the_documented_recipes_and_their_mocks_are_there():
    assert set(RECIPES) >= {*NAMED, *(f"mock_{name}" for name in NAMED)}
    follows = {name: recipe.follows for name, recipe in RECIPES.items() if recipe.follows}
    assert all(before in RECIPES for before in follows.values())
    assert follows["pretrain_7b_768p"] == "pretrain_7b_256p_joint"


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - OF_A_FOLDER))
def test_every_recipe_is_a_run_that_can_be(name, capsys):
    flags = parse(TrainConfig, ["--recipe", name])
    assert flags.given == {"recipe"}
    if name.startswith("mock_"):
        assert flags.data_path == "mock" and not flags.save and flags.global_batch_size is None
        assert flags.model == parse(TrainConfig, ["--recipe", name.removeprefix("mock_")]).model
    shown = dry_run([str(GPUS), "--recipe", name], capsys)
    assert f"{flags.model}: " in shown and "GiB a GPU" in shown
    tokens = int(re.search(r"tokens +([\d,]+) a sample", shown)[1].replace(",", ""))
    assert tokens == {"_256p_joint": 8192, "_768p": 73728}.get(re.search("(_256p_joint|_768p|)$", name)[1], tokens)


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_has_a_flag_twice(name):
    flags = [word for word in RECIPES[name].flags.split() if word.startswith("--")]
    assert len(flags) == len(set(flags))


def test_a_recipe_for_a_public_model_takes_the_folder_s(tmp_path, capsys):
    folder = write_pipeline(tmp_path / "wan", "wan")
    shown = dry_run(["4", "--recipe", "mock_wan_14b_finetune", "--pretrained", str(folder)], capsys)
    assert "wan/wan: " in shown and "plugin fsdp, bf16" in shown and "GiB a GPU" in shown


def test_the_paper_s_setting():
    """Peebles & Xie 2023, sec. 4: AdamW, constant 1e-4, no decay, batch 256, flips, EMA 0.9999, 7 M steps (XL/2)."""
    flags = parse(TrainConfig, ["--recipe", "dit_xl_imagenet256"])
    assert (flags.model, flags.image_size, flags.global_batch_size) == ("DiT-XL/2", 256, 256)
    assert (flags.lr, flags.lr_schedule, flags.warmup_steps, flags.weight_decay) == (1e-4, "constant", 0, 0)
    assert (flags.ema_decays, flags.random_flip, flags.max_steps) == ([0.9999], True, 7_000_000)
    assert (flags.objective, flags.prediction, flags.label_drop) == ("ddpm", "eps", 0.1)


@pytest.mark.parametrize(
    ("name", "lr", "batch"),
    [("pretrain_7b", 1e-4, 4608), ("pretrain_7b_256p_joint", 6e-5, 256), ("moviegen_30b", 1e-4, 9216)],
)
def test_nemo_s_settings(name, lr, batch):
    """The settings are those of NeMo's nemo/collections/diffusion/train.py for pretrain_7b and its variants."""
    flags = parse(TrainConfig, ["--recipe", name])
    assert (flags.lr, flags.warmup_steps, flags.lr_schedule, flags.weight_decay) == (lr, 100, "constant", 0.1)
    assert (flags.adam_beta1, flags.adam_beta2, flags.global_batch_size) == (0.9, 0.95, batch)


def test_the_command_line_overrides_wherever_it_stands():
    for argv in (["--recipe", "digits", "--lr", "1"], ["--lr=1", "--factory", "digits", "--yes"]):
        flags = parse(TrainConfig, [*argv, "--outputs", "/else/where", "--batch-size", "64"])
        assert flags.lr == 1 and flags.max_steps == 2600 and flags.recipe == "digits"
        assert overridden(flags) == {"lr": (3e-3, 1.0)}  # no output folders, and no values that equal the recipe's
    assert parse(TrainConfig, ["--recipe", "pretrain_xl", "--no_cross_attention"]).cross_attention is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--recipe", "pretran_xl"], "--recipe pretran_xl: no such recipe; did you mean pretrain_xl?"),
        (["--recipe", "PRETRAIN_XL"], "did you mean pretrain_xl?"),
        (["--recipe", "LIST"], "did you mean list?"),
        (["--BATCH_SIZE", "3"], "--BATCH_SIZE: no such flag; did you mean --batch_size?"),
        (["--recipe", "digits", "--bach_size", "3"], "--bach_size: no such flag; did you mean --batch_size?"),
        (["--recipe", "digits", "optim.lr=3"], "no flag; did you mean --lr 3?"),
        (["--recipe", "digits", "fast"], "fast: a value without a flag"),
    ],
)
def test_a_mistake_names_what_was_meant(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(TrainConfig, argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_the_list(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--recipe", "list"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"{name} " in shown for name in NAMED)
    assert "after pretrain_7b_256p_joint" in shown and "mock_digits" not in shown


@pytest.mark.parametrize(
    ("world", "asked", "most", "given", "expected"),
    [
        (8, 256, 32, False, (32, 1, 256)),
        (1, 256, 32, True, (32, 8, 256)),
        (3, 64, 64, False, (21, 1, 63)),  # a recipe's batch size is adjusted
        (4, 24, 4, True, (3, 2, 24)),  # the largest divisor of a rank's share
        (8, 4, 64, False, (1, 1, 8)),
        (3, 64, 64, True, "use 63"),
    ],
)
def test_a_global_batch_is_cut_for_the_ranks(world, asked, most, given, expected, tmp_path):
    given = frozenset({"global_batch_size"} if given else ())
    flags = TrainConfig(global_batch_size=asked, batch_size=most, outputs=str(tmp_path), given=given)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            flags.resolve(world, True)
        return
    flags, notes = flags.resolve(world, True)
    assert (flags.batch_size, flags.grad_accumulation, flags.global_batch_size) == expected
    assert len(notes) == (expected[-1] != asked)


def test_a_dry_run_says_what_the_formulas_say_and_touches_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("opendit.parallel.mesh.init_mesh", lambda **_: pytest.fail("started processes"))
    monkeypatch.setattr("opendit.training.build.empty_model", lambda *_, **__: pytest.fail("made weights"))
    outputs = tmp_path / "outputs"
    argv = ["--recipe", "dit_xl_imagenet256", "--outputs", str(outputs), "--data_path", str(tmp_path / "nowhere")]
    shown = dry_run(["8", *argv], capsys)
    assert not outputs.exists() and f"not found: {tmp_path / 'nowhere'}" in shown and "doesn't exist" in shown
    config = model_config("DiT-XL/2", input_size=(32, 32), in_channels=4, num_classes=1000)
    with torch.device("meta"):
        weights = sum(p.numel() for p in build_model(config).parameters())
    assert f"{weights / 1e6:,.1f} M parameters" in shown and "256 a sample, 65,536 a step" in shown
    assert f"{3 * config.forward_flops() / 1e9:,.1f} GFLOP a training sample" in shown
    assert f"{3 * 32 * config.forward_flops() / 1e12:,.1f} TFLOP a step and GPU" in shown
    needs = estimate(config, Setup("zero2", "bf16", 8), 32).total / GIB
    assert f"{needs:,.2f} GiB a GPU" in shown and "7,000,000 at most" in shown
    shown = dry_run(["2", "--recipe", "digits", "--epochs", "3"], capsys)
    assert "22.47 an epoch, 67 in all = 3.0 epochs, 4,288 samples" in shown
    for epochs, last in ((), "40,000"), (("--epochs", "1400"), "31,456"):  # 1,438 digits, 64 a step
        assert f" {last} in all = " in dry_run(["2", "--recipe", "digits", "--max_steps", "40000", *epochs], capsys)
    assert re.search(r"on 80 GB +fits 79\.1 GiB \(up to --batch_size \d+\)", shown)
    shown = dry_run(["--recipe", "mock_pretrain_xl_768p", "--sequence_parallel_size", "8"], capsys)
    assert "8, plugin" in shown and "over 8 ranks" in shown  # as many GPUs as share a sequence


def test_a_batch_larger_than_the_data_names_the_batch_that_works(capsys):
    digits = ["1", "--recipe", "digits", "--global_batch_size"]  # a smaller --batch_size would not help
    with pytest.raises(SystemExit):
        dry_run([*digits, "2000"], capsys)
    advised = re.search(r"; give --global_batch_size (\d+) or less", capsys.readouterr().err)
    assert advised is not None and "1.00 an epoch" in dry_run([*digits, advised[1]], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--image_size 10 --vae none --model DiT-Ti/4", "use 8"),
        ("--recipe pretrain_xl --image_size 250", "--image_size 250: does not divide by 8 .* use 248"),
        ("--dry_run 4 --sequence_parallel_size 3", "does not divide the 4 processes"),
        ("--dry_run 3 --global_batch_size 64", "use 63"),
        ("--dry_run -1", "--dry_run -1"),
        ("--lora 4", "--pretrained"),
        (
            "--recipe digits --lora 128 --pretrained nowhere",
            "--lora 128: out of range; give a rank from 1 to below the width, 128",
        ),
        (
            "8 --recipe st_dit_xl_768p --sequence_parallel_size 4 --sequence_parallel_type ring",
            "stdit models have no attention to all tokens",
        ),
        ("2 --recipe pretrain_xl --lora 8 --pretrained nowhere --plugin gemini", "--lora: does not work with --plugin"),
        (
            "3 --recipe pretrain_xl --sequence_parallel_size 3 --sequence_parallel_type ulysses",
            "16 heads can't be shared out over 3 ranks that way; use ring or auto",
        ),
        ("--adam_beta2 1", "--adam_beta2 1.0: out of range; give a number at least 0 and below 1"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(argv, message, capsys):
    words = argv.split()
    with pytest.raises(SystemExit):
        train.main(words if "--dry_run" in words else ["--dry_run", *words])
    assert re.search(message, capsys.readouterr().err)


def test_a_dry_run_compares_the_blocks_of_pretrained_weights(tmp_path, capsys):
    config = model_config("DiT-Ti/2", input_size=(8, 8), in_channels=1, num_classes=10)
    base = tmp_path / "base.safetensors"
    save_file(
        build_model(config).state_dict(),
        base,
        {METADATA_KEY: json.dumps({"model": "DiT-Ti/2", "config": config.to_dict()})},
    )
    argv = ["--recipe", "digits", "--pretrained", str(base)]
    assert "DiT-Ti/2: " in dry_run(argv, capsys)
    with pytest.raises(SystemExit):
        dry_run([*argv, "--qk_norm"], capsys)
    assert "has other blocks than this run's model (qk_norm False there, True here)" in capsys.readouterr().err
    assert "isn't there: its blocks are not compared" in dry_run([*argv[:-1], str(tmp_path / "none")], capsys)


def test_a_dry_run_with_lora_counts_the_states_of_what_is_trained(capsys):
    argv = ["--recipe", "dit_xl_imagenet256", "--data_path", "mock", "--pretrained", "base.pt"]
    needs = [
        float(re.search("states ([\\d.]+)", dry_run([*argv, *more], capsys))[1]) for more in ([], ["--lora", "16"])
    ]
    # bf16 weights, and fp32 masters, moments and averages for qkv, proj, fc1 and fc2 of 28 blocks, 1152 channels wide
    added = 28 * 16 * 1152 * ((3 + 1) + (1 + 1) + 2 * (1 + 4))
    assert needs[1] == pytest.approx((2 * (674.8e6 + added) + 16 * added) / GIB, abs=0.01) and needs[0] > 11


def test_a_stage_asks_for_the_weights_of_the_one_before(capsys):
    shown = dry_run(["--recipe", "pretrain_xl_256p_joint"], capsys)
    assert "follows pretrain_xl: give that run to --pretrained" in shown
    for argv in (["--pretrained", "somewhere"], ["--data_path", "mock"]):
        assert "follows" not in dry_run(["--recipe", "pretrain_xl_256p_joint", *argv], capsys)


@pytest.mark.parametrize("text", [None, "bytes", "t5"])
@pytest.mark.parametrize("frames", [None, 5])
def test_random_latents_are_the_model_s_size_and_depend_on_the_row_alone(text, frames):
    options = dict(seed=1, vae="ema", text_encoder=text, max_text_tokens=6, num_classes=7)
    data, again = (MockDataset(24, frames, **options) for _ in range(2))
    shape = (8, 3, 3) if frames is None else (8, 5, 3, 3)
    assert data.sample_shape == shape and (data.describe().conditioning == "text") == (text is not None)
    item, same, other = data[SampleKey(11, 0, 0)], again[SampleKey(11, 5, 3)], data[SampleKey(12, 0, 0)]
    assert item.x.shape == shape and torch.equal(item.x, same.x) and not torch.equal(item.x, other.x)
    assert item.x[4:].abs().max() == 0  # the deviation is zero, so the latent is the mean
    many = torch.stack([data.read(row).x[:4] for row in range(200)])
    assert abs(many.mean()) < 4 / math.sqrt(many.numel()) and abs(many.std() - 1) < 0.02
    if text == "t5":
        assert item.embedding.tokens.shape == (6, 1024) and item.embedding.mask.all()
        assert not torch.equal(item.embedding.pooled, other.embedding.pooled)
        assert torch.equal(item.embedding.tokens, same.embedding.tokens)
    elif text is None:
        assert {data.label(row) for row in range(50)} == set(range(7))


def test_a_mock_run_trains_and_leaves_no_checkpoint(tmp_path, no_ranks, monkeypatch, capsys):
    engines = []
    monkeypatch.setattr(
        "opendit.training.build.build_engine", lambda *a, **k: engines.append(build_engine(*a, **k)) or engines[-1]
    )
    argv = "--recipe mock_pretrain_xl --model vDiT-Ti/122 --image_size 32 --batch_size 2 --max_steps 3 --log_every 1"
    train.main([*argv.split(), "--num_workers", "0", "--max_text_tokens", "5", "--outputs", str(tmp_path)])
    (group,) = engines[0].adam.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.95), 0.1)
    run = tmp_path / "000-vDiT-Ti-122"
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(math.isfinite(line["loss"]) for line in lines)
    assert not list((run / "checkpoints").glob("step*")) and not list(run.glob("samples/*"))
    stored = json.loads((run / "config.json").read_text())
    assert stored["recipe"]["name"] == "mock_pretrain_xl" and "batch_size" in stored["recipe"]["changed"]
    assert config_from_dict(stored["model_config"]).text.name == "t5"
    assert "mock_pretrain_xl, changed: batch_size 2 (recipe: 64)" in capsys.readouterr().out


def test_a_recipe_for_captions_on_classes_says_what_it_drops(capsys):
    argv = "--recipe pretrain_l --no_use_video --model DiT-Ti/2 --data_path digits --image_size 8 --vae none".split()
    shown = dry_run(argv, capsys)
    for name in ("text_encoder", "cross_attention"):
        assert f"{name} of --recipe pretrain_l is not used: --data_path digits has classes" in shown
    with pytest.raises(SystemExit):  # on the command line it is a mistake
        train.main(["--dry_run", *argv, "--text_encoder", "bytes"])
    assert "--text_encoder: needs captions, and --data_path digits has none" in capsys.readouterr().err
