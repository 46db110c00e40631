"""Samples in files: what is read, and what is refused before any computation."""

import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opendit.data.picture_file import center_crop
from opendit.data.video_files import write_mp4
from opendit.evaluation.media import MediaOptions, npz_member, open_media
from opendit.sampling.output_files import INDEX
from tests.evaluation.small import picture

PIXELS = picture(8, 10, 7).numpy()


def opened(path: Path, **options):
    return open_media(path, "--samples", MediaOptions(**options))


def all_of(media) -> np.ndarray:
    with ThreadPoolExecutor(2) as pool:
        parts = [media.batch(range(first, min(first + 3, media.count)), pool) for first in range(0, media.count, 3)]
    return np.concatenate(parts)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_as_sample_py_writes_it(save, tmp_path):
    save(tmp_path / "a.npz", arr_0=PIXELS, arr_1=np.arange(7))
    media = opened(tmp_path / "a.npz")
    assert (media.count, media.clips, media.captions) == (7, False, None)
    assert np.array_equal(all_of(media), PIXELS)
    assert isinstance(npz_member(tmp_path / "a.npz", "arr_0"), np.memmap) is (save is np.savez)
    clips = PIXELS[:6].reshape(2, 3, 8, 10, 3)
    save(tmp_path / "clips.npz", arr_0=clips, arr_1=np.array(["a seven", "a two"]))
    media = opened(tmp_path / "clips.npz")
    assert media.clips and list(media.captions) == ["a seven", "a two"] and np.array_equal(all_of(media), clips)


def test_a_member_that_is_not_the_first_is_mapped(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(5), arr_0=PIXELS, arr_1=np.ones(3))
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.namelist()[0] == "x.npy"
    assert np.array_equal(npz_member(tmp_path / "a.npz", "arr_0"), PIXELS)
    assert npz_member(tmp_path / "a.npz", "arr_1").sum() == 3


def test_a_folder_of_pictures(tmp_path):
    for number, pixels in enumerate(PIXELS):
        folder = tmp_path / ("cat" if number % 2 else "dog")
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    media = opened(tmp_path)
    assert np.array_equal(all_of(media), PIXELS[[1, 3, 5, 0, 2, 4, 6]])
    cropped = opened(tmp_path, image_size=6)
    expected = np.asarray(center_crop(Image.fromarray(PIXELS[1]), 6))
    assert np.array_equal(all_of(cropped)[0], expected) and cropped.how != media.how and cropped.sha256 == media.sha256
    Image.fromarray(PIXELS[0] // 2).save(tmp_path / "cat" / "1.png")
    assert opened(tmp_path).sha256 != media.sha256


def test_the_sheet_of_sample_py_is_no_sample(tmp_path):
    names = ["grid.png", "000000-cat.png", "000001-dog.png", "000002-lost.png"]
    (tmp_path / INDEX).write_text(json.dumps({"files": names}))
    for name, pixels in zip(names[:3], PIXELS, strict=False):
        Image.fromarray(pixels).save(tmp_path / name)
    Image.fromarray(PIXELS[5]).save(tmp_path / "mine.png")
    assert np.array_equal(all_of(opened(tmp_path)), PIXELS[1:3])


def test_clips_and_captions_of_a_table(tmp_path):
    for number in range(2):
        write_mp4(tmp_path / f"{number}.mp4", picture(32, 32, 6).numpy() // (number + 1), fps=8)
    (tmp_path / "clips.csv").write_text("path,text\n0.mp4,a bright one\n1.mp4,a dark one\n")
    with pytest.raises(ValueError, match="holds clips; give --image_size"):
        opened(tmp_path / "clips.csv")
    media = opened(tmp_path / "clips.csv", image_size=16, num_frames=4)
    found = all_of(media)
    assert found.shape == (2, 4, 16, 16, 3) and media.clips and media.captions == ["a bright one", "a dark one"]
    assert found[0].mean() > 1.5 * found[1].mean()
    assert np.array_equal(all_of(opened(tmp_path, image_size=16, num_frames=4)), found)  # the folder itself
    with pytest.raises(ValueError, match="too short: 6 frames"):
        all_of(opened(tmp_path, image_size=16, num_frames=7))


def test_what_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="--samples .*nowhere: does not exist"):
        opened(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="--samples .* is empty"):
        opened(tmp_path)
    (tmp_path / "words.txt").write_text("x")
    with pytest.raises(ValueError, match="not known as samples; give a folder, .npz"):
        opened(tmp_path / "words.txt")
    (tmp_path / "no.npz").write_text("x")
    with pytest.raises(ValueError, match="no .npz"):
        opened(tmp_path / "no.npz")
    for name, array, said in (
        ("float", PIXELS / 255, "uint8, not float64; pictures are rounded once"),
        ("grey", PIXELS[..., 0], r"\(N, H, W, 3\), or .* not \(7, 8, 10\)"),
        ("none", PIXELS[:0], "not \\(0, 8"),
    ):
        np.savez(tmp_path / f"{name}.npz", arr_0=array)
        with pytest.raises(ValueError, match=said):
            opened(tmp_path / f"{name}.npz")
    np.savez(tmp_path / "two.npz", a=PIXELS, b=PIXELS)
    with pytest.raises(ValueError, match=r"has no arr_0, only a, b;"):
        opened(tmp_path / "two.npz")


def test_mixed_sizes_and_damaged_files(tmp_path):
    Image.fromarray(PIXELS[0]).save(tmp_path / "0.png")
    Image.fromarray(PIXELS[0, :6]).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match="samples 0 and 1 are 8 x 10 x 3 and 6 x 10 x 3; --image_size"):
        all_of(opened(tmp_path))
    assert all_of(opened(tmp_path, image_size=6)).shape == (2, 6, 6, 3)
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"1.png.*repair or remove it"):
        all_of(opened(tmp_path, image_size=6))
