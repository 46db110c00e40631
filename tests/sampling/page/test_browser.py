"""The page in a real browser: drawing, playing and comparing samples, and hostile input."""

import io
import json
import zipfile

import numpy as np
import pytest
from PIL import Image

import opendit
from opendit.sampling.page.drawing import KEY
from tests.sampling.page.conftest import serving
from tests.sampling.page.runs import BROKEN, CLIPS, CUT, DIGITS, LINK, LINKED_FILE

PROMPT = '<img src=x onerror="alert(1)"> ${alert(2)} {{alert(3)}} <script>alert(4)</script> "\' & 数字 🎲'


def fetch(page, source: str) -> bytes:
    response = page.request.get(page.url.rstrip("/") + source)
    assert response.status == 200
    return response.body()


def status(page, text: str, where: str = "#sample-status") -> None:
    page.locator(where, has_text=text).wait_for()


def on_digits(visit):
    """Return a browser that has chosen the run of digits, and its page."""
    one = visit()
    page = one.open()
    one.choose("Run or checkpoint", DIGITS)
    page.locator(".card", has_text="5 classes").locator("visible=true").wait_for()
    return one, page


def test_draws_digits(visit, outputs):
    one, page = on_digits(visit)
    one.classes("2 two", "0 zero")
    for label, value in (("Count", 3), ("Seed", 7), ("Steps", 4)):
        one.fill(label, value)
    one.choose("Sampler", "ddim")
    page.locator("#draw").click()
    pictures = one.drawn(3)
    theirs = opendit.load(outputs / DIGITS, device="cpu")(
        [2, 0, 2], steps=4, guidance=4, seed=7, sampler="ddim", progress=False
    )
    for i, want in enumerate(theirs):
        assert pictures.nth(i).evaluate(
            "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"
        ) == [8, 8]
        with Image.open(io.BytesIO(fetch(page, pictures.nth(i).get_attribute("src")))) as got:
            assert np.abs(np.asarray(got).astype(int) - np.asarray(want)).max() <= 1 and np.asarray(want).std() > 1
            settings = json.loads(got.text[KEY])
        assert settings["seed"] == 7 and settings["label"] == ["two", "zero"][i % 2] and settings["number"] == i
        assert settings["weights"] == f"{DIGITS}, step_0000020, ema" and settings["sampler"] == "ddim"
    with page.expect_download() as download:
        page.locator("#sample-gallery figure a").nth(1).click()
    assert download.value.suggested_filename == "000001-zero-seed7.png"
    with page.expect_download() as download:
        page.get_by_text("download all 3").click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert len(archive.namelist()) == 3 and archive.testzip() is None

    before = pictures.first.get_attribute("src")
    page.locator("#again").click()
    page.wait_for_function(f"document.querySelector('#sample-gallery img').getAttribute('src') != '{before}'")
    again = json.loads(Image.open(io.BytesIO(fetch(page, pictures.first.get_attribute("src")))).text[KEY])
    assert again["seed"] != 7 and again["seed"] == int(page.get_by_label("Seed").first.input_value())
    assert {**again, "seed": 7} == {**settings, "number": 0, "label": "two"}


def test_cancels(visit):
    one, page = on_digits(visit)
    one.fill("Count", 64)
    one.fill("Steps", 1000)
    page.locator("#draw").click()
    status(page, "drawing")
    page.locator("#sample-status .bar").wait_for()
    page.locator("#cancel").click()
    status(page, "cancelled")
    assert page.locator("#sample-gallery img").count() == 0
    one.fill("Count", 2)
    one.fill("Steps", 2)
    page.locator("#draw").click()
    one.drawn(2)


def test_a_moving_digit_plays(visit):
    one = visit()
    page = one.open()
    one.choose("Run or checkpoint", CLIPS)
    page.locator(".card", has_text="draws clips of captions").locator("visible=true").wait_for()
    one.fill("Captions, one a line", "left\nup")
    one.fill("Count", 2)
    one.fill("Steps", 3)
    page.locator("#draw").click()
    video = one.drawn(2).first
    page.wait_for_function("document.querySelector('#sample-gallery video').readyState >= 2")
    seen = video.evaluate(
        """video => new Promise(done => {
            const times = [];
            const look = (now, frame) => {
                times.push(frame.mediaTime);
                times.length < 8 ? video.requestVideoFrameCallback(look)
                                 : done([video.videoWidth, video.videoHeight, video.paused, times]);
            };
            video.requestVideoFrameCallback(look);
        })"""
    )
    assert seen[:3] == [16, 16, False] and len(set(seen[3])) >= 3  # repeats, because the clip has four frames
    assert page.locator("#sample-gallery figcaption").first.inner_text().split() == ["left", "MP4"]


def test_compares(visit):
    one = visit()
    page = one.open("Compare")
    for nth in (0, 1):
        one.choose("Run or checkpoint", DIGITS, nth)
    page.locator(".card", has_text="5 classes").locator("visible=true").nth(1).wait_for()
    one.choose("Step", "step_0000010", 0)
    one.choose("Weights", "model", 1)
    one.fill("Steps", 3, 0)
    one.fill("Steps", 3, 1)
    one.fill("Count", 3)
    page.locator("#compare").click()
    pictures = one.drawn(3, "#compare-gallery")
    assert pictures.count() == 6 and page.locator(".pair").count() == 3
    told = [
        json.loads(Image.open(io.BytesIO(fetch(page, pictures.nth(i).get_attribute("src")))).text[KEY]) for i in (0, 1)
    ]
    assert [settings["weights"] for settings in told] == [
        f"{DIGITS}, step_0000010, ema",
        f"{DIGITS}, step_0000020, model",
    ]
    assert [settings["guidance"] for settings in told] == [4, 1.5] and told[0]["seed"] == told[1]["seed"]
    assert "differ by" in page.locator(".pair").first.inner_text()
    one.choose("Run or checkpoint", CLIPS, 1)
    page.locator(".card", has_text="captions").locator("visible=true").wait_for()
    page.locator("#compare").click()
    status(page, "nothing to compare by", "#compare-status")


def test_hostile_prompts_are_text(visit):
    one = visit()
    page = one.open()
    one.choose("Run or checkpoint", CLIPS)
    page.locator(".card", has_text="captions").locator("visible=true").wait_for()
    one.fill("Count", 3)
    one.fill("Steps", 1)
    one.fill("Guide away from", PROMPT)
    one.fill("Captions, one a line", f"{PROMPT}\na\0b\x1b[31m\ud83d\n" + 2000 * "é")
    page.locator("#draw").click()
    one.drawn(3)
    shown = page.locator("#sample-gallery figcaption span")
    assert shown.nth(0).text_content() == PROMPT
    assert shown.nth(1).text_content().startswith("a b [31m") and shown.nth(2).text_content().startswith(100 * "é")
    assert page.locator("#sample-gallery script").count() == 0
    one.fill("Captions, one a line", 2001 * "x")
    page.locator("#draw").click()
    status(page, "at most 2,000")


def test_what_a_browser_sends_is_looked_up(visit, outputs):
    """Names that the page does not offer are refused."""
    one, page = on_digits(visit)
    one.fill("Steps", 1)
    secret = outputs.parent / "elsewhere" / "run"
    replaced = []

    def other(route):
        body = json.loads(route.request.post_data)
        data = body["data"]
        if DIGITS in data:
            data[data.index(DIGITS)] = replaced[-1]
        route.continue_(post_data=json.dumps(body))

    page.route("**/queue/join*", other)
    for name in ("../elsewhere/run", str(secret), LINK, f"{DIGITS}/../{LINK}", {"path": str(secret)}, "a\0"):
        replaced.append(name)
        with page.expect_response("**/queue/join*"):
            page.locator("#draw").click()
        page.wait_for_timeout(300)
        assert page.locator("#sample-gallery img").count() == 0
    page.unroute("**/queue/join*")
    page.locator("#draw").click()
    one.drawn(10)
    base = page.url.rstrip("/")
    files = "/gradio_api/file="
    for path in ("/grid/..%2f..%2felsewhere/0000040.png", f"/grid/{DIGITS}/0000040.png", f"/grid/{LINK}/0000040.png",
                 f"/grid/{DIGITS}/..%2fconfig.json", f"{files}/etc/passwd", f"{files}{outputs}/{DIGITS}/log.jsonl",
                 "/drawn/..%2f..%2fetc%2fpasswd", "/drawn/" + 22 * "a", "/gradio_api/upload"):  # fmt: skip
        assert page.request.get(base + path).status == 404
    assert page.request.post(base + "/gradio_api/upload", multipart={"files": "x"}).status == 404
    assert page.request.get(f"{base}/grid/{DIGITS}/0000010.png").status == 200


def test_a_broken_checkpoint_is_a_message(visit):
    one = visit()
    page = one.open()
    one.choose("Run or checkpoint", BROKEN)
    page.locator(".error", has_text="ema.safetensors").locator("visible=true").wait_for()
    page.locator("#draw").click()
    page.locator("#sample-status .error", has_text="ema.safetensors").wait_for()
    one.choose("Run or checkpoint", LINKED_FILE)
    page.locator(".error", has_text="symbolic link out of").locator("visible=true").wait_for()
    one.choose("Run or checkpoint", CUT)  # the damage shows when tensors are read
    one.fill("Steps", 2)
    page.locator("#draw").click()
    page.locator("#sample-status .error", has_text="ema.safetensors").wait_for()
    one.choose("Run or checkpoint", DIGITS)
    page.locator(".card", has_text="5 classes").locator("visible=true").wait_for()
    page.locator("#draw").click()
    one.drawn(10)


def test_two_browsers_at_once(visit):
    first, busy = on_digits(visit)
    second = visit()
    page = second.open()
    second.choose("Run or checkpoint", CLIPS)
    page.locator(".card", has_text="captions").locator("visible=true").wait_for()
    first.fill("Count", 64)
    first.fill("Steps", 1000)
    busy.locator("#draw").click()
    status(busy, "drawing")
    second.fill("Captions, one a line", "left")
    second.fill("Count", 1)
    second.fill("Steps", 2)
    page.locator("#draw").click()
    status(page, "waiting")
    page.locator("#cancel").click()  # cancels only this browser's request
    status(page, "cancelled")
    status(busy, "drawing")
    page.locator("#draw").click()
    status(page, "waiting")
    busy.close()  # closing a browser cancels its request
    assert second.drawn(1).count() == 1 and page.locator("#sample-gallery video").count() == 1


def test_runs(visit):
    one = visit()
    page = one.open("Runs")
    for metric in ("loss", "grad_norm", "samples_per_s"):
        page.locator(f"#plot-{metric} svg, #plot-{metric} canvas").first.wait_for()
    assert page.locator(".legend").inner_text().split() == [CUT, LINKED_FILE, BROKEN, CLIPS, DIGITS]
    one.choose("Run", DIGITS)
    page.locator("#grid img").wait_for()
    assert page.locator("#grid img").get_attribute("src") == f"/grid/{DIGITS}/0000040.png"
    assert page.locator("#results td").all_inner_texts()[:4] == ["<i>fid</i>", "12.25", "-", "1,000"]
    assert "--lr 0.0001 -> 0.001" in page.locator("#starts").inner_text()
    page.locator("#slider input[type=number]").fill("1")
    page.locator("#slider input[type=number]").press("Enter")
    page.wait_for_function("document.querySelector('#grid img').src.endsWith('0000020.png')")
    width = "document.querySelector('#grid img').decode().then(() => document.querySelector('#grid img').naturalWidth)"
    assert page.evaluate(width) == 21
    page.get_by_text("Flags of the newest start").click()
    assert "<script>alert(1)</script>" in page.locator("#flags").inner_text()
    assert LINK in page.locator(".status", has_text="lead out of").inner_text()
    one.choose("Run", BROKEN)
    page.locator("#starts .error", has_text="config.json").wait_for()
    page.locator("#refresh").click()
    page.locator("#plot-loss").wait_for()


def test_a_password(chromium, visit, outputs):
    with serving("--outputs", str(outputs), password="correct horse") as address:
        known = visit(address, http_credentials={"username": "any", "password": "correct horse"})
        known.open()
        for credentials in (None, {"username": "any", "password": "wrong horse"}):
            stranger = visit(address, http_credentials=credentials)
            for path in ("/", "/config", "/drawn/x"):
                assert stranger.page.request.get(address + path).status == 401
        known.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_fits_a_phone(visit, scheme):
    one = visit(color_scheme=scheme)
    one.page.set_viewport_size({"width": 390, "height": 800})
    page = one.open()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
