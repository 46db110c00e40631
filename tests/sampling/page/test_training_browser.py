"""The tab Train in a real browser: digits from a folder are trained by runs that outlive the page."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from PIL import Image

from opendit.data.digits import digits_split
from opendit.sampling.page import training_queue
from tests.config.test_light import ROOT
from tests.sampling.page.conftest import serving
from tests.sampling.page.runs import DIGITS, make

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="runs are started from the page on Linux only")
LONG = 120_000  # ms; importing torch on shared cores is slow


@pytest.fixture
def root(tmp_path):
    """Return a folder with runs, with digits in one folder per class, and with a link that must not be followed."""
    make(tmp_path)
    images, labels = digits_split("train")
    for number in range(100):
        folder = tmp_path / "pictures" / str(int(labels[number]))
        folder.mkdir(parents=True, exist_ok=True)
        pixels = ((images[number, 0] + 1) * 127.5).round().byte().numpy()
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "out").symlink_to("/etc")
    return tmp_path


def test_digits_from_a_folder_stopped_found_again_and_drawn(visit, root):
    job = root / "page_runs" / "0001"
    with serving("--allow_train", str(root), "--mixed_precision", "fp32") as address:
        one = visit(address)
        page = one.open("Train")
        page.set_default_timeout(LONG)
        page.locator("#jobs", has_text="nothing has been trained here yet").wait_for()
        for path in ("../x", "out", "/etc", '<img src=x onerror="alert(1)">'):  # typed, not chosen
            one.fill("Data: a folder or a table", path)
            page.keyboard.press("Enter")
            page.locator("#plan").click()
            page.locator("#told .error", has_text=path).wait_for()
        one.choose("Data: a folder or a table", "pictures")
        page.locator("#look").click()
        page.locator("#told", has_text="100 pictures of 10 classes").wait_for()
        assert page.locator("#details img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
        for label, value in (("Steps", "100000"), ("Learning rate", "1e-3"), ("Batch size", "16")):
            one.fill(label, value)
        page.get_by_text("More", exact=True).click()
        one.fill("Save every", "5")
        page.locator("#plan").click()
        told = page.locator("#told", has_text="hours:")
        told.wait_for()
        assert re.search(r"memory: [\d.]+ GiB a GPU; hours: [\d.,]+ for 100,000 steps, predicted", told.inner_text())
        page.locator("#start").click()
        page.locator("#jobs", has_text="running").wait_for()
        page.locator("#train-grid img").wait_for()
        page.locator("#stop").click()
        page.locator("#state", has_text="stopped").wait_for()
        run = (job / "run").read_text().strip().rpartition("/")[2]
        ended = json.loads((root / "outputs" / run / "ended.json").read_text())
        assert ended["stopped"] and not ended["failed"] and 5 <= ended["step"] < 100_000
        page.locator("#go-on").click()
        page.locator("#jobs", has_text="running").wait_for()
        one.close()
    # The page has ended, but the run continues.
    process = json.loads((job / "job.json").read_text())["pid"]
    os.kill(process, 0)
    with serving("--allow_train", str(root), "--mixed_precision", "fp32") as address:
        one = visit(address)
        page = one.open("Train")
        page.set_default_timeout(LONG)
        page.locator("#state", has_text="running").wait_for()
        page.wait_for_function(
            f"parseInt(/step (\\d+)/.exec(document.querySelector('#state').innerText)?.[1]) > {ended['step']}"
        )
        page.locator("#plot-train polyline").wait_for()
        page.locator("#stop").click()
        page.locator("#state", has_text="stopped").wait_for()
        page.get_by_role("tab", name="Sample").click()
        one.choose("Run or checkpoint", run)
        page.locator(".card", has_text="10 classes").locator("visible=true").wait_for()
        one.fill("Count", 2)
        one.fill("Steps", 2)
        page.locator("#draw").click()
        assert one.drawn(2).count() == 2
        one.close()
    starts = json.loads((root / "outputs" / run / "config.json").read_text())["starts"]
    assert [start["first_step"] for start in starts] == [0, ended["step"]]


def test_without_the_flag_there_is_no_tab(visit):
    one = visit()
    page = one.open()
    assert page.get_by_role("tab", name="Runs").count() == 1 and page.get_by_role("tab", name="Train").count() == 0


def test_what_is_sent_over_http_stays_below_the_folder(root, monkeypatch):
    """Requests that the page's scripts never send start nothing, and with a password they are not answered."""
    monkeypatch.setattr(training_queue, "TICK_S", 60.0)  # jobs stay in the queue
    hostile = [
        "../x",
        "out",
        "/etc",
        f"{root}/../x",
        "pictures/../../x",
        "s3://x/y",
        "a,b",
        {"path": "/etc"},
        ["/x"],
        7,
    ]
    with serving("--allow_train", str(root)) as address:
        asking = Asking(address)
        for path in hostile:
            for label in ("Data: a folder or a table", "Base: a run, or a model's folder"):
                shown = str(asking.event("start", "click", {label: path}, fails=True))
                assert "starts, or waits" not in shown and "error" in shown
        assert not list((root / "page_runs").glob("[0-9]*"))
        assert "starts, or waits" in str(asking.event("start", "click", {"Data: a folder or a table": "pictures"}))
        assert "dropped from the queue" in str(asking.event("stop", "click", {"Show": "0001"}))
    with serving("--allow_train", str(root), password="correct horse") as address:
        for path, body in (("/config", None), ("/gradio_api/queue/join", b"{}")):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{address}{path}", body, timeout=20)


def test_three_hundred_requests_keep_the_memory_flat(root):
    """The program is tested over HTTP with drawings, curves and the tab Train."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'opendit[page]'")
    words = ["page", "--allow_train", str(root), "--port", "0", "--mixed_precision", "fp32"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    running = subprocess.Popen(
        [sys.executable, "-m", "opendit", *words], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    try:
        asking = Asking(re.match(r"http://127\.0\.0\.1:\d+", running.stdout.readline())[0])
        memory, run = [], {"Run or checkpoint": DIGITS}
        drawn = {**run, "Count": 1, "Steps": 1, "Sampler": "ddpm", "Classes": [0]}
        asking.event("refresh", "click", {})
        asking.event("Run or checkpoint", "input", run)  # the session then knows its choices
        for number in range(300):
            if number % 3 == 0:
                shown = asking.event("draw", "click", drawn)
                assert "1 of seed 0" in str(shown)
            elif number % 3 == 1:
                assert "polyline" in str(asking.event("Curves of", "input", {"Curves of": [DIGITS]}))
            else:
                assert "nothing has been trained" in str(asking.event("job", "input", {}))
            memory.append(resident(running.pid))
        assert max(memory[250:]) - max(memory[80:130]) < 15, memory[::20]  # MiB
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)


def resident(pid: int) -> float:
    """Return a process's resident memory in MiB."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Asking:
    """Sends the requests that a browser's scripts send."""

    def __init__(self, address: str):
        self.address, self.session = address, "a1b2c3"
        with urllib.request.urlopen(f"{address}/config", timeout=60) as answer:
            self.config = json.loads(answer.read())
        self.components = {each["id"]: each["props"] for each in self.config["components"]}

    def event(self, name: str, kind: str, values: dict, fails: bool = False):
        """Return the messages that answer a component's event; ``values`` sets fields by label."""
        named = [key for key, props in self.components.items() if name in (props.get("elem_id"), props.get("label"))]
        event = next(each for each in self.config["dependencies"] if [named[0], kind] in map(list, each["targets"]))
        props = [self.components[key] for key in event["inputs"]]
        data = [values.get(each.get("label"), each.get("value")) for each in props]
        body = {"data": data, "fn_index": event["id"], "session_hash": self.session}
        request = urllib.request.Request(f"{self.address}/gradio_api/queue/join", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            asked = json.loads(answer.read())["event_id"]
        seen = []
        with urllib.request.urlopen(
            f"{self.address}/gradio_api/queue/data?session_hash={self.session}", timeout=60
        ) as stream:
            for line in stream:
                if line.startswith(b"data:"):
                    message = json.loads(line[5:])
                    seen.append(message.get("output"))
                    if message.get("event_id") == asked and message["msg"] == "process_completed":
                        assert message["success"] or fails, message
                        return seen
        raise AssertionError(f"no answer to {name}: {seen}")
