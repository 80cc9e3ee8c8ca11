"""The report in a real browser: Debian's Chromium, driven by Playwright, on a page from disk.

Skipped where there is no Chromium (apt-get install chromium). Screenshots of the last test lie in
pytest's temporary folder (--basetemp), to be looked at. benchmarks/report_page.py measures 10,000
trajectories.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic

from memsearcher.types import Passage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
SHOWN = 12  # questions of each of the seven benchmarks
POLICIES = 5
SETTINGS = synthetic.params(
    f"report.trajectories_per_benchmark={SHOWN}", *synthetic.REACT, *synthetic.SEED
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root, corpus = tmp_path_factory.mktemp("results"), synthetic.passages(300)
    write_all(root, corpus)
    return (root / "report" / "index.html").as_uri()


def write_all(root: Path, corpus: list[Passage]) -> None:
    synthetic.write_results(root, SETTINGS, SHOWN, corpus)
    synthetic.write_curves(root, SETTINGS)
    synthetic.write_retrieval(root, SETTINGS)
    synthetic.write_ablation(root)
    synthetic.write_stages(root)
    synthetic.write_report(root, SETTINGS, corpus)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[playwright.BrowserContext]":
    with playwright.sync_playwright() as p:
        profile = tmp_path_factory.mktemp("profile")
        context = p.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS
        )
        context.set_default_timeout(60_000)
        yield context
        context.close()


@pytest.fixture
def page(browser: "playwright.BrowserContext") -> "Iterator[playwright.Page]":
    """A fresh page; whatever it logs as an error or asks of a network fails the test."""
    wrong: list[str] = []
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(LOCAL) else wrong.append(r.url))
    yield page
    page.close()
    assert wrong == []


LOCAL = ("file:", "data:", "blob:")


def count(page: "playwright.Page") -> str:
    return page.locator("#count").inner_text()


def test_it_opens_from_disk_and_draws(page: "playwright.Page", address: str) -> None:
    page.goto(address)
    assert page.title().startswith("MemSearcher")
    assert page.locator("table.scores tr.ours").count() == POLICIES
    for id in ("fig-em", "fig-context", "fig-cost-tokens", "fig-caps-0", "fig-mistakes"):
        page.locator(f"#{id}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{id} .main-svg")
    link = page.locator("#run a", has_text="abcdef01")
    assert link.get_attribute("href") == (
        "http://127.0.0.1:5000/#/experiments/1/runs/abcdef0123456789"
    )


def test_filters_deep_links_and_the_way_back(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}#t")
    total = POLICIES * 7 * SHOWN
    assert count(page) == f"{total} of {total}"
    page.select_option("#policy", "react")
    assert count(page) == f"{7 * SHOWN} of {total}"
    page.select_option("#dataset", "musique")
    assert count(page) == f"{SHOWN} of {total}"
    shares = []
    for right in ("1", "0"):
        page.select_option("#right", right)
        shares.append(int(count(page).split()[0]))
    assert sum(shares) == SHOWN
    page.click("#reset")
    page.fill("#q", "musique/test_3")
    page.wait_for_function("document.getElementById('count').textContent.startsWith('5 of')")
    page.click(".row >> nth=0")
    page.wait_for_selector(".turn")
    link = page.url
    assert "open=untrained" in link
    page.go_back()
    page.wait_for_selector("#detail .empty")

    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector(".turn")
    assert "musique/test_3" in page.locator("#detail .chips").inner_text()
    page.click(".others a >> nth=0")  # the same question, another policy
    page.wait_for_function("location.hash.includes('open=warmup')")
    page.goto(f"{address}#t?open=nobody~nq%2Ftest_1")
    page.wait_for_function("document.getElementById('detail').textContent.includes('Not in this')")
    page.goto(f"{address}#errors")
    page.click("#errors td a >> nth=3")
    page.wait_for_function("document.body.dataset.view === 'viewer'")
    assert page.locator("#mistake").input_value() == "not_retrieved"


def test_keyboard(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}#t")
    selected = page.locator('.row[aria-selected="true"] .what')
    page.keyboard.press("j")
    page.wait_for_selector(".turn")
    first = selected.inner_text()
    page.keyboard.press("j")
    page.wait_for_function(
        "([was]) => document.querySelector('#detail h1').textContent !== was", arg=[first]
    )
    assert selected.inner_text() != first
    page.keyboard.press("k")
    assert selected.inner_text() == first
    page.keyboard.press("/")
    page.keyboard.type("zzz nothing")
    page.wait_for_function("document.getElementById('count').textContent.startsWith('0 of')")
    page.keyboard.press("Escape")  # leaves the search
    page.keyboard.press("Escape")  # closes the trajectory
    page.wait_for_selector("#detail .empty")
    page.keyboard.press("Escape")  # leaves the viewer
    page.wait_for_function("document.body.dataset.view === 'report'")


def test_turns_are_shown_with_what_a_rewrite_changed(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}#t?open=memsearcher~nq%2Ftest_1")
    page.wait_for_selector(".turn")
    turns = page.locator(".turn").count()
    assert f"{turns} turn" in page.locator('.row[aria-selected="true"]').inner_text()
    assert page.locator(".turn ins").count() > 0
    assert page.locator(".turn .passage").count() == 3 * (turns - 1)
    page.goto(f"{address}#t?open=react~nq%2Ftest_1")
    page.wait_for_function("location.hash.includes('react')")
    page.wait_for_selector(".turn .passage")
    assert page.locator(".turn").count() > 1


def test_a_script_in_a_passage_or_question_is_text(page: "playwright.Page", address: str) -> None:
    page.goto(f"{address}#t?q=script")
    page.click(".row >> nth=0")
    page.wait_for_selector(".turn")
    assert "<script>window.hacked = 1</script>" in page.locator("#detail h1").inner_text()
    page.click("#reset")
    hostile = page.locator(".passage .text", has_text="<script>window.hacked")
    for _ in range(60):
        page.keyboard.press("j")
        page.wait_for_function("window.reader && document.querySelector('.turn')")
        if hostile.count():
            break
    assert hostile.count()
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), [("desktop", 1280, 900), ("phone", 390, 844)])
def test_it_fits_and_is_looked_at(
    page: "playwright.Page",
    address: str,
    tmp_path: Path,
    scheme: str,
    name: str,
    width: int,
    height: int,
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": height})
    places = {"report": "", "list": "#t", "trajectory": "#t?open=memsearcher~nq%2Ftest_1"}
    for place, anchor in places.items():
        page.goto(address + anchor)
        page.wait_for_selector(".turn" if place == "trajectory" else "header")
        page.screenshot(path=tmp_path / f"{name}-{scheme}-{place}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("header").bounding_box()["height"] < 120
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, shade.removeprefix("rgb(").rstrip(")").split(","))) < 60) == (
        scheme == "dark"
    )
