"""The page only reads files that it lists, by name, and nothing outside the folder of runs."""

import os

import pytest

from opendit.checkpoint.pretrained import find_weights
from opendit.sampling.page.catalog import NEWEST, Catalog
from tests.sampling.page.runs import BROKEN, CLIPS, CUT, DIGITS, LINK, LINKED_FILE, NAMES
from tests.sampling.small import write

HOSTILE = ["..", ".", "", "/", "/etc", "../elsewhere/run", "../outputs/000-DiT-Ti-2", "000-DiT-Ti-2/", "./000-DiT-Ti-2",
           "000-DiT-Ti-2/../../elsewhere", "../log.jsonl", "../config.json", "~", "\0", "000-DiT-Ti-2\0", "*", "\ud800",
           LINK, None, 3, ["000-DiT-Ti-2"]]  # fmt: skip


@pytest.fixture
def catalog(outputs):
    return Catalog(outputs)


def test_what_is_listed(catalog):
    assert catalog.runs() == [CUT, LINKED_FILE, BROKEN, CLIPS, DIGITS] and catalog.refused() == [LINK]
    assert catalog.sources() == [CUT, LINKED_FILE, BROKEN, CLIPS, DIGITS]
    assert catalog.checkpoints(DIGITS) == [NEWEST, "step_0000020", "step_0000010"]
    assert catalog.averages(DIGITS, NEWEST) == ["ema", "ema_0.9", "model"]
    assert catalog.grids(DIGITS) == ["0000010.png", "0000020.png", "0000030.png", "0000040.png"]
    assert catalog.grids(CLIPS) == [] and Catalog(catalog.outputs / "nowhere").sources() == []


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_that_is_not_listed_is_no_path(catalog, name):
    for ask in (
        lambda: catalog.run(name),
        lambda: catalog.grids(name),
        lambda: catalog.checkpoints(name),
        lambda: catalog.grid(name, "0000010.png"),
        lambda: catalog.grid(DIGITS, name),
        lambda: catalog.weights(name, NEWEST, "ema"),
        lambda: catalog.weights(DIGITS, name, "ema"),
        lambda: catalog.weights(DIGITS, NEWEST, name),
        lambda: catalog.weights(DIGITS, "step_0000010", name),
    ):
        with pytest.raises((ValueError, TypeError)):
            ask()


def test_links_that_lead_out_are_refused(catalog):
    with pytest.raises(ValueError, match="symbolic link out of"):
        catalog.grid(DIGITS, "0000040.png")
    with pytest.raises(ValueError, match="symbolic link out of"):
        catalog.weights(LINKED_FILE, NEWEST, "ema")
    assert catalog.file(LINKED_FILE, "log.jsonl") is None and catalog.file(LINKED_FILE, "config.json") is None
    assert catalog.grids(LINKED_FILE) == []
    assert catalog.file(DIGITS, "log.jsonl") == catalog.outputs / DIGITS / "log.jsonl"


def test_what_is_no_regular_file_is_not_read(tmp_path, catalog):
    run = tmp_path / "000-DiT-Ti-2"
    (run / "samples").mkdir(parents=True)
    os.mkfifo(run / "log.jsonl")
    os.mkfifo(run / "samples" / "0000001.png")
    own = Catalog(tmp_path)
    assert own.file(run.name, "log.jsonl") is None
    with pytest.raises(ValueError, match="not a regular file"):
        own.grid(run.name, "0000001.png")


@pytest.mark.parametrize(
    ("checkpoint", "average", "path", "which", "file"),
    [
        (NEWEST, "ema", "", "ema", "checkpoints/step_0000020/ema.safetensors"),
        (NEWEST, "model", "", "model", "checkpoints/step_0000020/model.safetensors"),
        (NEWEST, "ema_0.9", "checkpoints/step_0000020/ema_0.9.safetensors", "ema", None),
        ("step_0000010", "model", "checkpoints/step_0000010", "model", "checkpoints/step_0000010/model.safetensors"),
        ("step_0000010", "ema_0.9", "checkpoints/step_0000010/ema_0.9.safetensors", "ema", None),
    ],
)
def test_weights_of_a_run(catalog, checkpoint, average, path, which, file):
    run = catalog.outputs / DIGITS
    choice = catalog.weights(DIGITS, checkpoint, average)
    assert (choice.path, choice.which) == (run / path, which) and average in choice.name
    found = find_weights(choice.path, choice.which).relative_to(run)
    assert str(found).replace("latest", "step_0000020") == (file or path)


def test_cards(catalog):
    card = catalog.card(catalog.weights(DIGITS, NEWEST, "ema"))
    assert card.classes == tuple(NAMES) and card.guided and not card.captions and not card.clips
    assert card.samplers[0] == "ddpm" and card.size == "8 x 8 pixels" and card.model == "DiT-Ti/2"
    card = catalog.card(catalog.weights(CLIPS, NEWEST, "ema"))
    assert card.clips and card.captions and card.classes == () and card.samplers[0] == "euler"
    with pytest.raises(ValueError, match="ema.safetensors"):
        catalog.card(catalog.weights(BROKEN, NEWEST, "ema"))


def test_a_checkpoint_that_is_written_anew_is_another_one(tmp_path):
    path = write(tmp_path / "one.safetensors")
    catalog = Catalog(tmp_path / "none", {"one": path})
    before = catalog.weights("one", NEWEST, "ema")
    assert before == catalog.weights("one", NEWEST, "ema") and catalog.sources() == ["one"]
    path.unlink()
    write(path, seed=1)
    assert before != catalog.weights("one", NEWEST, "ema")
