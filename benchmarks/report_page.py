"""The report's viewer with 10,000 trajectories in headless Chromium: one JSON object a line.

    python -m benchmarks.report_page [--questions 286] [--rounds 7]

Times from the page's own clock: opening is from navigation until the first row of the list has been
painted, filtering from the choice until the frame after the new list. `value` is the median over
the rounds, `low` and `high` the least and the largest. Needs Debian's Chromium and Playwright.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
OPENED = """() => new Promise(done => {
  const look = () => document.querySelector('.row')
    ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))
    : setTimeout(look, 5);
  look();
})"""
CHOSEN = """([id, value]) => new Promise(done => {
  const began = performance.now();
  const select = document.getElementById(id);
  select.value = value;
  select.dispatchEvent(new Event('change'));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
})"""
TYPED = """(text) => new Promise(done => {
  const began = performance.now(), count = document.getElementById('count');
  const box = document.getElementById('q');
  new MutationObserver(() => requestAnimationFrame(() => done(performance.now() - began)))
    .observe(count, { childList: true, characterData: true, subtree: true });
  box.value = text;
  box.dispatchEvent(new Event('input'));
})"""


def main() -> None:
    import synthetic
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--questions", type=int, default=286, help="per benchmark, of five policies"
    )
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    settings = synthetic.params(
        f"report.trajectories_per_benchmark={asked.questions}", *synthetic.REACT, *synthetic.SEED
    )
    with tempfile.TemporaryDirectory() as name:
        root, corpus = Path(name), synthetic.passages(5000)
        synthetic.write_results(root, settings, asked.questions, corpus)
        synthetic.write_report(root, settings, corpus)
        address = (root / "report" / "index.html").as_uri()
        opened, chosen, typed = [], [], []
        with sync_playwright() as p:
            context = p.chromium.launch_persistent_context(
                root / "profile",
                executable_path=shutil.which("chromium"),
                headless=True,
                args=FLAGS,
            )
            page = context.new_page()
            for number in range(asked.rounds):
                page.goto("about:blank")
                page.goto(f"{address}#t", wait_until="commit")
                opened.append(page.evaluate(OPENED))
                shown = page.locator("#count").inner_text()
                choice = ("dataset", "musique") if number % 2 else ("policy", "react")
                chosen.append(page.evaluate(CHOSEN, list(choice)))
                typed.append(page.evaluate(TYPED, "marel 18"))
            context.close()
    print(json.dumps({"name": "trajectories in the list", "value": shown}))
    report("viewer opens, ms", opened, 2000)
    report("a filter is chosen, ms", chosen, 200)
    report("a search is typed, ms (60 of them are waited for the next key)", typed, 200)


def report(name: str, values: list[float], bound: float) -> None:
    value, low, high = (round(each, 1) for each in (median(values), min(values), max(values)))
    row = {"name": name, "value": value, "low": low, "high": high, "bound": bound}
    print(json.dumps(row | {"holds": value <= bound}), flush=True)


if __name__ == "__main__":
    main()
