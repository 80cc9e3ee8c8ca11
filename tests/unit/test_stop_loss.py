"""When a run has collapsed, from rows of its journal."""

from dataclasses import replace

import pytest

from memsearcher import params, stop_loss

LIMITS = params.load().train.stop_loss
HEALTHY = {"reward": 0.3, "kl": 0.01, "entropy": 0.4, "format": 0.9}
HEALTHY |= {"response_tokens": 60.0, "searches": 2.0}


def run(*changes: dict, dev: dict[int, float] | None = None) -> list[dict]:
    """Three healthy steps, then one for each of `changes`; `dev` by step."""
    rows = [HEALTHY | {"step": i} | c for i, c in enumerate(({},) * 3 + changes, 1)]
    return [r | ({"dev_em": dev[r["step"]]} if dev and r["step"] in dev else {}) for r in rows]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kl", 1.5, "kl 1.5 is above 1, 3 steps in a row"),
        ("entropy", 0.01, "entropy 0.01 is below 0.02"),
        ("format", 0.2, "format 0.2 is below 0.225"),
        ("response_tokens", 10.0, "response_tokens 10 is below 15"),
        ("response_tokens", 300.0, "response_tokens 300 is above 240"),
        ("searches", 0.4, "searches 0.4 is below 0.5"),
    ],
)
def test_each_figure_ends_the_run_after_patience_and_not_before(name, value, said):
    bad = {name: value}
    assert stop_loss.tripped(run(bad, bad, bad), LIMITS).startswith(said)
    assert stop_loss.tripped(run(bad, bad), LIMITS) is None
    assert stop_loss.tripped(run(bad, bad, {}, bad, bad), LIMITS) is None
    assert stop_loss.tripped(run(bad, bad, bad), replace(LIMITS, action="off")) is None


def test_what_is_null_or_not_known_is_not_watched():
    bad = {"searches": 0.0, "entropy": 0.0}
    limits = replace(LIMITS, min_search_share=None, min_entropy_share=None)
    assert stop_loss.tripped(run(bad, bad, bad), limits) is None
    rows = [{k: v for k, v in r.items() if k != "kl"} for r in run({}, {}, {})]
    assert stop_loss.tripped(rows, LIMITS) is None
    assert stop_loss.tripped([], LIMITS) is None


def test_dev_em_counts_at_once_and_against_the_best():
    assert "dev EM 0.250" in stop_loss.tripped(run({}, dev={1: 0.2, 2: 0.5, 4: 0.25}), LIMITS)
    assert stop_loss.tripped(run({}, dev={1: 0.2, 2: 0.5, 4: 0.35}), LIMITS) is None
    assert stop_loss.best(run(dev={1: 0.2, 2: 0.5, 3: 0.5}))["step"] == 2
    assert stop_loss.best(run()) is None


def test_a_restore_starts_the_count_again():
    bad = {"searches": 0.1}
    rows = run(bad, bad, bad, dev={1: 0.5, 6: 0.1})
    rows.append({"step": 6, "restored_step": 1, "stop_loss": "searches"})
    assert stop_loss.tripped(rows, LIMITS) is None
    again = [HEALTHY | {"step": step} | bad for step in (7, 8)]
    assert stop_loss.tripped(rows + again, LIMITS) is None
    third = HEALTHY | {"step": 9} | bad
    assert stop_loss.tripped([*rows, *again, third], LIMITS).startswith("searches")
