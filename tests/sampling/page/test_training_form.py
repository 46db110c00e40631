"""The tab Train's fields become flags of train.py with paths below one folder, or are refused in one line."""

import json
import re

import pytest

from opendit.config.command_line import parse
from opendit.config.train import TrainConfig
from opendit.sampling.page.catalog import Catalog
from opendit.sampling.page.training_tab import (
    ANY_CARD,
    AS_RECIPE,
    DIGITS,
    NO_RECIPE,
    NOTHING,
    TrainingForm,
    base_choices,
    data_choices,
    kept_flags,
    read_training_form,
    recipes,
)
from tests.config.test_light import ROOT
from tests.sampling.page.runs import log

RUN = "000-DiT-Ti-2"
PLAIN = dict(base=NOTHING, data=DIGITS, recipe="digits", card=ANY_CARD, model=AS_RECIPE, vae=AS_RECIPE, image_size="")
PLAIN |= dict(frames="", steps="", batch_size="", lr="", lora="", ckpt_every="")


@pytest.fixture
def root(tmp_path):
    """Return a root folder with data, a model, a run and links, some of which lead out."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in ("photos/cat", "a,b:0.5", "Z-Image", "outputs", "page_runs", ".hidden"):
        (root / folder).mkdir(parents=True)
    (root / "Z-Image" / "model_index.json").write_text("{}")
    (root / "clips.csv").write_text("path,text\n")
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to("photos")
    (root / "loop").symlink_to("loop")
    log(root / "outputs" / RUN, [{"step": 1, "loss": 1.0}])
    (root / "outputs" / RUN / "checkpoints" / "step_0000001").mkdir(parents=True)
    flags = {"model": "DiT-Ti/4", "vae": "/etc/vae", "image_size": 8, "objective": "flow", "flow_shift": 3.0,
             "num_frames": 16, "use_video": False, "sample_prompts": ["/etc/x"], "outputs": "/", "lr": 5}  # fmt: skip
    (root / "outputs" / RUN / "config.json").write_text(json.dumps({"flags": flags, "starts": [{"flags": flags}]}))
    return root


def read(root, **fields):
    return read_training_form(TrainingForm(**{**PLAIN, **fields}), Catalog(root / "outputs"), root)


def test_flags(root):
    title, flags, more = read(root)
    assert flags == {"recipe": "digits", "data_path": "digits", "outputs": str(root / "outputs")} and more == {}
    assert title == "digits on digits"
    title, flags, more = read(
        root, base=RUN, data="inner", recipe=NO_RECIPE, card="A100", steps=" 20 ", batch_size="8", lr="1e-4", frames="4"
    )
    assert title == "DiT-Ti/4 on inner" and more == {"hardware": "A100"}
    assert flags == {
        "model": "DiT-Ti/4", "image_size": 8, "objective": "flow", "flow_shift": 3.0, "use_video": True,
        "pretrained": str(root / "outputs" / RUN), "data_path": str(root / "photos"), "num_frames": 4,
        "max_steps": 20, "epochs": 10**6, "log_every": 1, "batch_size": 8, "lr": 1e-4, "outputs": str(root / "outputs"),
    }  # fmt: skip
    _, flags, more = read(root, base="Z-Image", data="clips.csv", recipe="lora", batch_size="2")
    assert flags["card"] == "auto" and flags["pretrained"] == str(root / "Z-Image") and more == {}
    assert flags["global_batch_size"] == 2  # must be a multiple; the recipe sets it too
    assert read(root, lora="4", base=RUN, card="4090")[1]["card"] == "4090"


def test_speed_ups_without_a_recipe(root):
    """Without a recipe, the flags are those of train_img.sh."""
    every = TrainingForm(**{**PLAIN, "recipe": NO_RECIPE, "model": "DiT-S/2"})
    _, flags, _ = read_training_form(every, Catalog(root / "outputs"), root, has_gpu=True)
    _, without, _ = read_training_form(every, Catalog(root / "outputs"), root)
    written = re.search(r"run\+=\((--mixed_precision [^)]*)\)", (ROOT / "train_img.sh").read_text())[1]
    assert {name: flags[name] for name in flags.keys() - without} == {
        name: True if value is None else value
        for name, value in ((word.split() + [None])[:2] for word in written.split("--")[1:])
    }
    of_recipe = read_training_form(TrainingForm(**PLAIN), Catalog(root / "outputs"), root, has_gpu=True)[1]
    assert "mixed_precision" not in of_recipe


def test_every_name_is_a_flag_of_train(root, tmp_path):
    import yaml

    every = dict(base=RUN, data="photos", recipe=NO_RECIPE, model="DiT-S/2", vae="none", image_size="16", steps="2")
    _, flags, more = read(root, **every, frames="4", batch_size="1", lr="1", lora="4", ckpt_every="2", card="H100")
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump({**flags, "hardware": "H100"}))
    read_back = parse(TrainConfig, ["--config", str(tmp_path / "flags.yaml")])
    assert {name: getattr(read_back, name) for name in flags} == flags and set(flags) <= read_back.given


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("link", "leads out of it"), ("../outside", "leads out of it"), ("..", "leads out of it"), (".", "not below"),
        ("/etc", "leads out of it"), ("photos/../../outside", "leads out of it"), ("nowhere", "there is no nowhere"),
        ("loop", "there is no loop"), ("", "choose a folder"), ("a\0b", "choose a folder"), ("a\nb", "choose a folder"),
        ("a,b:0.5", "several sources"), ("s3://bucket", "there is no"), ("mock", "there is no"), ("x" * 2000, "choose"),
        ("~", "there is no"), (["photos"], "text was expected"), (None, "text was expected"), ("python", "there is no"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["base", "data"])
def test_paths_stay_below_the_root(root, field, path, said):
    with pytest.raises(ValueError, match=said) as refused:
        read(root, **{field: path})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recipe": "mock_digits"}, "recipe: choose"), ({"recipe": ["digits"]}, "recipe: choose"),
        ({"recipe": NO_RECIPE}, "choose a recipe, a base or a model"), ({"recipe": "lora"}, "base: the recipe lora"),
        ({"card": "--x"}, "card: choose"), ({"vae": "/etc"}, "VAE: choose"), ({"model": "x"}, "model: choose"),
        ({"steps": "1" * 400}, "max steps: a whole number"), ({"steps": "nan"}, "max steps"),
        ({"steps": 5}, "text was expected"), ({"lora": "0.5"}, "lora: a whole number"),
        ({"lr": "inf"}, "lr: a number"), ({"batch_size": "x" * 10**6}, "batch size"),
        ({"image_size": "-8"}, "image size"), ({"frames": "0"}, "num frames"), ({"ckpt_every": "1e400"}, "ckpt every"),
    ],
)  # fmt: skip
def test_wrong_fields_are_one_line(root, fields, said):
    with pytest.raises(ValueError, match=said) as refused:
        read(root, **fields)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_what_can_be_chosen(root):
    skipped = ("page_runs", "outputs")
    assert data_choices(root, skipped) == [DIGITS, "Z-Image", "a,b:0.5", "clips.csv", "inner", "photos", "photos/cat"]
    assert base_choices(root, skipped, Catalog(root / "outputs")) == [NOTHING, RUN, "Z-Image"]
    assert "lora" in recipes() and not any(name.startswith("mock_") for name in recipes())


def test_a_runs_flags_lead_nowhere_else(root):
    """Only the network's settings are taken over from a run's flags, and no paths."""
    kept = kept_flags(Catalog(root / "outputs"), RUN)
    assert kept == {"model": "DiT-Ti/4", "image_size": 8, "objective": "flow", "flow_shift": 3.0}
