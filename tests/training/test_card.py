"""--card chooses flags that fit the card by a plain dry run's estimate, and the next faster choice does not fit."""

import re

import pytest
import yaml

import train
from benchmarks.random_folder import write_folder
from opendit.config.command_line import parse, to_yaml
from opendit.config.train import TrainConfig

LARGE = (
    "--dry_run {} --data_path mock --model vDiT-7B/122 --use_video --num_frames 8 --image_size 256 --text_encoder bytes"
    " --max_text_tokens 16 --cross_attention --pretrained no.safetensors --global_batch_size 4 --enable_flashattn "
    "--enable_layernorm_kernel --enable_modulate_kernel --mixed_precision bf16"
)
SMALL = "--dry_run --data_path mock --model DiT-S/2 --image_size 256 --vae none --pretrained no.safetensors"


def shown(text: str, capsys) -> str:
    train.main(text.split())
    return capsys.readouterr().out


def needs(words: str, capsys, world: int = 1) -> float:
    """Return the GiB that a plain dry run with these flags estimates."""
    words = re.sub(" --grad_accumulation .", "", words)  # --global_batch_size sets it
    found = re.search(r"memory.*? +([\d.]+) GiB a GPU", shown(f"{LARGE.format(world)} {words}", capsys))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(("card", "usable"), [("40", 37.6), ("24", 22.56), ("18.5", 17.39), ("H100", 74.35)])
def test_the_first_that_fits_is_taken(card, usable, capsys):
    said = shown(f"{LARGE.format(1)} --lora 16 --card {card}", capsys)
    chosen, memory, capacity = re.findall(r"--card \S+: (.*)\n  ([\d.]+) of ([\d.]+) GiB", said)[0]
    assert float(capacity) == pytest.approx(usable, abs=0.01) and "M trained weights, at all linear layers" in said
    assert needs(chosen, capsys) == float(memory) <= float(capacity)
    before = re.search(r"faster, if it fitted: (.*), ([\d.]+) GiB", said)
    if card == "H100":
        assert before is None
    else:
        assert before is not None and needs(before[1], capsys) == float(before[2]) > float(capacity)
    assert ("--recompute none --batch_size 4" in chosen) == (card == "H100"), chosen


@pytest.mark.parametrize(
    ("card", "speed", "room"), [("24 --hardware H200", "H200", 22.56), ("24 --hardware A100", "A100", 22.56),
                                ("H100 --hardware H200", "H100", 74.35), ("4090", "4090", 22.09)]
)  # fmt: skip
def test_the_step_time_names_the_card_whose_speed_it_assumes(card, speed, room, capsys):
    """The time is that of a plain dry run with the same flags for hardware of this name."""
    time = r"time +([\d,.]+) ms a step, [\d,]+ tokens/s a GPU predicted at (.*?) speed \("
    said = shown(f"{SMALL} --lora 4 --card {card} --batch_size 2", capsys)
    chosen, capacity = re.findall(r"--card \S+: (.*)\n  [\d.]+ of ([\d.]+) GiB", said)[0]
    (found,) = re.findall(time, said)
    assert found[1] == speed and f" steps, predicted at {speed} speed\n" in said and float(capacity) == room
    assert re.findall(time, shown(f"{SMALL} {chosen} --hardware {speed}", capsys)) == [found]


def test_none_turns_off_a_recipe_s_card(flux, capsys):
    argv = public(flux, "--recipe lora")
    assert "--card auto: --lora 16" in shown(argv, capsys)
    without = shown(f"{argv} --card none", capsys)
    assert "--card" not in without.replace("card None (recipe: auto)", "") and "memory  " in without
    kept = yaml.safe_load(to_yaml(parse(TrainConfig, ["--recipe", "lora", "--card", "none"])))
    assert kept == {"recipe": "lora", "card": "none"}


def test_flags_that_are_given_stay(capsys):
    said = shown(f"{LARGE.format(1)} --lora 8 --recompute but_attention --batch_size 1 --card 80", capsys)
    assert "--card 80: --lora 8 --mixed_precision bf16 --recompute but_attention --batch_size 1 --grad_acc" in said
    said = shown(f"{LARGE.format(4)} --lora 8 --card 9", capsys)
    assert "--plugin fsdp" in said.split("\n")[0]  # fsdp ranks divide the frozen weights


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """Return the folder of a FLUX.1 in its published size. The weights are zeros and take no disk space."""
    folder = tmp_path_factory.mktemp("cards") / "flux"
    write_folder("flux", folder, empty=True)
    return folder


def public(folder, more: str) -> str:
    return (
        f"--dry_run 1 --data_path mock --pretrained {folder} --image_size 1024 --lora 16 --global_batch_size 1 "
        f"--mixed_precision bf16 --enable_flashattn --enable_layernorm_kernel --enable_modulate_kernel {more}"
    )


@pytest.mark.parametrize(
    ("card", "chosen", "lost"),
    [
        ("48", "--recompute cheap", 1),
        ("40", "--recompute mlp", 1),
        ("36", r"--recompute but_attention --recompute_blocks \d\d", 1),
        ("24", r"--base_precision int8 --recompute but_attention --recompute_blocks \d\d", 2),
        ("24 --recompute_blocks 57", "--base_precision int8 --recompute but_attention --recompute_blocks 57", 2),
        ("12", r"--base_precision int8 --offload blocks:\d+ --grad_checkpoint --recompute_blocks \d\d", 3),
        ("12 --recompute but_attention", r"--base_precision int8 --offload blocks:\d+ --recompute but_attention", 3),
        ("24 --fp8", r"--fp8 --base_precision fp8 --recompute but_attention --recompute_blocks \d\d", 2),
        ("12 --offload blocks", r"--offload blocks --recompute but_attention", 2),
        ("16 --offload blocks --recompute auto", r"--offload blocks --recompute but_attention", 2),
        ("12 --offload none", "--base_precision nf4 --recompute but_attention", 2),
    ],
)
def test_small_cards_get_stored_blocks_and_then_blocks_in_host_memory(flux, card, chosen, lost, capsys):
    said = shown(public(flux, f"--card {card}"), capsys)
    words, memory, capacity = re.findall(r"--card \S+: (.*)\n  ([\d.]+) of ([\d.]+) GiB", said)[0]
    assert re.search(f" {chosen} --batch_size 1 ", words), words
    assert said.count("gives up: ") == lost and float(memory) <= float(capacity)
    if fewer := re.search(r"--recompute_blocks (\d+)", words):
        assert f"{fewer[1]} of 57 blocks are computed again" in said
    plain = shown(public(flux, re.sub("--(lora|mixed_precision|grad_accumulation) \\S+", "", words)), capsys)
    assert re.search(rf"memory +{memory} GiB a GPU estimated", plain)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (f"{LARGE.format(1)} --lora 16 --card 6", r"--card 6: 5.6 GiB can be used, and --lora 16 .* needs [\d.]+;"),
        (f"{SMALL} --lora 4 --card Z80", "--card Z80: not known; give its GiB, or one of auto, none, H200, "),
        (f"{SMALL} --lora 4 --card 0.5", "--card 0.5: out of range; give GiB from 1 to 10,000"),
        (f"{SMALL} --lora 4 --card 24 --parallel auto", "--card: does nothing with --parallel auto"),
        (SMALL.replace("--pretrained no.safetensors", "--card 24"), "--card: does nothing without --lora"),
        (f"{SMALL} --lora 600 --card 24", "--lora 600: out of range; give a rank from 1 to below the width"),
    ],
)  # fmt: skip
def test_what_can_t_be_is_said_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(argv.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and re.search(message, said) and said.count("\n") == 1, said
