"""Data sets that a program passes: ``opendit.train(config, data=...)``."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import opendit
from opendit.data import BadSample, MediaDataset, SampleKey, build_dataset
from opendit.data.base import View
from opendit.data.clips import resize_and_crop
from opendit.data.picture_file import center_crop, to_tensor
from opendit.data.python_data import PythonDataset, offer


class Listed:
    """A map-style data set with the samples of a list."""

    def __init__(self, *samples, **more):
        self.samples = samples
        vars(self).update(more)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, row):
        return self.samples[row]


def noise(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def opened(data, size=8, **options):
    with offer(data):
        return build_dataset("python", size, seed=0, **options)


def test_every_form_of_a_picture_is_the_same():
    pixels = noise(3, 9, 12)
    array = pixels.permute(1, 2, 0).numpy()
    forms = [pixels, pixels / 255, Image.fromarray(array), array]
    data = opened(Listed(*({"image": form, "text": "a"} for form in forms)))
    wanted = to_tensor(center_crop(Image.fromarray(array), 8), False)
    assert all(torch.equal(data.read(row).x, wanted) and data.read(row).text == "a" for row in range(4))
    assert data.describe().conditioning == "text" and data.sample_shape == (3, 8, 8)
    nearly = opened(Listed({"image": torch.full((3, 8, 8), 0.999), "text": "a"}))
    assert (nearly.read(0).x == 1).all()  # rounded
    grey = opened(Listed({"image": pixels[:1], "label": 1}, classes=["no", "yes"]))
    assert torch.equal(grey.read(0).x[0], grey.read(0).x[2]) and grey.label(0) == 1
    assert grey.describe().class_names == ["no", "yes"]


def test_clips_are_windows_of_their_frames():
    frames = noise(20, 3, 12, 9)
    forms = [frames, frames.permute(0, 2, 3, 1).numpy(), [*frames.permute(0, 2, 3, 1).numpy()]]
    data = opened(Listed(*({"video": f, "text": "a"} for f in forms)), use_video=True, num_frames=4, frame_interval=2)
    middle = resize_and_crop(frames.permute(0, 2, 3, 1)[[6, 8, 10, 12]], 8)
    for row in range(3):
        assert torch.equal(data.read(row).x, middle)
        first = resize_and_crop(frames.permute(0, 2, 3, 1)[[0, 2, 4, 6]], 8)
        assert torch.equal(data.read(row, View(start=0.0, flip=True)).x, first.flip(-1))
    assert data.shapes().media().tolist() == [[20, 12, 9]] * 3 and data.preview(0)[1].shape == (3, 12, 9, 3)
    short = opened(Listed({"video": frames[:5], "text": "a"}), use_video=True, num_frames=4, frame_interval=2)
    with pytest.raises(BadSample, match=r"data\[0\]: too short: 5 frames"):
        short.read(0)
    with pytest.raises(ValueError, match="holds videos; set use_video=True"):
        opened(Listed({"video": frames, "text": "a"}))


@pytest.mark.parametrize(
    "data, says",
    [
        (iter([]), "no map-style data set"),
        (Listed(), "no map-style data set with samples"),
        (Listed((1, 2)), "not tuple; wrap it so"),
        (Listed({"pixel_values": 1}), "not a dict of pixel_values; wrap it so"),
        (Listed({"image": 1, "label": 2}), "give it a list classes, or set num_classes"),
    ],
)
def test_another_kind_of_data_set_is_refused(data, says):
    with pytest.raises(ValueError, match=f"opendit.train: data=.*{says}"):
        opened(data)


@pytest.mark.parametrize(
    "image, says",
    [
        (torch.full((3, 4, 4), 2.0), r"floats from 2 to 2; they must lie in \[0, 1\]"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "pixels of shape"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), "pixels of torch.int64"),
        (None, r"data\[1\]: "),
    ],
)
def test_a_bad_sample_is_replaced_and_named(image, says):
    data = opened(Listed({"image": noise(3, 9, 9), "text": "good"}, {"image": image, "text": "bad"}))
    item = data[SampleKey(1, 0, 0)]
    assert item.text == "good"
    with pytest.raises(BadSample, match=says):
        data.read(1)


def test_the_fingerprint_knows_other_data():
    def of(*samples, **more):
        return PythonDataset(Listed(*samples, **more), 8).fingerprint().identity

    first = {"image": noise(3, 9, 9), "text": "a"}
    assert of(first) == of(dict(first))
    others = [({**first, "text": "b"},), ({**first, "image": noise(3, 9, 9, seed=1)},), (first, first)]
    assert len({of(first), *(of(*other) for other in others)}) == 4
    assert of(first, fingerprint="1") == of({**first, "text": "b"}, fingerprint="1") != of(first, fingerprint="2")


def test_one_of_our_protocol_is_used_as_it_is():
    mine = PythonDataset(Listed({"image": noise(3, 9, 9), "text": "a"}), 8)
    assert isinstance(mine, MediaDataset) and opened(mine) is mine
    assert opened(mine, caption_prefix="b").caption(0) == "b a"
    with pytest.raises(ValueError, match="--data_path python: is what a program hands to opendit.train"):
        build_dataset("python", 8, seed=0)


def test_a_run_on_it_resumes_exactly(tmp_path, no_ranks):
    samples = [{"image": noise(3, 8, 14, seed=i), "text": f"{i}, red, big, cat"} for i in range(12)]
    flags = dict(model="DiT-Ti/4", vae="none", image_size=8, batch_size=4, num_workers=0, sample_every=0)
    flags |= dict(shuffle_tags=True, tag_drop=0.2, caption_prefix="x,", random_crop=True, mixed_precision="fp32")

    def run(outputs, steps, **more):
        config = opendit.TrainConfig(**flags, max_steps=steps, outputs=str(tmp_path / outputs), **more)
        folder = opendit.train(config, data=Listed(*samples))
        return load_file(next((folder / "checkpoints" / f"step_{steps:07d}").glob("model*.safetensors")))

    whole = run("whole", 3)
    run("parts", 2)
    parts = run("parts", 3, load="latest")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    with pytest.raises(ValueError, match="--data_path pictures: opendit.train got data, too; leave one of them out"):
        opendit.train(opendit.TrainConfig(data_path="pictures"), data=Listed(*samples))
