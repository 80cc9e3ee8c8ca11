"""Is the run collapsing? Read from its journal alone, so a resumed run decides as it would have.

What it looks like (seen on the demo's kind of policy at a learning rate of 1e-3): within 20 steps
the policy answers at once, wrongly, for the 0.1 of a well-formed answer; reward goes up meanwhile,
searches and response length go to their least.
"""

from collections.abc import Sequence
from statistics import fmean

from memsearcher.params import StopLoss

RESTORES = 2  # by action "restore"; then the run stops
RESTORED_LR = 0.5  # of the learning rate, at each restore: the same rate would collapse again


def best(records: Sequence[dict]) -> dict | None:
    """The first record with the highest dev EM; None where dev was never asked."""
    return max((r for r in records if "dev_em" in r), key=lambda r: r["dev_em"], default=None)


def restores(records: Sequence[dict]) -> list[dict]:
    return [r for r in records if "restored_step" in r]


def tripped(records: Sequence[dict], limits: StopLoss) -> str | None:
    """What went past its limit, in words, or None. Counts from the last restore on."""
    if limits.action == "off":
        return None
    since = max((r["step"] for r in restores(records)), default=-1)
    top, last = best(records), [r for r in records if "dev_em" in r and r["step"] > since][-1:]
    if limits.dev_em_drop is not None and top is not None and last:
        now = last[0]["dev_em"]
        if now < top["dev_em"] - limits.dev_em_drop:
            return f"dev EM {now:.3f} is {limits.dev_em_drop} below {top['dev_em']:.3f}"
    steps = [r for r in records if "reward" in r]
    first, later = steps[: limits.baseline_steps], steps[limits.baseline_steps :]
    recent = [r for r in later if r["step"] > since][-limits.patience :]
    for name, low, high in (
        ("kl", None, limits.max_kl),
        ("entropy", _of(first, "entropy", limits.min_entropy_share), None),
        ("format", _of(first, "format", limits.min_format_share), None),
        (
            "response_tokens",
            _of(first, "response_tokens", limits.min_response_share),
            _of(first, "response_tokens", limits.max_response_share),
        ),
        ("searches", _of(first, "searches", limits.min_search_share), None),
    ):
        values = [r[name] for r in recent if name in r]
        for side, limit in (("below", low), ("above", high)):
            past = [limit is not None and (v - limit) * _SIGN[side] > 0 for v in values]
            if len(past) == limits.patience and all(past):
                return f"{name} {values[-1]:.4g} is {side} {limit:.4g}, {len(past)} steps in a row"
    return None


_SIGN = {"below": -1, "above": 1}


def _of(records: Sequence[dict], name: str, share: float | None) -> float | None:
    values = [r[name] for r in records if name in r]
    return share * fmean(values) if share is not None and values else None
