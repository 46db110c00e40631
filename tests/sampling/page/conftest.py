"""Fixtures that serve the page and open it in a real browser."""

import contextlib
import shutil
import threading
import time

import pytest

from opendit.sampling.page.__main__ import build_parser, check, listen
from tests.sampling.page import runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium renders without a GPU, and sends no requests to its vendor.
ARGUMENTS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --autoplay-policy=no-user-gesture-required""".split()


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    return runs.make(tmp_path_factory.mktemp("page"))


@contextlib.contextmanager
def serving(*words: str, password: str | None = None):
    """Serve a page with these flags inside the context; yield its address."""
    pytest.importorskip("gradio", reason="the page needs gradio: pip install 'opendit[page]'")
    from opendit.sampling.page.server import PageServer, application, opened

    options, _ = build_parser().read(words)
    check(options)
    listening = listen("127.0.0.1", 0)
    with opened(options) as page:
        server = PageServer(application(page, password))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="session")
def address(outputs):
    with serving("--outputs", str(outputs), "--mixed_precision", "fp32", "--batch_size", "4") as address:
        yield address


@pytest.fixture(scope="session")
def chromium():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright to drive a browser with")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A separate browser context that opens the page. Requests to other hosts and script errors fail the test."""

    def __init__(self, browser, address: str, **options):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        self.page, self.address, self.problems = self.context.new_page(), address, []
        self.page.set_default_timeout(20_000)
        self.page.on("request", self._asked)
        self.page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.page.on("dialog", self._dialog)

    def _asked(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.problems.append(f"asked {request.url}")

    def _dialog(self, dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")  # an injected script has run
        dialog.dismiss()

    def open(self, tab: str = "Sample"):
        self.page.goto(self.address)
        self.page.locator(".card, .error").locator("visible=true").first.wait_for()  # the newest run is broken
        if tab != "Sample":
            self.page.get_by_role("tab", name=tab).click()
        return self.page

    def choose(self, label: str, option: str, nth: int = 0) -> None:
        """Choose an option of the visible dropdown with this label."""
        field = self.page.get_by_label(label, exact=True).locator("visible=true").nth(nth)
        field.click()
        from playwright.sync_api import expect

        found = self.page.get_by_role("option", name=option, exact=True)
        expect(found).to_have_count(1)  # waits until the previous dropdown's list has disappeared
        found.click()

    def fill(self, label: str, value, nth: int = 0) -> None:
        self.page.get_by_label(label, exact=True).locator("visible=true").nth(nth).fill(str(value))

    def classes(self, *names: str) -> None:
        """Choose exactly these classes."""
        self.page.get_by_role("button", name="Clear").or_(self.page.get_by_label("Clear")).locator(
            "visible=true"
        ).first.click()
        for name in names:
            self.choose("Classes", name)
        self.page.keyboard.press("Escape")

    def drawn(self, count: int, where: str = "#sample-gallery"):
        """Wait until ``count`` samples are shown; return them."""
        self.page.locator(f'{where} [data-count="{count}"]').wait_for()
        return self.page.locator(f"{where} img, {where} video")

    def close(self) -> None:
        self.context.close()
        assert self.problems == []


@pytest.fixture
def visit(chromium, address):
    visits = []

    def make(where: str = address, **options) -> Visit:
        visits.append(Visit(chromium, where, **options))
        return visits[-1]

    yield make
    for each in visits:
        each.close()
