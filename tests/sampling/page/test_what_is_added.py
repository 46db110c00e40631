"""LoRAs and first pictures of clips: the page draws the same samples as Python."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

import opendit
from opendit.checkpoint.pretrained import read_config
from opendit.diffusion.objectives import FlowObjective
from opendit.models.finetuning import Lora
from opendit.sampling.page.__main__ import build_parser
from opendit.sampling.page.catalog import NEWEST, Catalog, ModelCard
from opendit.sampling.page.drawing import DrawingQueue, DrawingRequest
from opendit.sampling.pipeline import DrawSettings
from tests.sampling.page.conftest import serving
from tests.sampling.small import BYTES, write, write_lora

BASE, STYLE, CLIPS = "000-DiT-Ti-2", "001-DiT-Ti-2", "002-vDiT-Ti-222"


@pytest.fixture
def catalog(tmp_path):
    """Return a catalog with a run, a LoRA run on it, another LoRA, and a run of clips that begin with a picture."""
    outputs = tmp_path / "outputs"
    place = "checkpoints/step_0000001/ema.safetensors"
    base = write(outputs / BASE / place, seed=1)
    lora, config = Lora(2, 4.0, str(base)), read_config(base)
    write_lora(outputs / STYLE / place, lora, config, "DiT-Ti/2", 2)
    write_lora(tmp_path / "style.safetensors", lora, config, "DiT-Ti/2", 3)
    info = {"objective": FlowObjective().to_dict(), "captions": ["a\nseven", "up", "left", "down"]}
    write(outputs / CLIPS / place, "vDiT-Ti/222", info=info, frames=4, input_size=(8, 8), text=BYTES,
          learn_sigma=False, in_channels=3, given_frames="first")  # fmt: skip
    return Catalog(outputs, {}, {"style.safetensors": tmp_path / "style.safetensors"})


def drawn(catalog, request):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'opendit[page]'")
    from opendit.sampling.page.server import load_choice

    options, _ = build_parser().read(["--mixed_precision", "fp32"])
    with DrawingQueue(partial(load_choice, options), 4) as queue:
        pending = queue.submit(request)
        return pending.result(60), pending.notes


def test_loras_with_weights(catalog, tmp_path):
    assert catalog.loras() == ["style.safetensors", STYLE]
    choice = catalog.weights(BASE, NEWEST, "ema")
    both = catalog.with_loras(choice, [(STYLE, 0.5), ("style.safetensors", 2.0)])
    assert both.name == f"{BASE}, step_0000001, ema, {STYLE}:0.5, style.safetensors:2" and both != choice
    assert catalog.with_loras(choice, []) == choice
    assert catalog.with_loras(choice, [(STYLE, 0.6)]) != catalog.with_loras(choice, [(STYLE, 0.5)])
    for hostile in (BASE, "../style.safetensors", str(tmp_path / "style.safetensors"), ""):
        with pytest.raises(ValueError, match="is not, or no longer, listed"):
            catalog.with_loras(choice, [(hostile, 1.0)])
    how = DrawSettings(steps=2, guidance=1.0, seed=3)
    got, _ = drawn(catalog, DrawingRequest(both, (0, 3), how))
    files = [catalog.outputs / STYLE, (tmp_path / "style.safetensors", 2.0)]
    theirs = opendit.load(catalog.outputs / BASE, lora=[(files[0], 0.5), files[1]], device="cpu")
    want = theirs([0, 3], steps=2, guidance=1.0, seed=3, progress=False)
    plain = opendit.load(catalog.outputs / BASE, device="cpu")([0, 3], steps=2, guidance=1.0, seed=3, progress=False)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(got, plain, strict=True))


def test_a_clip_begins_with_a_picture(catalog):
    choice = catalog.weights(CLIPS, NEWEST, "ema")
    card = catalog.card(choice)
    assert card.begins and card.examples == ("a seven", "up", "left")
    assert not ModelCard("m", False, False, (), (), True, "8", "ddpm").begins
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    how = DrawSettings(steps=2, guidance=1.0, seed=3)
    got, notes = drawn(catalog, DrawingRequest(choice, ("up",), how, picture))
    want = opendit.load(catalog.outputs / CLIPS, device="cpu")(
        ["up"], steps=2, guidance=1.0, seed=3, image=picture, progress=False
    )
    assert np.array_equal(got[0].frames, want[0].frames) and not any("given frames" in note for note in notes)
    without, notes = drawn(catalog, DrawingRequest(choice, ("up",), how))
    assert not np.array_equal(got[0].frames[0], without[0].frames[0])
    assert any("draws without given frames" in note for note in notes)


def test_a_browser_sends_loras_and_a_picture(catalog, tmp_path, visit):
    """The browser reads and shrinks the picture. Files that are no picture are reported."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), dtype=np.uint8)).save(
        tmp_path / "noise.png"
    )
    (tmp_path / "no.png").write_text("no picture")
    words = ["--outputs", str(catalog.outputs), "--lora", str(tmp_path / "style.safetensors")]
    with serving(*words, "--mixed_precision", "fp32") as address:
        one = visit(address)
        page = one.open()
        one.choose("Run or checkpoint", CLIPS)
        page.locator(".card", has_text="draws clips of captions").locator("visible=true").wait_for()
        captions = page.get_by_label("Captions, one a line").locator("visible=true")
        assert captions.get_attribute("placeholder") == "a seven\nup\nleft"
        assert "Compare shows by how much" in page.locator(".in-group", has_text="exact").first.inner_text()
        captions.fill("up")
        for label, value in (("Count", 1), ("Steps", 2)):
            one.fill(label, value)
        chosen = page.locator("input[type=file]").locator("visible=true")
        chosen.set_input_files(tmp_path / "no.png")
        page.wait_for_timeout(500)
        page.locator("#draw").click()
        page.locator("#sample-status .error", has_text="the picture can't be read").wait_for()
        chosen.set_input_files(tmp_path / "noise.png")
        sent = page.locator("img.begins[src^='data:image/jpeg']").locator("visible=true")
        assert sent.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1280
        page.locator("#draw").click()
        source = one.drawn(1).first.get_attribute("src")
        one.choose("LoRA", "style.safetensors")
        page.keyboard.press("Escape")
        one.fill("Their weights", "0.5")
        one.choose("Run or checkpoint", BASE)
        page.locator(".card", has_text="5 classes").locator("visible=true").wait_for()
        page.locator("#draw").click()
        page.locator("#sample-status", has_text=re.compile("of seed .*style.safetensors:0.5")).wait_for()
        assert one.drawn(1).first.get_attribute("src") != source
        one.close()


def test_text_encoders_are_stored_in_the_precision_of_the_flag(catalog, monkeypatch):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'opendit[page]'")
    from opendit.sampling.page import server

    given = []
    monkeypatch.setattr(server, "load", lambda _, **how: given.append(how.get("text_precision")))
    options, _ = build_parser().read(["--text_precision", "int8"])
    place = "checkpoints/step_0000001/ema.safetensors"
    write(catalog.outputs / "003-DiT-Ti-2" / place, text=replace(BYTES, name="clip"))
    for name in (BASE, CLIPS, "003-DiT-Ti-2"):  # classes, bytes, and CLIP
        server.load_choice(options, catalog.weights(name, NEWEST, "ema"))
    assert given == [None, None, "int8"]
