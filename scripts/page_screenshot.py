"""Take pictures of the web page for the documentation, with a headless Chromium.

python scripts/page_screenshot.py --outputs outputs --run 000-DiT-Ti-2     # assets/page.png, assets/page_runs.png
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "chromium")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", required=True, help="the folder of runs")
    parser.add_argument("--run", required=True, help="the run that is drawn from and shown")
    parser.add_argument("--captions", default="", help="of a model of captions, one a line")
    parser.add_argument("--folder", type=Path, default=Path("assets"), help="where the pictures go [assets]")
    parser.add_argument("--tabs", nargs="+", default=["Sample", "Runs"], help="Sample, Runs, Compare [Sample Runs]")
    flags = parser.parse_args()
    command = [sys.executable, "-m", "opendit", "page", "--outputs", flags.outputs, "--port", "0"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = re.match(r"http://\S+", serving.stdout.readline())[0]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1240, "height": 860})
            page.goto(address)
            for tab in flags.tabs:
                picture = flags.folder / ("page.png" if tab == "Sample" else f"page_{tab.lower()}.png")
                page.get_by_role("tab", name=tab).click()
                {"Sample": sample, "Runs": runs, "Compare": compare}[tab](page, flags)
                page.mouse.move(0, 0)
                page.wait_for_timeout(700)  # until animations have ended
                page.screenshot(path=picture, full_page=True)
                print(f"{picture}: {picture.stat().st_size / 1000:.0f} KB")
            browser.close()
    finally:
        serving.terminate()
        serving.wait()


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).locator("visible=true").first.click()
    page.get_by_role("option", name=option, exact=True).click()


def sample(page: Page, flags: argparse.Namespace) -> None:
    page.locator(".card, .error").locator("visible=true").first.wait_for()
    choose(page, "Run or checkpoint", flags.run)
    page.wait_for_timeout(1500)
    if flags.captions:
        page.get_by_label("Captions, one a line").locator("visible=true").fill(flags.captions.replace("\\n", "\n"))
    page.get_by_label("Count", exact=True).locator("visible=true").fill("20")
    page.locator("#draw").click()
    page.locator("#sample-gallery [data-count]").wait_for(timeout=300_000)


def runs(page: Page, flags: argparse.Namespace) -> None:
    choose(page, "Run", flags.run)
    page.locator("#grid img").wait_for()
    page.locator("#plot-loss canvas, #plot-loss svg").first.wait_for()


def compare(page: Page, flags: argparse.Namespace) -> None:
    page.locator("#compare").click()
    page.locator("#compare-gallery [data-count]").wait_for(timeout=300_000)


if __name__ == "__main__":
    main()
