"""Features of digits and moving digits match scikit-learn, scipy and loops, and detect copies and wrong samples."""

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.svm import SVC

import opendit
from opendit.cli import command
from opendit.data.digits import DIRECTIONS, caption, digits_split
from opendit.evaluation.digits import (
    ClipShape,
    asked_of_captions,
    asked_of_labels,
    centred_digits,
    centres,
    picture_features,
    real_clips,
    train_classifier,
)
from tests.sampling.small import BYTES, write

SHAPE = ClipShape(4, 6, 12)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluate(**flags) -> dict[str, object]:
    """Return metric -> Measurement."""
    flags = dict(features="digits", output="out", intervals=False) | flags
    return {row.metric: row for row in opendit.evaluate(opendit.EvaluateConfig(**flags))}


def pixels_of(images: torch.Tensor) -> np.ndarray:
    """Convert digits (N, 1, 8, 8) in -1..1 to uint8 (N, 8, 8, 3)."""
    grey = ((images[:, 0].numpy() + 1) * 127.5).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def save(name: str, split: str, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (part[rows] for part in digits_split(split))
    np.savez(name, arr_0=pixels_of(images), arr_1=labels.numpy())
    return images, labels


def test_the_classifier_reads_digits_as_another_one_does():
    images, labels = digits_split("test")
    found = picture_features(torch.from_numpy(pixels_of(images)).movedim(-1, 1))
    named = found["digit"].argmax(1)
    assert (named == labels).double().mean() > 0.96
    train, of_train = digits_split("train")
    svm = SVC(gamma=0.001 * 64).fit(train.flatten(1), of_train)
    assert (svm.predict(images.flatten(1)) == named.numpy()).mean() > 0.96
    rounded = pixels_of(images)[..., 0].reshape(len(images), -1) / 127.5 - 1
    _, nearest = pairwise_distances_argmin_min(rounded, train.flatten(1).double())
    assert np.allclose(found["nearest"][:, 0], nearest, rtol=1e-9)
    larger = np.repeat(np.repeat(pixels_of(images[:50]), 3, axis=1), 3, axis=2)  # 24 x 24
    resized = picture_features(torch.from_numpy(larger).movedim(-1, 1))
    assert (resized["digit"].argmax(1) == labels[:50]).double().mean() > 0.9


def test_threads_change_roundings_alone():
    images, labels = (part[:300] for part in digits_split("train"))
    x, found, before = digits_split("test")[0].double(), [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(train_classifier(images, labels)(x)["pool"])
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert torch.allclose(*found, rtol=1e-9, atol=1e-9)


def test_held_out_training_and_wrong_digits():
    """Held-out digits score as real ones, training digits are copies, and exchanged labels or noise score badly."""
    save("held_out.npz", "test")
    found = evaluate(samples="held_out.npz", save_features="held_out_features")
    assert found["frechet_distance"].value == pytest.approx(0, abs=1e-6)
    assert found["frechet_distance"].reference == "digits (held out)" and found["frechet_distance"].features_known
    assert found["accuracy"].value == found["accuracy"].of_real > 0.96 and found["copies"].value < 0.02
    assert set(found) == {"frechet_distance", "precision", "recall", "kid", "accuracy", "copies"}

    save("train.npz", "train", slice(0, 200))
    found = evaluate(samples="train.npz", save_features="train_features")
    assert found["copies"].value == 1 and found["copies"].of_real == 0.01 and found["accuracy"].value > 0.97
    a, b = (np.load(f"{name}_features.npz")["features_pool"].astype(np.float64) for name in ("train", "held_out"))
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * scipy.linalg.sqrtm(ca @ cb).real)
    assert found["frechet_distance"].value == pytest.approx(expected, rel=1e-5)
    # of_real is the distance of 200 other training digits from the held-out ones.
    assert 0.5 < found["frechet_distance"].value / found["frechet_distance"].of_real < 2

    images, labels = digits_split("test")
    np.savez("exchanged.npz", arr_0=pixels_of(images), arr_1=(labels.numpy() + 1) % 10)
    assert evaluate(samples="exchanged.npz", metrics=["accuracy"])["accuracy"].value < 0.02
    noise = np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), np.uint8)
    np.savez("noise.npz", arr_0=noise)
    found = evaluate(samples="noise.npz")
    assert found["frechet_distance"].value > 10 * found["frechet_distance"].of_real and "accuracy" not in found


def test_a_run_of_digits_ends_with_a_line(capsys):
    write(Path("run.safetensors"), num_classes=10)
    flags = dict(ckpt="run.safetensors", num_samples=37, num_sampling_steps=2, cfg_scale=1.0)
    found = evaluate(**flags)
    line = capsys.readouterr().out.splitlines()[-1]
    distance = found["frechet_distance"]
    assert line.startswith(f"digits: {found['accuracy'].value:.1%} named as the digit asked for (held-out digits 9")
    assert f"{distance.value / distance.of_real:.2f} x that of as many training digits" in line and "copies" in line
    pipe = opendit.load("run.safetensors", device="cpu")
    drawn = pipe([i % 10 for i in range(37)], steps=2, guidance=1.0, progress=False)
    seen = picture_features(torch.from_numpy(np.stack([np.asarray(p) for p in drawn])).movedim(-1, 1))["digit"]
    right = (seen.argmax(1).numpy() == np.arange(37) % 10).mean()
    assert found["accuracy"].value == pytest.approx(right) and found["accuracy"].steps == 2


# ------------------------------------------------------------------------------------------ clips


@pytest.mark.parametrize("size", [11, 12])
def test_where_a_digit_is_and_what_it_is(size):
    clips = torch.from_numpy(real_clips("test", ClipShape(3, 5, size), 6).media.read_range(range(6))[..., 0] / 255)
    path = centres(clips)
    for clip, centre in zip(clips.numpy(), path.numpy(), strict=True):
        for frame, (x, y) in zip(clip, centre, strict=True):
            assert scipy.ndimage.center_of_mass(frame) == pytest.approx((y, x), abs=1e-4)
    half = int(size * 0.4)
    padded = np.pad(clips.numpy(), ((0, 0), (0, 0), (size, size), (size, size)))
    corners = (path.numpy().round().astype(int) + size - half).tolist()
    crops = [
        np.mean([frame[y : y + 2 * half, x : x + 2 * half] for frame, (x, y) in zip(clip, corner, strict=True)], axis=0)
        for clip, corner in zip(padded, corners, strict=True)
    ]
    assert 2 * half == 8  # so that nothing is resized
    assert np.allclose(centred_digits(clips, path)[:, 0], 2 * np.array(crops) - 1)


def test_held_out_clips_are_read_and_followed():
    real = real_clips("test", SHAPE, 120)
    ways = {way: name for name, way in DIRECTIONS.items()}
    said = [
        caption(digit, ways[tuple(map(int, way))])
        for digit, way in zip(real.asked.digits.tolist(), real.asked.directions.tolist(), strict=True)
    ]
    pixels = real.media.read_range(range(120))
    np.savez("clips.npz", arr_0=pixels, arr_1=np.array(said))
    flags = dict(samples="clips.npz", frame_interval=6)
    found = evaluate(**flags)
    assert found["accuracy"].value > 0.9 and found["direction"].value == 1 and found["direction"].of_real > 0.99
    assert found["frechet_distance"].reference == "moving digits (held out)" and found["frechet_distance"].of_real > 0
    assert found["copies"].value < 0.1 and found["frechet_distance"].value < 1.5 * found["frechet_distance"].of_real
    np.savez("clips.npz", arr_0=pixels[:, ::-1], arr_1=np.array(said))  # backwards
    found = evaluate(**flags, metrics=["direction", "accuracy"])
    assert found["direction"].value == 0 and found["accuracy"].value > 0.9
    with pytest.raises(ValueError, match="moving digits have 48 frames, fewer than 61"):
        evaluate(samples="clips.npz", frame_interval=20)
    np.savez("wide.npz", arr_0=pixels[:, :, :8], arr_1=np.array(said))
    with pytest.raises(ValueError, match="moving digits are square, and these clips are not"):
        evaluate(samples="wide.npz")


def test_a_model_of_captions_is_asked_for_every_digit_and_direction():
    write(
        Path("clips.safetensors"), "vDiT-Ti/222", text=BYTES, frames=4, input_size=(12, 12), info={"frame_interval": 6}
    )
    flags = dict(ckpt="clips.safetensors", num_sampling_steps=1, num_samples=41, cfg_scale=1.0)
    found = evaluate(**flags, metrics=["accuracy", "direction"])
    assert found["accuracy"].labels == "prompts" and found["direction"].count == 41
    prompts = [caption(digit, direction) for direction in DIRECTIONS for digit in range(10)]
    given = evaluate(**flags, metrics=["accuracy", "direction"], prompt=prompts)
    assert given["accuracy"].drawn == found["accuracy"].drawn


# ------------------------------------------------------------------------------------------ requested digits


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(DIRECTIONS))), min_size=1, max_size=5))
def test_captions_say_what_was_asked_for(pairs):
    found = asked_of_captions([caption(*pair) for pair in pairs])
    assert found.digits.tolist() == [digit for digit, _ in pairs]
    assert [tuple(map(int, way)) for way in found.directions.tolist()] == [DIRECTIONS[name] for _, name in pairs]


def test_what_is_no_digit_was_not_asked_for():
    assert asked_of_captions(["a seven", "An eight"]).digits.tolist() == [7, 8]
    for captions in (None, [], ["a seven", "a dog"], ["a seven moving left", "a three"], ["seven"]):
        assert asked_of_captions(captions) is None
    for labels in (None, [], [1, 10], [-1], np.array([0.5]), np.array([[1]])):
        assert asked_of_labels(labels) is None


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--samples noise.npz --reference digits", "--reference digits: is for --features digits; give both"),
        ("--samples noise.npz --features digits --metrics accuracy", "--metrics accuracy: it needs --features digits"),
        ("--samples noise.npz --features digits --metrics fvd", "there are no features of clips"),
        ("--samples noise.npz --features digits --metrics direction", "clips whose directions are known"),
    ],
)
def test_mistakes_are_one_line(argv, said, capsys, no_ranks):
    np.savez("noise.npz", arr_0=np.zeros((5, 8, 8, 3), np.uint8))
    with pytest.raises(SystemExit) as stop:
        command.main(["evaluate", *argv.split()])
    told = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code and said in told[-1] and "Traceback" not in "".join(told)
