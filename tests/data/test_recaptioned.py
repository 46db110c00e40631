"""Test what training changes about captioned samples: prefixes, tags and places of crops, all keyed by the sample."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from opendit.data import SampleKey, build_dataset, build_loader, build_schedule
from opendit.data.base import View
from opendit.data.clips import Crop, resize_and_crop
from opendit.data.held_out import hold_out
from opendit.data.picture_file import center_crop, fill_crop, to_tensor
from opendit.data.sources import Recaptioned, Request, change_tags, recaption

TAGS = ["cat", "red hat", "outdoors", "猫"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Write eight pictures 24 x 8 of a ramp. Their captions are four tags and the picture's number."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        ramp = np.tile((np.arange(24) * 10).astype(np.uint8)[None, :, None], (8, 1, 3))
        Image.fromarray(ramp).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(", ".join([*TAGS, str(number)]))
    return folder


def opened(path, **options):
    return build_dataset(str(path), 8, **{"seed": 3, **options})


@settings(deadline=None)
@given(
    tags=st.lists(st.text(st.characters(blacklist_characters=",", blacklist_categories=("Cs",))), max_size=6),
    key=st.integers(0, 2**31 - 2),
    drop=st.sampled_from([0.0, 0.3, 0.99]),
    shuffle=st.booleans(),
)
def test_tags_are_lost_or_moved_and_nothing_else(tags, key, drop, shuffle):
    text = ",".join(tags)
    given_tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    changed = change_tags(text, key, shuffle=shuffle, drop=drop)
    assert changed == change_tags(text, key, shuffle=shuffle, drop=drop)
    if len(given_tags) < 2:
        assert changed == text
        return
    got = changed.split(", ")
    assert got and not Counter(got) - Counter(given_tags)
    if not drop:
        assert Counter(got) == Counter(given_tags)
    assert Counter(got) == Counter(change_tags(text, key, shuffle=not shuffle, drop=drop).split(", "))
    if not shuffle:
        places = iter(given_tags)
        assert all(tag in places for tag in got)  # in the original order


def test_every_order_and_every_tag_comes_as_often():
    """Check 1,800 keys: each of six orders is within five deviations of 300, and 30 % of the tags are dropped."""
    orders = Counter(change_tags("a, b, c", key, shuffle=True, drop=0) for key in range(1800))
    assert sorted(orders) == sorted(", ".join(order) for order in itertools.permutations("abc"))
    assert all(abs(count - 300) < 5 * np.sqrt(1800 / 6 * 5 / 6) for count in orders.values())
    text = ",".join(map(str, range(40)))
    kept = Counter(tag for key in range(200) for tag in change_tags(text, key, shuffle=True, drop=0.3).split(", "))
    assert abs(sum(kept.values()) / 8000 - 0.7) < 5 * np.sqrt(0.21 / 8000)
    assert all(abs(count - 140) < 5 * np.sqrt(200 * 0.21) for count in kept.values())


def test_a_prefix_is_part_of_every_caption_and_of_the_data(pictures):
    plain, data = opened(pictures), opened(pictures, caption_prefix="sks style,", shuffle_tags=True)
    assert data.caption(2) == f"sks style, {plain.caption(2)}"
    assert data.read(2).text == data.caption(2)  # unshuffled, as validation and preprocess.py read it
    text = data[SampleKey(2, 0, 0)].text
    assert text.startswith("sks style, ") and text != data.caption(2) and sorted(text) == sorted(data.caption(2))
    assert data.fingerprint().identity != plain.fingerprint().identity
    assert data.fingerprint().contents == plain.fingerprint().contents
    assert opened(pictures, shuffle_tags=True).fingerprint().identity == plain.fingerprint().identity
    about = data.describe()
    assert about.text.endswith("captions after 'sks style,', shuffled tags") and about.counted_captions[0][0] == 8
    assert about.files is not None
    held, rest = hold_out(data, 0.5)
    assert held.caption(0).startswith("sks") and len(held) + len(rest) == 8


def samples_of(data, ranks, micro, start=0):
    found = {}
    for rank in range(ranks):
        how = dict(dp_rank=rank, dp_size=ranks, batch_size=4 // ranks // micro, micro_batches=micro, num_workers=0)
        for batch in build_loader(data, build_schedule(data, 4, 1, 5), start_step=start, end_step=6, **how):
            for i, index in enumerate(batch.index.tolist()):
                found[batch.step, index] = batch.text[i], batch.x[i].numpy().tobytes()
    return found


def test_ranks_and_resumes_see_the_same_and_epochs_do_not(pictures):
    data = opened(pictures, shuffle_tags=True, tag_drop=0.2, caption_prefix="x", random_crop=True)
    one = samples_of(data, 1, 1)
    assert len(one) == 24  # from three epochs
    assert samples_of(data, 2, 1) == samples_of(data, 4, 1) == samples_of(data, 2, 2) == one
    assert samples_of(data, 1, 1, start=3) == {key: value for key, value in one.items() if key[0] >= 3}
    assert len({text for text, _ in one.values()}) > 16 and len({x for _, x in one.values()}) > 8
    assert len({data[SampleKey(0, step, 0)].text for step in range(20)}) > 10
    other = samples_of(opened(pictures, seed=4, shuffle_tags=True, random_crop=True), 1, 1)
    assert other != one


def test_crops_are_cut_where_the_place_says(pictures):
    data = opened(pictures, random_crop=True)
    ramp = np.asarray(Image.open(pictures / "0.png"))
    for place, left in (((0, 0.0), 0), ((0.9, 0.5), 8), ((0, 0.9999), 16), (None, 8)):
        wanted = to_tensor(Image.fromarray(ramp[:, left : left + 8]), False)
        assert torch.equal(data.read(0, View(place=place)).x, wanted), place
        frames = torch.from_numpy(np.stack([ramp, ramp]))
        assert torch.equal(resize_and_crop(frames, Crop(8, 8, place))[:, 1], wanted), place
    lefts = {data[SampleKey(0, step, 0)].x[0, 0, 0].item() for step in range(100)}
    assert len(lefts) == 17  # every possible place
    assert torch.equal(opened(pictures)[SampleKey(0, 5, 0)].x, data.read(0).x)
    image = Image.open(pictures / "0.png")
    assert np.array_equal(fill_crop(image, 8, 12, (0, 1 - 1e-9)), ramp[:, 12:])
    assert np.array_equal(center_crop(image.rotate(90, expand=True), 8, (0.5, 0)), np.rot90(ramp)[8:16])


def test_a_folder_of_classes_is_cropped_too(pictures, tmp_path):
    (tmp_path / "0.png").write_bytes((pictures / "0.png").read_bytes())
    data = opened(tmp_path, random_crop=True, random_flip=False)
    assert data.describe().conditioning == "label"
    assert len({data[SampleKey(0, step, 0)].x[0, 0, 0].item() for step in range(40)}) > 8
    with pytest.raises(
        ValueError, match="--random_crop: --data_path digits has no pictures or clips to crop; leave it"
    ):
        opened("digits", random_crop=True)


def test_regularisation_pictures_are_a_source_of_a_blend(pictures, tmp_path):
    """One source counts ten times. The other has no captions, so its prefix becomes the caption."""
    for number in range(5):
        Image.new("RGB", (9, 9), (0, number, 0)).save(tmp_path / f"r{number}.png")
    (tmp_path / "blend.yaml").write_text(
        f"sources:\n- {{path: {pictures}, epochs: 10, caption_prefix: 'sks,'}}\n"
        f"- {{path: ., name: regular, epochs: 1, caption_prefix: a photo of a cat}}\n"
    )
    data = opened(tmp_path / "blend.yaml", shuffle_tags=True, random_crop=True)
    assert data.caption(0) == f"sks, {', '.join([*TAGS, '0'])}" and data.caption(8) == "a photo of a cat"
    assert data.describe().random_tags and data.describe().random_crop
    assert data.read(0, View(as_bytes=True)).x.dtype == torch.uint8
    how = dict(dp_rank=0, dp_size=1, batch_size=5, num_workers=0, end_step=17)  # 10 x 8 + 5 samples
    texts = [text for batch in build_loader(data, build_schedule(data, 5, 1, 0), **how) for text in batch.text]
    assert texts.count("a photo of a cat") == 5 and sum(text.startswith("sks, ") for text in texts) == 80
    (tmp_path / "blend.yaml").write_text(f"sources: [{{path: {pictures}, weight: 1, caption_prefix: 3}}]")
    with pytest.raises(ValueError, match="caption_prefix of .* must be a text"):
        opened(tmp_path / "blend.yaml")


@pytest.mark.parametrize("flag, value", [("caption_prefix", "a"), ("shuffle_tags", True), ("tag_drop", 0.1)])
def test_what_can_not_be_changed_is_refused_in_one_line(pictures, flag, value):
    with pytest.raises(ValueError, match=f"--{flag}: --data_path digits has classes and no captions; leave it out"):
        opened("digits", **{flag: value})
    data = opened(pictures)

    class Embedded(type(data)):
        def describe(self):
            return replace(super().describe(), text_encoder="t5", kind="latents")

    data.__class__ = Embedded
    asked = Request("latents", None, 8, seed=0, **{flag: value})
    with pytest.raises(ValueError, match=f"--{flag}: the captions of --data_path latents are embedded already; leave"):
        recaption(asked, data)
    assert not isinstance(recaption(replace(asked, **{flag: None if value == "a" else 0}), data), Recaptioned)
