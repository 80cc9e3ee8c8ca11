"""Plotly figures as plain data: traces and layout. Fonts and grids are the page's own, since they
follow light and dark. A figure that has nothing to show is not made."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from statistics import fmean

from memsearcher.published import COLUMNS, LABELS
from memsearcher.report import ablation
from memsearcher.report.collect import Collected, Curve, Evaluated
from memsearcher.report.figure import COLOURS, Figure, Plot, colours

MISTAKES = {  # in the order in which things go wrong
    "right": "right",
    "not_answered": "in memory, not answered",
    "not_kept": "retrieved, not in memory",
    "not_retrieved": "not retrieved",
    "unknown": "cannot tell",
}
STOPS = {
    "answered": "answered",
    "max_turns": "out of turns",
    "no_action": "no action",
    "bad_tool_call": "bad tool call",
    "no_memory": "no memory",
    "overlong": "too long",
}
CURVES = {  # what people look at, in this order; a name that ends in * stands for all it begins
    "Reward and its parts": ("reward", "em", "f1", "format"),
    "EM on dev": ("dev_em",),
    "KL to the reference": ("kl",),
    "Entropy": ("entropy",),
    "Turns and searches": ("turns", "searches"),
    "Context tokens by turn": ("context_tokens_turn_*", "context_tokens_max"),
    "Sampled and memory tokens": ("response_tokens", "memory_tokens"),
    "Memories cut at the cap": ("memory_cut_rate",),
    "How trajectories end": ("stop_*",),
    "Groups without variance": ("zero_variance_share",),
    "Sampler–learner gap, |Δ log-prob|": ("sampler_gap_mean", "sampler_gap_max", "probe_gap"),
    "Clipped share": ("clip_fraction",),
    "Loss": ("loss", "nll"),
    "Gradient norm": ("grad_norm",),
    "Seconds a step": ("seconds", "seconds_rollout", "seconds_update", "seconds_logprobs"),
    "Tokens a second": ("tokens_per_s",),
}


def figures(found: Collected) -> dict[str, list[Figure]]:
    """Figures by section of the page."""
    return {
        "results": list(_em(found.policies)),
        "behaviour": [*_context(found), *_stops(found.policies)],
        "cost": list(_cost(found.policies)),
        "ablation": list(ablation.figures(found.ablation.cells)),
        "errors": list(_mistakes(found.policies)),
        "retrieval": list(_recall(found.retrieval)),
    } | {curve.name: list(_steps(curve)) for curve in found.curves}


def _em(policies: Sequence[Evaluated]) -> Iterator[Figure]:
    if not policies:
        return
    data: list[Plot] = []
    for policy, colour in zip(policies, colours(policies), strict=True):
        scores = policy.metrics["datasets"] | {"average": policy.metrics["average"]}
        keys = [key for key in (*COLUMNS, "average") if key in scores]
        em = [100 * scores[key]["em"] for key in keys]
        low, high = zip(*(scores[key]["em_interval"] for key in keys), strict=True)
        error: Plot = {"type": "data", "symmetric": False, "thickness": 1.4, "width": 4}
        error["array"] = [100 * h - e for h, e in zip(high, em, strict=True)]
        error["arrayminus"] = [e - 100 * v for v, e in zip(low, em, strict=True)]
        bars: Plot = {"type": "bar", "name": policy.name, "y": em, "error_y": error}
        bars |= {"x": [LABELS.get(key, key) for key in keys], "marker": {"color": colour}}
        data.append(bars)
    layout: Plot = {"yaxis": {"title": "EM × 100", "rangemode": "tozero"}, "barmode": "group"}
    yield Figure("em", "Exact match with 95% intervals", data, layout)


def _steps(curve: Curve) -> Iterator[Figure]:
    """One small figure per group of CURVES that the journal holds."""
    keys = dict.fromkeys(key for row in curve.rows for key, v in row.items() if _finite(v))
    for number, (title, names) in enumerate(CURVES.items()):
        chosen = [key for name in names for key in keys if fnmatchcase(key, name)]
        chosen = [key for key in chosen if any(row.get(key) for row in curve.rows)]
        data: list[Plot] = []
        for key, colour in zip(chosen, colours(chosen), strict=True):
            rows = [row for row in curve.rows if _finite(row.get(key))]
            line: Plot = {"type": "scatter", "name": _short(key), "y": [row[key] for row in rows]}
            line |= {"x": [row["step"] for row in rows], "line": {"color": colour, "width": 1.6}}
            line |= {"mode": "lines" if len(rows) > 12 else "lines+markers"}
            data.append(line)
        if data:
            layout: Plot = {"xaxis": {"title": "step"}, "showlegend": len(data) > 1}
            layout["yaxis"] = {"rangemode": "tozero"} if len(data) > 1 else {}
            id = "-".join(filter(None, (curve.stage, curve.agent, curve.phase, str(number))))
            yield Figure(id, title, data, layout, small=True)


def _short(key: str) -> str:
    """A legend's room is small: the figure's title says the rest."""
    for prefix in ("context_tokens_", "stop_", "seconds_", "sampler_"):
        key = key.removeprefix(prefix)
    return key.replace("_", " ")


def _context(found: Collected) -> Iterator[Figure]:
    if not found.policies:
        return
    data: list[Plot] = []
    longest = 1
    for policy, colour in zip(found.policies, colours(found.policies), strict=True):
        turns = policy.metrics["behaviour"]["context_tokens_by_turn"]
        longest = max(longest, len(turns))
        common: Plot = {"type": "scatter", "x": [t["turn"] for t in turns]}
        mean: Plot = {"mode": "lines+markers", "name": policy.name, "line": {"color": colour}}
        mean |= {"y": [t["mean"] for t in turns], "text": [f"{t['n']} trajectories" for t in turns]}
        top: Plot = {"mode": "lines", "name": f"{policy.name}, longest", "showlegend": False}
        top |= {
            "y": [t["max"] for t in turns],
            "line": {"color": colour, "dash": "dot", "width": 1},
        }
        data += [common | mean, common | top]
    cap = found.params.agent.max_context_tokens
    limit: Plot = {"type": "scatter", "mode": "lines", "name": "limit (agent.max_context_tokens)"}
    limit |= {"x": [1, longest], "y": [cap, cap], "line": {"color": "#888888", "dash": "dash"}}
    layout: Plot = {"xaxis": {"title": "turn", "dtick": 1 if longest < 12 else None}}
    layout["yaxis"] = {"title": "tokens in the context", "rangemode": "tozero"}
    title = "Context tokens by turn: the mean, dotted the longest"
    yield Figure("context", title, [*data, limit], layout)


COSTS = {
    "tokens": "Tokens of all contexts of a trajectory",
    "flops": "Estimated FLOPs of a trajectory",
    "seconds": "Seconds of a trajectory",
}


def _cost(policies: Sequence[Evaluated]) -> Iterator[Figure]:
    """By the trajectory's turns: a straight line for a bounded memory, a parabola for a history
    that grows (counted without a prefix cache)."""
    if not policies:
        return
    longest = max((row["turns"] for p in policies for row in _costs(p)), default=1)
    for key, title in COSTS.items():
        data: list[Plot] = []
        for policy, colour in zip(policies, colours(policies), strict=True):
            rows = [row for row in _costs(policy) if row["turns"]]
            line: Plot = {"type": "scatter", "mode": "lines+markers", "name": policy.name}
            line |= {"x": [row["turns"] for row in rows], "y": [row[key] for row in rows]}
            line |= {"text": [f"{row['n']} trajectories" for row in rows]}
            data.append(line | {"line": {"color": colour}})
        layout: Plot = {"xaxis": {"title": "turns", "dtick": 1 if longest < 12 else None}}
        layout |= {"yaxis": {"rangemode": "tozero", "exponentformat": "SI"}, "height": 290}
        yield Figure(f"cost-{key}", title, data, layout, small=True)


def _costs(policy: Evaluated) -> list[dict]:
    return policy.metrics["behaviour"]["cost_by_turns"]


def _stops(policies: Sequence[Evaluated]) -> Iterator[Figure]:
    counts = {p.name: p.metrics["behaviour"]["stops"] for p in policies}
    colours = (COLOURS[2], COLOURS[4], COLOURS[5], COLOURS[1], COLOURS[3], COLOURS[6])
    yield from _shares("stops", "How trajectories end", counts, STOPS, colours)


def _mistakes(policies: Sequence[Evaluated]) -> Iterator[Figure]:
    counts = {}
    for policy in policies:
        wrong = policy.metrics["behaviour"]["mistakes"]
        counts[policy.name] = {"right": policy.metrics["count"] - sum(wrong.values())} | wrong
    colours = (COLOURS[2], COLOURS[4], COLOURS[1], COLOURS[6], COLOURS[5])
    yield from _shares("mistakes", "Where wrong answers come from", counts, MISTAKES, colours)


def _shares(
    id: str,
    title: str,
    counts: Mapping[str, Mapping[str, int]],
    names: Mapping[str, str],
    colours: Sequence[str],
) -> Iterator[Figure]:
    """Stacked bars, one per policy, that add up to 100%."""
    if not counts:
        return
    data: list[Plot] = []
    for (key, label), colour in zip(names.items(), colours, strict=True):
        if not any(row.get(key) for row in counts.values()):
            continue
        x = [100 * row.get(key, 0) / max(1, sum(row.values())) for row in counts.values()]
        text = [str(row.get(key, "")) for row in counts.values()]
        trace: Plot = {"type": "bar", "orientation": "h", "name": label, "x": x, "y": list(counts)}
        trace |= {"marker": {"color": colour}, "text": text, "textposition": "inside"}
        trace["hovertemplate"] = "%{y}: %{text} (%{x:.1f}%)"
        data.append(trace)
    layout: Plot = {"barmode": "stack", "xaxis": {"title": "% of questions", "range": [0, 100]}}
    layout |= {"yaxis": {"autorange": "reversed"}, "height": 150 + 44 * len(counts)}
    yield Figure(id, title, data, layout)


def _recall(retrieval: Mapping[str, Mapping[str, Mapping[str, dict]]]) -> Iterator[Figure]:
    """Mean over the data sets that were judged, by k, a line per mode."""
    for measure, title in (("recall", "Recall by k"), ("answer", "Answer in a passage, by k")):
        data: list[Plot] = []
        for (mode, by_set), colour in zip(retrieval.items(), COLOURS, strict=False):
            points: dict[int, list[float]] = {}
            for measures in by_set.values():
                for key, row in measures.items():
                    name, _, k = key.partition("@")
                    if name == measure:
                        points.setdefault(int(k), []).append(100 * row["value"])
            line: Plot = {"type": "scatter", "mode": "lines+markers", "name": mode}
            line |= {"x": sorted(points), "line": {"color": colour}}
            data.append(line | {"y": [fmean(points[k]) for k in sorted(points)]})
        if any(line["x"] for line in data):
            layout: Plot = {"xaxis": {"title": "k"}, "yaxis": {"range": [0, 102]}, "height": 240}
            yield Figure(measure, f"{title}, × 100, mean over the data sets", data, layout, True)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
