"""The report of a real run in headless Chromium, as a reader uses it; screenshots to look at.

    python tests/drive_report.py report SCREENSHOTS

`tests/unit/test_report_browser.py` goes into every corner, on results made up.
"""

import shutil
import sys
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def drive(report: Path, shots: Path, scratch: Path) -> None:
    """Raises AssertionError, or Playwright's TimeoutError, at the first thing that is not right."""
    from playwright.sync_api import sync_playwright

    copy = scratch / "copy"  # the same page, a script in each of its passages
    shutil.copytree(report, copy)
    planted = 0
    for path in sorted((copy / "data").glob("p[0-9]*.js")):
        text = path.read_text()
        planted += text.count(" is ")
        path.write_text(text.replace(" is ", f" {HOSTILE} "))
    wrong: list[str] = []
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith(LOCAL) else wrong.append(r.url))
        address = (report / "index.html").resolve().as_uri()

        page.goto(address)
        assert page.locator("table.scores tr.ours").count() > 0
        page.locator("#fig-em").scroll_into_view_if_needed()  # figures are drawn when they are seen
        page.wait_for_selector("#fig-em .main-svg")
        page.screenshot(path=shots / "desktop-report.png", full_page=True)

        page.goto(f"{address}#t")
        counts = []
        for filters in ({}, {"policy": "memsearcher"}, {"right": "1"}, {"right": "0"}):
            for name, value in filters.items():
                page.select_option(f"#{name}", value)
            counts.append(int(page.locator("#count").inner_text().split()[0]))
        everything, ours, right, failed = counts
        assert everything >= ours == right + failed > 0

        page.click(".row >> nth=0")
        page.wait_for_selector(".turn")
        page.screenshot(path=shots / "desktop-trajectory.png")
        link, heading = page.url, page.locator("#detail h1").inner_text()
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_selector(".turn")
        assert page.locator("#detail h1").inner_text() == heading

        page.goto(link.replace(address, (copy / "index.html").resolve().as_uri()))
        page.wait_for_selector(".turn")
        hostile = page.locator(".passage .text", has_text="<script>")
        for _ in range(ours):
            if hostile.count():
                break
            page.keyboard.press("j")
            page.wait_for_selector(".turn")
        assert hostile.count() or not planted  # a policy that never searches found no passage
        assert page.evaluate("window.hacked") is None

        page.set_viewport_size({"width": 390, "height": 844})
        for name, anchor in (("report", ""), ("list", "#t"), ("trajectory", link.split("#")[1])):
            page.goto(f"{address}#{anchor.removeprefix('#')}" if anchor else address)
            page.wait_for_selector(".turn" if name == "trajectory" else "header")
            page.screenshot(path=shots / f"phone-{name}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
    assert wrong == []


LOCAL = ("file:", "data:", "blob:")

if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
        drive(Path(sys.argv[1]), Path(sys.argv[2]), Path(folder))
