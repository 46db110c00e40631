"""A browser's fields become settings of a sampling job, or are refused."""

import base64
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from opendit.sampling.page.catalog import ModelCard, WeightsChoice
from opendit.sampling.page.drawing import SettingsForm, WhatForm, read_forms, same_conditions

CLASSES = ModelCard("DiT-Ti/2", False, False, ("zero", "one", "two"), ("ddpm", "ddim"), True, "8", "ddpm")
WORDS = ModelCard("DiT-Ti/2", False, True, (), ("euler",), True, "8", "flow")
CHOICE = WeightsChoice("a run", None, "ema")


def asked(card=CLASSES, **fields):
    values = {"source": "a", "checkpoint": "b", "average": "c", "sampler": card.samplers[0], "steps": 5, "guidance": 3,
              "interval": "", "cache": "exact", "guidance_every": 1,
              "classes": [2, 0], "captions": "a\n\n b ", "negative": "", "count": 5,
              "seed": 9, "loras": [], "lora_weights": "", "picture": ""}  # fmt: skip
    values |= fields
    how, what = (cls(**{name: values[name] for name in cls.__dataclass_fields__}) for cls in (SettingsForm, WhatForm))
    return read_forms(what, how, CHOICE, card, most_samples=8)


def test_classes_and_captions_are_repeated_up_to_the_count():
    got = asked()
    assert got.what == (2, 0, 2, 0, 2) and got.labels == ("two", "zero", "two", "zero", "two")
    assert asked(count=1).what == (2,) and asked(classes=[], count=3).what == 3
    got = asked(WORDS, negative="x\ny", count=3)
    assert got.what == ("a", "b", "a") and got.settings.negative == "x y"
    assert asked(WORDS, captions=" \n\0\n", count=2).what == 2  # no caption at all


def test_settings_stand_in_the_files():
    got = asked(interval="0.5, inf", seed=3.0, sampler="ddim")
    assert got.settings.interval == (0.5, math.inf) and got.settings.seed == 3 and type(got.settings.seed) is int
    assert got.recorded["interval"] == [0.5, None] and got.recorded["weights"] == "a run"
    assert {"model", "objective", "sampler", "steps", "guidance", "negative", "seed", "count"} < set(got.recorded)


def test_what_is_left_out_of_steps():
    got = asked(cache="taylor:3", steps=6)
    assert got.settings.cache == got.recorded["cache"] == "taylor:3" and got.recorded["guidance_every"] == 1
    assert asked(guidance_every=2).settings.guidance_every == 2 and asked().settings.cache is None
    assert asked(guidance_every=2, guidance=1).settings.guidance_every == 1
    for wrong in ({"cache": "taylor:1"}, {"cache": None}, {"cache": ["exact"]}, {"guidance_every": 0}):
        with pytest.raises(ValueError, match="blocks left out|guide every"):
            asked(**wrong)


def test_without_guidance_nothing_is_guided():
    assert asked(guidance=1, interval="1 2").settings.interval is None
    unguided = ModelCard("m", False, False, ("a",), ("ddpm",), False, "8", "ddpm")
    assert asked(unguided, classes=[0], guidance=4).settings.guidance == 1


@pytest.mark.parametrize(
    "text",
    ["<img src=x onerror=alert(1)>", "\0", "a\0b", "\ud800", "x\ud83d", "ünïcödé 数字 🎲", "${alert(1)}", "{{x}}",
     "\x1b[31m", "a\tb", "\u202eabc"],
    ids=ascii,
)  # fmt: skip
def test_captions_are_text(text):
    got = asked(WORDS, captions=text, negative=text, count=1)
    what = got.what if isinstance(got.what, tuple) else ()
    for caption in (*what, *filter(None, [got.settings.negative])):
        assert caption.encode().decode() == caption and caption.isprintable()
    assert what or not text.strip("\0")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"count": 9}, "count: a whole number from 1 to 8"),
        ({"count": 0}, "count"),
        ({"count": None}, "count"),
        ({"count": True}, "count"),
        ({"count": 1.5}, "count"),
        ({"count": math.nan}, "count"),
        ({"steps": 10**6}, "steps"),
        ({"steps": "5"}, "steps"),
        ({"guidance": math.inf}, "guidance"),
        ({"guidance": math.nan}, "guidance"),
        ({"guidance": -1}, "guidance"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1e300}, "seed"),
        ({"sampler": "euler"}, "ddpm, ddim"),
        ({"sampler": ["ddpm"]}, "ddpm, ddim"),
        ({"interval": "1"}, "two numbers"),
        ({"interval": "2 1"}, "two numbers"),
        ({"interval": "nan 1"}, "two numbers"),
        ({"interval": "a b"}, "two numbers"),
        ({"interval": None}, "text"),
        ({"classes": [3]}, "does not have"),
        ({"classes": [-1]}, "does not have"),
        ({"classes": ["0"]}, "does not have"),
        ({"classes": [True]}, "does not have"),
        ({"captions": {"path": "/etc/passwd"}, "card": WORDS}, "text"),
        ({"captions": "x" * 20_001, "card": WORDS}, "20,001"),
        ({"captions": "x" * 2_001, "card": WORDS}, "2,001"),
        ({"negative": "x" * 2_001, "card": WORDS}, "2,001"),
    ],
)
def test_what_can_not_be_drawn(fields, said):
    with pytest.raises(ValueError, match=said):
        asked(fields.pop("card", CLASSES), **fields)


def test_comparisons_are_of_the_same_conditions():
    what = WhatForm([0, 2], "a", "", 1, 0)
    other = ModelCard("m", False, False, ("zero", "uno"), ("ddpm",), True, "8", "ddpm")
    same_conditions(CLASSES, CLASSES, what)
    same_conditions(CLASSES, other, WhatForm([0], "", "", 1, 0))
    with pytest.raises(ValueError, match="captions and the other classes"):
        same_conditions(CLASSES, WORDS, what)
    with pytest.raises(ValueError, match="class 2 is 'two' of the one model and 'not there' of the other"):
        same_conditions(CLASSES, other, what)


def data_url(picture: Image.Image, kind: str = "png") -> str:
    memory = io.BytesIO()
    picture.save(memory, kind)
    return f"data:image/{kind};base64,{base64.b64encode(memory.getvalue()).decode()}"


def test_a_picture_that_clips_begin_with():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    url, clips = data_url(Image.fromarray(pixels)), replace(WORDS, begins=True)
    got = asked(clips, picture=url)
    assert np.array_equal(np.asarray(got.image), pixels) and got.recorded["begins with"] == "a picture"
    assert asked(clips).image is None is asked(WORDS, picture=url).image
    wrong = [
        "data:image/png;base64,",
        "data:image/png;base64,AAAA",
        "data:image/png;base64,Ä",
        "/etc/passwd",
        url[:-90],
    ]
    wrong += [data_url(Image.fromarray(pixels), "gif"), "data:text/html;base64,AAAA", 5, ["x"], {"path": "/etc/passwd"}]
    wrong += ["data:image/png;base64," + "A" * 800_001]
    for each in wrong:
        with pytest.raises(ValueError, match="the picture can't be read|text was expected") as refused:
            asked(clips, picture=each)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


class Listed:
    """A stand-in for a catalog that returns the LoRAs it is asked for."""

    def weights(self, *names):
        return CHOICE

    def with_loras(self, choice, chosen):
        return chosen


def test_loras_and_their_weights():
    def chosen(loras, weights=""):
        return SettingsForm("a", "b", "c", None, 1, 1, "", loras=loras, lora_weights=weights).choice(Listed())

    assert chosen(["x", "y"], " 0.5, -2 ") == [("x", 0.5), ("y", -2.0)]
    assert chosen(["x", "y"]) == [("x", 1.0), ("y", 1.0)] and chosen([]) == chosen(None) == []
    for loras, weights in ((["x"], "1 2"), (["x"], "nan"), (["x"], "1e9"), ([5], ""), (["x"], "a"), (["x"] * 9, ""),
                           (["x"], None), (["x"], "9" * 10**6)):  # fmt: skip
        with pytest.raises(ValueError, match="LoRAs|text was expected") as refused:
            chosen(loras, weights)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200
