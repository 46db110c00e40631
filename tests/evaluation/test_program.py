"""Evaluations of small runs and files: against features computed here, on several ranks, interrupted, and refused."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import opendit
import train
from opendit.checkpoint.ema import Profile, coefficients
from opendit.cli import command
from opendit.config.command_line import parse
from opendit.config.evaluate import EvaluateConfig
from opendit.evaluation import extract
from opendit.evaluation import samples as samples_module
from opendit.evaluation.metrics import clip_scores, inception_score, kernel_distance, precision_recall
from opendit.evaluation.networks import caption_embeddings, load_network
from opendit.evaluation.program import measure
from opendit.evaluation.results import read_results
from tests.evaluation.small import clip_folder, clips, picture, pictures
from tests.ranks import run_ranks
from tests.sampling.small import BYTES, write

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Write the files of every test: a network of pictures, one of clips, and a reference."""
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "net.pt")
    clips(tmp_path / "i3d.pt")
    np.savez("reference.npz", arr_0=noise(90, 8, 8, 3))
    return tmp_path


def evaluate(**flags) -> dict[str, object]:
    """Return metric -> Measurement."""
    flags = dict(features="net.pt", output="out") | flags
    return {row.metric: row for row in opendit.evaluate(EvaluateConfig(**flags))}


def features(pixels: np.ndarray, path: str = "net.pt", **options) -> dict[str, torch.Tensor]:
    return load_network(path, CPU, **options)(torch.from_numpy(pixels))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Fréchet distance by scipy's matrix root."""
    a, b = a.double().numpy(), b.double().numpy()
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = np.asarray(scipy.linalg.sqrtm(ca @ cb)).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)


RUN = dict(ckpt="run.safetensors", reference="reference.npz", num_sampling_steps=2, num_samples=37, batch_size=8)


def test_a_run_is_measured_by_the_pictures_that_it_draws():
    write(Path("run.safetensors"))
    found = evaluate(**RUN, cfg_scale=1.5, seed=3)
    pipe = opendit.load("run.safetensors", device="cpu")
    drawn = pipe([i % 5 for i in range(37)], steps=2, guidance=1.5, seed=3, batch_size=8, progress=False)
    ours, theirs = features(np.stack([np.asarray(p) for p in drawn])), features(noise(90, 8, 8, 3))
    assert found["frechet_distance"].value == pytest.approx(distance(ours["pool"], theirs["pool"]), rel=1e-5)
    assert found["spatial_frechet_distance"].value == pytest.approx(
        distance(ours["spatial"], theirs["spatial"]), rel=1e-4
    )
    assert found["is"].value == pytest.approx(inception_score(ours["logits"])[0], rel=1e-6)
    assert found["kid"].value == pytest.approx(kernel_distance(ours["pool"], theirs["pool"])[0], rel=1e-6)
    expected = precision_recall(ours["pool"], theirs["pool"])
    assert (found["precision"].value, found["recall"].value) == pytest.approx(expected)
    assert set(found) == {"frechet_distance", "spatial_frechet_distance", "is", "kid", "precision", "recall"}
    one = found["frechet_distance"]
    assert (one.count, one.size, one.labels, one.sampler, one.steps) == (37, "8 x 8", "balanced", "ddpm", 2)
    assert (one.guidance, one.seed, one.precision, one.vae, one.reference_count) == (1.5, 3, "fp32", "none", 90)
    assert one.drawn["--seed"] == "3" and one.drawn["weights"] == one.samples_sha256 and "--npz" not in one.drawn
    assert one.interval[0] < one.value < one.interval[1] and one.features_known is False and one.commit
    assert [row.metric for row in read_results(Path("out/results.jsonl"))] == list(found)
    assert not list(Path("out").rglob("*.png"))


def test_samples_of_files_and_of_runs_give_the_same_figures(capsys):
    write(Path("run.safetensors"))
    of_run = evaluate(**RUN, intervals=False)
    pipe = opendit.load("run.safetensors", device="cpu")
    drawn = pipe([i % 5 for i in range(37)], steps=2, guidance=1.5, batch_size=8, progress=False)
    Path("drawn").mkdir()
    for number, one in enumerate(drawn):
        one.save(f"drawn/{number:03d}.png")
    np.savez("drawn.npz", arr_0=np.stack([np.asarray(p) for p in drawn]))
    for samples in ("drawn", "drawn.npz"):
        found = evaluate(samples=samples, reference="reference.npz", intervals=False, feature_batch_size=5)
        for name, row in found.items():
            assert row.value == pytest.approx(of_run[name].value, rel=1e-5), name
            assert row.sampler is None and row.interval is None or name == "kid"
    assert "can't be compared" not in capsys.readouterr().out
    fewer = evaluate(samples="drawn.npz", reference="reference.npz", num_samples=30, metrics=["kid"])
    assert fewer["kid"].count == 30
    assert "can't be compared: 1 with 4, 2 with 4, 3 with 4: samples 37 against 30" in capsys.readouterr().out


def test_labels_are_balanced_or_drawn(monkeypatch):
    write(Path("run.safetensors"))
    pipe, labels, values = opendit.load("run.safetensors", device="cpu"), [], []
    extract_run = samples_module.extract_run

    def keep_labels(sampling, *args):
        labels.append(sampling.choices)
        return extract_run(sampling, *args)

    monkeypatch.setattr(samples_module, "extract_run", keep_labels)
    for flags in ({}, dict(label_sampling="drawn"), dict(class_labels=[0, 1, 2, 3, 4])):
        found = evaluate(**RUN | dict(cfg_scale=1.5) | flags, metrics=["is"])["is"]
        drawn = pipe(labels[-1].tolist(), steps=2, guidance=1.5, batch_size=8, progress=False)
        logits = features(np.stack([np.asarray(picture) for picture in drawn]))["logits"]
        assert found.value == pytest.approx(inception_score(logits)[0], rel=1e-6)
        values.append((found.labels, found.value))
    assert torch.bincount(labels[0], minlength=5).tolist() == [8, 8, 7, 7, 7]
    counts = torch.bincount(labels[1], minlength=5)
    assert counts.sum() == 37 and counts.max() - counts.min() > 1
    assert [name for name, _ in values] == ["balanced", "drawn", "given"]
    assert values[0][1] == values[2][1] != values[1][1]


def test_a_power_average_of_another_width_is_measured(here, no_ranks):
    flags = "--model DiT-Ti/2 --data_path digits --image_size 8 --vae none --num_workers 0 --batch_size 8 --lr 1e-2"
    often = "--max_steps 6 --ckpt_every 2 --sample_every 0 --average power:0.05,0.25 --outputs runs"
    train.main([*flags.split(), *often.split()])
    run = Path("runs/000-DiT-Ti-2")
    stored = [Profile(step, width) for step in (2, 4, 6) for width in (0.05, 0.25)]
    total = {}
    for factor, one in zip(coefficients(stored, Profile(6, 0.12)), stored, strict=True):
        name = "ema.safetensors" if one.width == 0.05 else "ema_0.25.safetensors"
        file = run / "checkpoints" / f"step_{one.updates:07d}" / name
        total = {name: total.get(name, 0) + factor * value.double() for name, value in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        save_file({name: value.float() for name, value in total.items()}, "average.safetensors", opened.metadata())
    which = {"average": dict(ckpt="average.safetensors"), "0.12": dict(ckpt=str(run), ema=0.12)}
    which |= {"0.05": dict(ckpt=str(run)), "0.25": dict(ckpt=str(run), ema=0.25)}
    found = {name: evaluate(**RUN | flags, intervals=False) for name, flags in which.items()}
    values = {name: found[name]["frechet_distance"].value for name in which}
    assert values["0.12"] == pytest.approx(values["average"], rel=1e-4)
    others = values["0.05"], values["0.25"]
    assert all(abs(other / values["0.12"] - 1) > 1e-2 for other in others) and others[0] != others[1]


# ------------------------------------------------------------------------------------------ ranks and restarts


def on_rank(mesh, folder: str) -> list:
    os.chdir(folder)
    flags = dict(features="net.pt", output=f"out{mesh.world_size}", intervals=False)
    rows = [*measure(EvaluateConfig(**RUN, **flags), mesh)]
    rows += measure(EvaluateConfig(samples="reference.npz", reference="reference.npz", **flags), mesh)
    return [(row.metric, row.value) for row in rows]


@pytest.mark.parametrize("world", [3])
def test_ranks_share_the_work(world, here):
    write(Path("run.safetensors"))
    alone = [*evaluate(**RUN, intervals=False).items()]
    alone += evaluate(samples="reference.npz", reference="reference.npz", intervals=False).items()
    first, *others = run_ranks(world, on_rank, str(here))
    assert others == [[]] * (world - 1)
    for (name, row), (its_name, value) in zip(alone, first, strict=True):
        assert name == its_name and value == pytest.approx(row.value, rel=1e-4, abs=1e-6), name


def test_what_was_interrupted_continues(monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO, logger="opendit")
    write(Path("run.safetensors"))
    whole = evaluate(**RUN, output="other")
    deliver, batches = extract.Sink.deliver, []

    def fail_later(self, index, pixels):
        batches.append(len(index))
        if len(batches) == 4:
            raise OSError("the disk is full")
        deliver(self, index, pixels)

    evaluate(samples="reference.npz", reference="reference.npz", metrics=["kid"])  # caches the reference's features
    with monkeypatch.context() as patch:
        patch.setattr(extract.Sink, "deliver", fail_later)
        with pytest.raises(OSError, match="the disk is full"):
            evaluate(**RUN)
    capsys.readouterr()
    found = evaluate(**RUN)
    assert "features of 16 of 37 samples are there from an earlier start" in caplog.text
    assert "features of 21 samples in " in capsys.readouterr().out
    assert {name: row.value for name, row in found.items()} == {name: row.value for name, row in whole.items()}
    again = evaluate(**RUN)  # nothing is drawn
    assert "features of 37 of 37 samples" in caplog.text and " samples in " not in capsys.readouterr().out
    assert {name: row.value for name, row in found.items()} == {name: row.value for name, row in again.items()}


def test_a_damaged_part_is_computed_again(capsys, caplog):
    flags = dict(samples="reference.npz", reference="reference.npz", metrics=["is"])
    before = evaluate(**flags)["is"].value
    (part,) = Path("out").rglob("00000004.npy")
    content = bytearray(part.read_bytes())
    content[-40] ^= 1
    part.write_bytes(content)
    next(Path("out").rglob("00000007.npy")).unlink()
    assert evaluate(**flags)["is"].value == before
    assert "00000004.npy is damaged: its features are computed again" in caplog.text
    assert "features of 2 samples in" in capsys.readouterr().out


def test_what_decides_the_features_makes_others(capsys, caplog):
    caplog.set_level(logging.INFO, logger="opendit")
    write(Path("run.safetensors"))
    pictures(Path("other.pt"), seed=1)
    for change in ({}, dict(seed=1), dict(num_sampling_steps=3), dict(cfg_scale=1.0), dict(features="other.pt")):
        evaluate(**RUN | dict(metrics=["is"]) | change)
        assert "features of 37 samples in" in capsys.readouterr().out and "from an earlier start" not in caplog.text
    evaluate(**RUN | dict(metrics=["is"], batch_size=5))  # which changes only rounding
    assert "features of 37 of 37 samples are there" in caplog.text


# ------------------------------------------------------------------------------------------ references


def test_statistics_as_a_reference(capsys, caplog):
    caplog.set_level(logging.INFO, logger="opendit")
    theirs = features(noise(90, 8, 8, 3))
    with_samples = evaluate(samples="reference.npz", num_samples=50, reference="reference.npz")
    moments = {}
    for name, (mu, sigma) in (("pool", ("mu", "sigma")), ("spatial", ("mu_s", "sigma_s"))):
        moments |= {mu: theirs[name].double().mean(0), sigma: np.cov(theirs[name].double(), rowvar=False)}
    np.savez("statistics.npz", **moments)
    capsys.readouterr()
    found = evaluate(samples="reference.npz", num_samples=50, reference="statistics.npz")
    said = capsys.readouterr().out + caplog.text
    assert (
        set(found) == {"frechet_distance", "spatial_frechet_distance", "is"}
        and found["spatial_frechet_distance"].reference_count is None
    )
    for name, row in found.items():
        assert row.value == pytest.approx(with_samples[name].value, rel=1e-5)
    assert "pr is left out: --reference statistics.npz holds statistics alone" in said
    assert "samples of the reference 90 against not known" in said
    with pytest.raises(ValueError, match="--metrics pr: --reference statistics.npz holds statistics alone"):
        evaluate(samples="reference.npz", reference="statistics.npz", metrics=["pr"])
    # ADM's files hold statistics of many samples, and some of these samples.
    np.savez("adm.npz", **{k: np.asarray(v) * 1.1 for k, v in moments.items()}, arr_0=noise(90, 8, 8, 3))
    found = evaluate(samples="reference.npz", num_samples=50, reference="adm.npz")
    assert found["precision"].value == with_samples["precision"].value
    assert found["frechet_distance"].value != pytest.approx(with_samples["frechet_distance"].value, rel=1e-3)
    np.savez("wide.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    with pytest.raises(ValueError, match="of features of 2,048 numbers, these are 12: of another network"):
        evaluate(samples="reference.npz", reference="wide.npz", metrics=["fid"])
    np.savez("bad.npz", mu=np.zeros(12), sigma=np.eye(11))
    with pytest.raises(ValueError, match=r"mu \(12,\) and sigma \(11, 11\) are no mean and covariance"):
        evaluate(samples="reference.npz", reference="bad.npz")


def test_saved_features_as_a_reference():
    flags = dict(samples="reference.npz", num_samples=50)
    before = evaluate(**flags, reference="reference.npz")
    assert evaluate(samples="reference.npz", save_features="kept", metrics=["is"])["is"].count == 90
    found = evaluate(**flags, reference="kept.npz")
    assert {n: r.value for n, r in found.items()} == pytest.approx({n: r.value for n, r in before.items()}, rel=1e-9)
    with np.load("kept.npz") as kept:  # for other tools
        assert np.allclose(kept["sigma"], np.cov(kept["features_pool"].astype(np.float64), rowvar=False))
        assert json.loads(str(kept["opendit_settings"]))["features precision"] == "fp32"
    pictures(Path("other.pt"), seed=1)
    with pytest.raises(ValueError, match=r"kept.npz: holds features of other networks \(features sha256"):
        evaluate(**flags, features="other.pt", reference="kept.npz")


def test_a_reference_is_cropped_to_the_samples_size():
    from PIL import Image

    Path("large").mkdir()
    for number, pixels in enumerate(picture(20, 24, 30).numpy()):
        Image.fromarray(pixels).save(f"large/{number:02d}.png")
    found = evaluate(samples="reference.npz", reference="large", metrics=["fid"])["frechet_distance"]
    from opendit.data.picture_file import center_crop

    cropped = np.stack([np.asarray(center_crop(Image.fromarray(p), 8)) for p in picture(20, 24, 30).numpy()])
    expected = distance(features(noise(90, 8, 8, 3))["pool"], features(cropped)["pool"])
    assert found.value == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------ clips


def test_clips():
    a, b = noise(40, 4, 8, 8, 3) // 2, noise(30, 4, 8, 8, 3, seed=1)
    np.savez("a.npz", arr_0=a)
    np.savez("b.npz", arr_0=b)
    found = evaluate(samples="a.npz", reference="b.npz", video_features="i3d.pt", feature_batch_size=7)
    of_clips = [features(x, "i3d.pt", clips=True)["pool"] for x in (a, b)]
    of_frames = [features(x.reshape(-1, 8, 8, 3))["pool"] for x in (a, b)]
    assert found["fvd"].value == pytest.approx(distance(*of_clips), rel=1e-5)
    assert found["frame_frechet_distance"].value == pytest.approx(distance(*of_frames), rel=1e-4)
    moved = np.abs(np.diff(a.astype(float), axis=1)).mean()
    assert found["motion"].value == pytest.approx(moved, rel=1e-6)
    reference = np.abs(np.diff(b.astype(float), axis=1)).mean()
    assert found["motion"].note == f"motion of the reference: {reference:.6g} of 255"
    assert found["fvd"].size == "4 x 8 x 8" and found["fvd"].count == 40 and "kid" in found and len(found) == 6
    with pytest.raises(ValueError, match="--reference reference.npz: holds pictures; clips are evaluated"):
        evaluate(samples="a.npz", reference="reference.npz", video_features="i3d.pt")
    with pytest.raises(ValueError, match="--metrics fvd: there are no features of clips"):
        evaluate(samples="reference.npz", reference="reference.npz", metrics=["fvd"])


def test_clips_of_a_run_and_of_captions(caplog):
    caplog.set_level(logging.INFO, logger="opendit")
    write(Path("clips.safetensors"), "vDiT-Ti/222", text=BYTES, frames=4)
    flags = dict(ckpt="clips.safetensors", num_sampling_steps=2, num_samples=5, prompt=["a", "b"], batch_size=2)
    found = evaluate(**flags, video_features="i3d.pt", metrics=["motion"])["motion"]
    assert found.labels == "prompts" and found.size == "4 x 8 x 8" and found.value > 0
    pipe = opendit.load("clips.safetensors", device="cpu")
    drawn = np.stack([c.frames for c in pipe(["a", "b", "a", "b", "a"], steps=2, guidance=1.5, progress=False)])
    assert found.value == pytest.approx(np.abs(np.diff(drawn.astype(float), axis=1)).mean(), rel=1e-3)
    assert "given frames" not in caplog.text
    write(Path("given.safetensors"), "vDiT-Ti/222", text=BYTES, frames=4, given_frames="first")
    evaluate(**{**flags, "ckpt": "given.safetensors"}, video_features="i3d.pt", metrics=["motion"])
    assert "trained with --given_frames first; here it draws without" in caplog.text


def test_captions(capsys):
    folder, _ = clip_folder(Path("clip"))
    captions = ["a b", "c d e f g h a b", "a"]
    np.savez("captioned.npz", arr_0=noise(3, 16, 16, 3), arr_1=np.array(captions))
    found = evaluate(samples="captioned.npz", clip_model=str(folder), metrics=["clip_score"])["clip_score"]
    words, _ = caption_embeddings(folder, captions, CPU)
    each = clip_scores(features(noise(3, 16, 16, 3), str(folder))["pool"], words)
    assert found.value == pytest.approx(float(each.mean()), rel=1e-5) and found.truncated == 1
    assert found.features == "clip" and found.reference is None and found.interval[0] <= found.value
    with pytest.raises(ValueError, match="--metrics clip_score: there are no captions"):
        evaluate(samples="reference.npz", clip_model=str(folder), metrics=["clip_score"])


# ------------------------------------------------------------------------------------------ what can't be measured


def test_too_few_samples_are_said_to_be_few():
    found = evaluate(samples="reference.npz", num_samples=11, reference="reference.npz", metrics=["fid", "kid"])
    assert "11 samples are not more than the 12 numbers of their features" in found["frechet_distance"].note
    assert "kid does not depend" in found["frechet_distance"].note and found["frechet_distance"].interval is None
    with pytest.raises(ValueError, match="pr: precision and recall need more than 3 samples, not 3"):
        evaluate(samples="reference.npz", num_samples=3, reference="reference.npz", metrics=["kid", "pr"])
    assert read_results(Path("out/results.jsonl"))[-1].metric == "kid"  # what could be measured is kept
    with pytest.raises(ValueError, match="--num_samples 91: reference.npz holds 90"):
        evaluate(samples="reference.npz", num_samples=91, reference="reference.npz")


def test_a_model_that_draws_nothing_finite():
    write(Path("run.safetensors"))
    from safetensors.torch import load_file, safe_open, save_file

    with safe_open("run.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file("run.safetensors")
    tensors["final_layer.linear.bias"][:] = 3e38
    save_file(tensors, "run.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match="sample 0 is not finite: the model gives NaN or infinity"):
        evaluate(**RUN)


def test_a_network_that_gives_nan():
    network = torch.jit.load("net.pt")
    with torch.no_grad():
        network.mixing[0, 0] = float("nan")
    network.save("nan.pt")
    with pytest.raises(ValueError, match="the features of sample 0 are not finite"):
        evaluate(samples="reference.npz", reference="reference.npz", features="nan.pt")


def test_two_evaluations_do_not_write_to_one_folder():
    from opendit.checkpoint.run_folders import FolderLock

    Path("out").mkdir()
    with FolderLock(Path("out"), "--output", "wait"), pytest.raises(ValueError, match="--output: out is in use"):
        evaluate(samples="reference.npz", reference="reference.npz")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--samples reference.npz --metrics fid", "--metrics fid: compares samples with others; give --reference PATH"),
        ("--samples reference.npz --cfg_scale 2", "--cfg_scale: does nothing with --samples"),
        ("--samples nowhere --reference reference.npz", "--samples nowhere: doesn't exist; give a folder"),
        ("--samples reference.npz --reference x", "--reference x: doesn't exist"),
        ("--samples reference.npz --features x", "--features x: doesn't exist"),
        (
            "--samples reference.npz --metrics clip_score",
            "--metrics clip_score: needs a network; give --clip_model FOLDER",
        ),
        ("--samples reference.npz --metrics fdi", "give one of fid, sfid"),
        ("--ckpt x --reference reference.npz", "--ckpt x: doesn't exist"),
        ("--ckpt net.pt --class_labels 1 --label_sampling drawn --metrics is", "--label_sampling: does nothing with"),
        ("--samples reference.npz --save_features no/x", "--save_features no/x.npz: its folder does not exist"),
        ("--samples reference.npz --refrence x", "--refrence: no such flag; did you mean --reference?"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["evaluate", *argv.split()])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.startswith("error: ") and told.count("\n") == 1
    assert said in told


def test_a_configuration_is_what_its_command_line_says():
    argv = "--ckpt run --reference reference.npz --metrics fid kid --cfg_scale 4 --no_intervals".split()
    flags = parse(EvaluateConfig, argv)
    drawn = flags.sampling()
    assert drawn.cfg_scale == 4 and drawn.ckpt == "run" and not drawn.save_png and drawn.output == flags.output
    assert "cfg_scale" in drawn.given and "metrics" not in drawn.given and drawn.npz is None
    assert EvaluateConfig().cfg_scale == 1.5 and not flags.intervals
