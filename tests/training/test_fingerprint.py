"""A resumed run prints one line for each difference in flags, data, networks and code."""

import copy
import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import train
from opendit.common.utils import hash_parts
from opendit.config.command_line import parse
from opendit.config.flags import flags_of
from opendit.config.train import OBJECTIVE_FLAGS, TrainConfig
from opendit.data.sources import build_dataset
from opendit.parallel.mesh import Mesh
from opendit.training import fingerprint as module
from opendit.training.fingerprint import (
    AVERAGES,
    CODE,
    CURVE,
    DERIVED,
    FREE,
    MEANS,
    OF_THE_MODEL,
    ROUNDING,
    by_value,
    changes,
    stored_fingerprint,
)
from opendit.training.prepare import prepare
from tests.encoders.test_vae import small_vae
from tests.ranks import run_ranks, several_programs

TINY = "--model DiT-Ti/2 --image_size 8 --vae none --num_workers 0 --batch_size 4 --mixed_precision fp32".split()
QUICK = [*TINY, "--sample_every", "0", "--log_every", "1"]
ALONE = Mesh(0, 1, 0, torch.device("cpu"))
FLAGS = {item.name for item in flags_of(TrainConfig)}


def of(tmp_path, *more: str) -> dict:
    """Return the fingerprint of a run with these flags, without starting the run."""
    flags, notes = parse(TrainConfig, [*TINY, "--outputs", str(tmp_path / "outputs"), *more]).resolve(1, has_gpu=False)
    spec = prepare(flags, ALONE, notes)
    spec.lock.__exit__(None, None, None)
    return spec.fingerprint


def notes(text: str) -> list[str]:
    return [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: resume: ")]


# ------------------------------------------------------------------------------------------ every flag


def test_every_flag_is_listed_once():
    """Every new flag must be in FREE, OF_THE_MODEL or DERIVED, or be listed here as one that changes the curve."""
    known = {"image_size", "num_frames", "frame_interval", "fps", "short_clips", "label_drop", "lr", "lr_schedule",
             "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "grad_clip", "objective", "global_seed",
             *OBJECTIVE_FLAGS, "plugin", "mixed_precision", "compile", "deterministic",
             "data_parallel_replicate", "reduce_dtype", "tensor_parallel_size", "expert_parallel_size",
             "pipeline_parallel_size", "pipeline_schedule", "bucket_tokens", "pack_tokens", "max_upscale",
             "shuffle_tags", "tag_drop", "random_crop", "optimizer", "muon_momentum", "muon_precision",
             "average", "route", "route_until", "route_drop", "repa", "repa_block", "repa_weight", "repa_projector",
             "uncertainty_weighting", "base_precision"}  # fmt: skip
    lists = [FREE & FLAGS, OF_THE_MODEL, DERIVED, known]
    assert set().union(*lists) == FLAGS
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert set(by_value("ddpm")) == known - {name for name, objective in OBJECTIVE_FLAGS.items() if objective != "ddpm"}


def test_what_has_a_meaning_is_in_the_fingerprint(tmp_path):
    found = of(tmp_path)
    assert {name for name, means in MEANS.items() if means != CURVE} <= found.keys()
    assert json.loads(json.dumps(found)) == found


# flags at first -> flags of the resumed run, a part of the line that is printed, the difference's meaning
CHANGED = {
    "lr": ("", "--lr 1", "--lr 0.0001 -> 1.0", CURVE),
    "lr_schedule": ("", "--lr_schedule cosine", "--lr_schedule constant -> cosine", CURVE),
    "warmup_steps": ("", "--warmup_steps 9", "--warmup_steps 0 -> 9", CURVE),
    "cosine's end": ("--lr_schedule cosine --max_steps 90", "--lr_schedule cosine --max_steps 99", "90 -> 99", CURVE),
    "weight_decay": ("", "--weight_decay 0.1", "--weight_decay 0.0 -> 0.1", CURVE),
    "adam_beta1": ("", "--adam_beta1 0.8", "--adam_beta1 0.9 -> 0.8", CURVE),
    "adam_beta2": ("", "--adam_beta2 0.95", "--adam_beta2 0.999 -> 0.95", CURVE),
    "grad_clip": ("", "--grad_clip 0", "--grad_clip 1.0 -> 0.0", CURVE),
    "label_drop": ("", "--label_drop 0.2", "--label_drop 0.1 -> 0.2", CURVE),
    "global_seed": ("", "--global_seed 7", "--global_seed 42 -> 7", CURVE),
    "random_flip": ("", "--random_flip", "--random_flip False -> True", CURVE),
    "global batch": ("", "--batch_size 8", "the global batch 4 -> 8", CURVE),
    "split": ("", "--batch_size 2 --grad_accumulation 2", "4 x 1 x 1 -> 2 x 1 x 2", ROUNDING),
    "global_batch_size": ("", "--global_batch_size 4 --batch_size 1", "4 x 1 x 1 -> 1 x 1 x 4", ROUNDING),
    "min_snr": ("", "--min_snr 5", "--min_snr none -> 5.0", CURVE),
    "ddpm_shift": ("", "--ddpm_shift 2", "--ddpm_shift 1.0 -> 2.0", CURVE),
    "prediction": ("", "--prediction v", "--prediction eps -> v", CURVE),
    "flow_shift": ("--objective flow", "--objective flow --flow_shift 3", "--flow_shift 1.0 -> 3.0", CURVE),
    "flow_shift_tokens": (
        "--objective flow", "--objective flow --flow_shift_tokens 4", "--flow_shift_tokens none -> 4", CURVE),
    "flow_times": (
        "--objective flow", "--objective flow --flow_times logit_normal", "uniform -> logit_normal", CURVE),
    "edm_mean": ("--objective edm", "--objective edm --edm_mean -1", "--edm_mean -1.2 -> -1.0", CURVE),
    "edm_std": ("--objective edm", "--objective edm --edm_std 1", "--edm_std 1.2 -> 1.0", CURVE),
    "edm_sigma_data": ("--objective edm", "--objective edm --edm_sigma_data 1", "--edm_sigma_data 0.5 -> 1.0", CURVE),
    "objective": ("", "--objective flow", "--objective ddpm -> flow", CURVE),
    "another EMA": ("", "--ema_decay 0.9", "that of 0.9 begins as the checkpoint's of 0.9999", AVERAGES),
    "an EMA more": ("", "--ema_decay 0.9999 0.9", "--ema_decay 0.9999 -> 0.9999 0.9", AVERAGES),
    "an EMA less": ("--ema_decay 0.9 0.99", "--ema_decay 0.9", "that of 0.99 ends with the checkpoint", AVERAGES),
    "another order": ("--ema_decay 0.9 0.99", "--ema_decay 0.99 0.9", "draws from that of 0.99", AVERAGES),
    "ema_warmup": ("", "--no_ema_warmup", "--ema_warmup True -> False", AVERAGES),
    "plugin": ("", "--plugin ddp", "--plugin zero2 -> ddp", ROUNDING),
    "mixed_precision": ("", "--mixed_precision bf16", "--mixed_precision fp32 -> bf16", ROUNDING),
    "compile": ("", "--compile", "--compile False -> True", ROUNDING),
    "attention": ("", "--attention math", "--attention auto -> math", ROUNDING),
    "data_path": ("", "--data_path mock", "samples there, 131,072 here", CURVE),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_flag_is_one_line(case, tmp_path):
    before, after, says, means = CHANGED[case]
    stored, now = of(tmp_path, *before.split()), of(tmp_path, *after.split())
    lines = changes(stored, now, 3)
    if case == "data_path":  # mock pictures have another size and flip setting, too
        lines = [line for line in lines if "--data_path" in line]
    assert len(lines) == 1 and lines[0].startswith("resume: ") and "\n" not in lines[0], lines
    assert says in lines[0] and lines[0].endswith(means), lines
    assert changes(stored, copy.deepcopy(stored), 3) == changes(now, now, 3) == []


@pytest.mark.parametrize(
    "after",
    ["--num_workers 2", "--log_every 3", "--ckpt_every 2", "--ckpt_keep 2", "--no_save", "--sample_every 7",
     "--sample_steps 3", "--sample_cfg_scale 2", "--profile", "--max_bad_steps 3", "--max_steps 17", "--epochs 3",
     "--enable_cuda_graph", "--recompute norms", "--grad_checkpoint", "--ema_decay 0.9999", "--lr 1e-4",
     "--no_random_flip", "--prediction eps", "--grad_accumulation 1", "--global_batch_size 4", "--load latest",
     "--validate_path digits", "--validate_path digits --validate_every 2 --validate_samples 12 --ckpt_best val_loss",
     "--data_path digits", "--vae none", "--attention auto", "--num_classes 10"],
)  # fmt: skip
def test_what_changes_nothing_is_no_line(after, tmp_path):
    assert changes(of(tmp_path), of(tmp_path, *after.split()), 3) == []


def test_a_warm_up_that_is_over_is_no_line(tmp_path):
    stored, now = of(tmp_path, "--warmup_steps", "3"), of(tmp_path, "--warmup_steps", "5")
    assert changes(stored, now, 5) == []
    assert len(changes(stored, now, 4)) == 1
    cosine = [*"--lr_schedule cosine --max_steps 90 --warmup_steps".split()]
    assert len(changes(of(tmp_path, *cosine, "3"), of(tmp_path, *cosine, "5"), 50)) == 1


@pytest.mark.parametrize(
    ("name", "then", "means"),
    [("torch", "1.0", ROUNDING), ("colossalai", None, ROUNDING), ("triton", "1.0", ROUNDING), ("cuda", "9", ROUNDING),
     ("cudnn", "1", ROUNDING), ("processor", "NVIDIA H200", ROUNDING), ("source", "0" * 64, CODE),
     ("kernels", ["swiglu"], ROUNDING), ("fp8", True, ROUNDING), ("recomputed", "blocks", ROUNDING),
     ("sequence", "ring over 4 ranks", ROUNDING), ("split", "1 x 4 x 1", ROUNDING),
     ("tensor_parallel_size", 2, ROUNDING), ("expert_parallel_size", 4, ROUNDING),
     ("pipeline_parallel_size", 2, ROUNDING)],
)  # fmt: skip
def test_other_code_or_hardware_is_one_line(name, then, means, tmp_path):
    now = of(tmp_path)
    stored = {**now, name: then, "opendit": "0.0.9", "commit": "0123456789ab-dirty"}
    (line,) = changes(stored, now, 3)
    assert line.endswith(f": {means}")
    if name == "source":
        assert "OpenDiT's code 0.0.9 (0123456789ab-dirty) -> " in line
    assert changes({**now, "commit": "other", "opendit": "other"}, now, 3) == []  # only the source counts


def test_code_is_known_by_its_source(tmp_path, monkeypatch):
    package = tmp_path / "opendit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("a = 1")
    monkeypatch.setattr(module.opendit, "__file__", str(package / "__init__.py"))

    def source() -> str:
        module.code.cache_clear()
        return module.code()["source"]

    first = source()
    assert module.code()["commit"] is None  # not a checkout
    (package / "model.py").write_text("a = 2")
    other = source()
    (package / "model.py").write_text("a = 1")
    assert other != first == source()
    monkeypatch.undo()
    module.code.cache_clear()


def test_a_flag_that_nobody_listed_is_compared(tmp_path, monkeypatch):
    now = of(tmp_path)
    monkeypatch.setattr(module, "FREE", FREE - {"num_workers"})
    first, second = of(tmp_path), of(tmp_path, "--num_workers", "1")
    assert changes(first, second, 3) == [f"resume: --num_workers 0 -> 1: {CURVE}"]
    # The default stands for the value in a checkpoint from before the flag.
    default = next(field.default for field in fields(TrainConfig) if field.name == "num_workers")
    assert changes(now, {**first, "num_workers": default}, 3) == []
    assert changes(now, second, 3) == [f"resume: --num_workers 1 is new to it: {CURVE}"]
    assert changes(second, now, 3) == [f"resume: --num_workers was 1, and is not known here: {CURVE}"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def some_fingerprint(tmp_path_factory):
    return of(tmp_path_factory.mktemp("run"))


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_whatever_a_checkpoint_says_is_one_line_each(some_fingerprint, data):
    """A state.json from anywhere may have anything in its fingerprint."""
    now = some_fingerprint
    names = st.sampled_from(sorted(now)) | st.text(max_size=64)
    others = data.draw(st.dictionaries(names, ANYTHING, max_size=8))
    dropped = data.draw(st.sets(st.sampled_from(sorted(now)), max_size=8))
    stored = {name: value for name, value in {**now, **others}.items() if name not in dropped}
    averages = data.draw(st.dictionaries(st.text(), st.floats(0, 1), max_size=3))
    lines = changes(stored_fingerprint({"fingerprint": stored, "ema": {"files": averages}}), now, 3)
    assert all(line.isprintable() and len(line) < 2000 for line in lines), lines


# ------------------------------------------------------------------------------------------ data and networks


@pytest.mark.parametrize("form", ["data", "data/", "./data", "../{here}/data"])
def test_the_way_to_a_folder_is_no_part_of_it(form, tmp_path, monkeypatch):
    data = build_dataset(str(pictures(tmp_path / "data")), 8, seed=0)
    monkeypatch.chdir(tmp_path)
    again = build_dataset(form.format(here=tmp_path.name), 8, seed=0)
    names = "a/0.png a/2.png a/4.png b/1.png b/3.png b/5.png".split()
    plain = hash_parts("folder", "a\0b", "\0".join(names), np.array([0, 0, 0, 1, 1, 1]).tobytes())
    known, first = again.fingerprint(), data.fingerprint()
    assert known.identity == first.identity == plain and known.contents == first.contents


def pictures(folder, count: int = 6, shade: int = 0, suffix: str = ".png"):
    for i in range(count):
        path = folder / "ab"[i % 2] / f"{i}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (20 * i + shade, 7, 7)).save(path)
    return folder


@pytest.mark.parametrize("suffix", [".png", ".bmp"])
def test_other_pictures_are_told_and_a_copy_is_not(suffix, tmp_path):
    first = pictures(tmp_path / "first", suffix=suffix)
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "copy" / "a" / f"0{suffix}").touch()  # another time
    others = pictures(tmp_path / "others", shade=1, suffix=suffix)  # same names and sizes
    renamed = shutil.copytree(first, tmp_path / "renamed")
    (renamed / "a" / f"0{suffix}").rename(renamed / "a" / f"x{suffix}")
    moved = shutil.copytree(first, tmp_path / "moved")
    (moved / "a" / f"0{suffix}").rename(moved / "b" / f"0{suffix}")
    more = pictures(tmp_path / "more", 7, suffix=suffix)
    stored = of(tmp_path, "--data_path", str(first))
    for path, why in (
        (tmp_path / "copy", None),
        (others, "files of the same names, but with other contents"),
        (renamed, "other files, labels or captions"),
        (moved, "other files, labels or captions"),
        (more, "6 samples there, 7 here"),
    ):
        lines = changes(stored, of(tmp_path, "--data_path", str(path)), 3)
        said = [f"resume: --data_path {first} -> {path}: other data ({why}): {CURVE}"] if why else []
        assert lines == said


def test_captions_are_data(tmp_path):
    pictures(tmp_path, 2)

    def table(name: str, *captions: str):
        rows = zip(("a/0.png", "b/1.png"), captions, strict=True)
        (tmp_path / name).write_text("path,text\n" + "".join(f"{path},{text}\n" for path, text in rows))
        data = build_dataset(str(tmp_path / name), 8, seed=0)
        return data.fingerprint().identity, data.fingerprint().contents

    first = table("one.csv", "red", "blue")
    assert table("two.csv", "red", "blue") == first
    assert table("three.csv", "red", "green")[0] != first[0] and table("three.csv", "red", "green")[1] == first[1]
    Image.new("RGB", (20, 20), (9, 9, 9)).save(tmp_path / "a" / "0.png")
    assert table("one.csv", "red", "blue")[0] == first[0] and table("one.csv", "red", "blue")[1] != first[1]


def test_another_vae_is_told_and_a_copy_is_not(tmp_path):
    folders = [tmp_path / "vae", tmp_path / "other"]
    for shift, folder in enumerate(folders):  # they differ in one number of one bias
        vae = small_vae()
        vae.quant_conv.bias.data[0] += shift
        vae.save_pretrained(folder)
    shutil.copytree(folders[0], tmp_path / "copy")
    size = ["--image_size", "16"]
    stored = of(tmp_path, *size, "--vae", str(folders[0]))
    assert changes(stored, of(tmp_path, *size, "--vae", str(tmp_path / "copy")), 3) == []
    assert changes(stored, of(tmp_path, *size, "--vae", str(folders[1])), 3) == [
        f"resume: --vae {folders[0]} -> {folders[1]}: other weights: {CURVE}"
    ]


# ------------------------------------------------------------------------------------------ real resumes


def test_a_resume_says_what_changed_at_its_start(tmp_path, no_ranks, capsys):
    data = pictures(tmp_path / "data")
    common = [*QUICK, "--outputs", str(tmp_path / "outputs"), "--data_path", str(data)]
    train.main([*common, "--max_steps", "1"])
    assert notes(capsys.readouterr().out) == []
    train.main([*common, "--max_steps", "2", "--load", "latest", "--num_workers", "1"])
    assert notes(capsys.readouterr().out) == []
    pictures(data, shade=3)
    train.main([*common, "--max_steps", "3", "--load", "latest", "--lr", "0.01", "--ema_decay", "0.5"])
    said = capsys.readouterr().out
    assert [note.split(" ")[1] for note in notes(said)] == ["--data_path", "--lr", "--ema_decay"]
    assert said.index("note: resume: --lr 0.0001 -> 0.01") < said.index("saved ")
    train.main([*common, "--max_steps", "4", "--load", "latest", "--lr", "0.01", "--ema_decay", "0.5"])
    assert notes(capsys.readouterr().out) == []  # each start is compared with the previous one


def test_a_checkpoint_from_before_fingerprints_says_what_is_known(tmp_path, no_ranks, capsys):
    from tests.training.test_resume_finds import list_anew

    common = [*QUICK, "--outputs", str(tmp_path)]
    train.main([*common, "--max_steps", "1"])
    folder = tmp_path / "000-DiT-Ti-2" / "checkpoints" / "step_0000001"
    state = json.loads((folder / "state.json").read_text())
    fresh = state.pop("fingerprint")["order"]
    state |= {"world_size": 1, "plugin": "zero2", "precision": "fp32", "fp8": False, "attention": "auto",
              "sequence_parallel": None, "global_batch": 4, "seed": 42, "objective": {"name": "ddpm"}}  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    list_anew(folder)
    capsys.readouterr()
    train.main([*common, "--max_steps", "2", "--load", str(folder)])
    order, line = notes(capsys.readouterr().out)
    assert "the order of samples sorted -> keyed: samples come in another order from this step on" in order
    assert "too old to record its data, its code, " in line and "--lr" in line and "--global_seed" not in line
    resumed = json.loads((folder.with_name("step_0000002") / "state.json").read_text())
    assert (resumed["fingerprint"]["order"], fresh) == ("keyed", "keyed")  # the change is printed only once
    shutil.rmtree(folder.with_name("step_0000002"))
    train.main([*common, "--max_steps", "2", "--load", str(folder), "--global_seed", "7", "--min_snr", "5",
                "--plugin", "ddp", "--ema_decay", "0.9"])  # fmt: skip
    told = [note.split(" ")[1] for note in notes(capsys.readouterr().out)]
    assert set(told) == {"--global_seed", "--min_snr", "--plugin", "--ema_decay", "the"}
    assert stored_fingerprint(state)["ema_decay"] == [0.9999]


def _resumes(mesh, argv: list[str]) -> None:
    several_programs()
    train.main([*argv, "--max_steps", "1"])
    train.main([*argv, "--max_steps", "2", "--load", "latest", "--weight_decay", "0.1"])


@pytest.mark.timeout(120)
def test_two_ranks_resume_and_one_says_it(tmp_path, capfd):
    run_ranks(2, _resumes, [*QUICK, "--outputs", str(tmp_path)])
    (line,) = notes(capfd.readouterr().out)
    assert line == f"resume: --weight_decay 0.0 -> 0.1: {CURVE}"
    latest = tmp_path / "000-DiT-Ti-2/checkpoints/latest/state.json"
    assert json.loads(latest.read_text())["fingerprint"]["split"] == "4 x 2 x 1"
