"""A trajectory as an MLflow trace: a span per turn, in it generate, search and remember."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

Row = dict


def log(
    client: "MlflowClient",
    row: Row,
    tags: dict[str, str],
    experiment: str,
    run: str,
    ended_ms: int,
) -> None:
    """`row`: as `transcripts.readable` makes it. Its parts stand one after the other, as they ran;
    when each began is reckoned back from when the whole was written down."""
    import mlflow

    mlflow.set_tracking_uri(client.tracking_uri)  # start_trace takes the global one
    at = ended_ms * 10**6 - int(row["seconds"] * 1e9)
    root = client.start_trace(
        "trajectory",
        span_type="AGENT",
        inputs={"question": row["question"]},
        attributes={"stop": row["stop"], "golds": row["golds"]},
        tags=tags,
        experiment_id=experiment,
        start_time_ns=at,
        run_id=run,
    )
    for number, turn in enumerate(row["turns"], 1):
        at = _turn(client, root.trace_id, root.span_id, number, turn, at)
    client.end_trace(root.trace_id, {"answer": row["answer"]}, end_time_ns=at)


def _turn(client: "MlflowClient", trace: str, parent: str, number: int, turn: Row, at: int) -> int:
    """Returns when it ended."""
    tokens, before = turn["tokens"], {"memory": turn["memory_before"]}
    span = client.start_span(
        f"turn {number}", trace, parent, "CHAIN", inputs=before, start_time_ns=at
    )
    parts = [("generate", "LLM", "action", before, turn["action"], "action")]
    if turn["query"] is not None:
        hits = [{"id": hit[0], "score": hit[1]} for hit in turn["hits"]]
        asked = {"query": turn["query"]}
        parts.append(("search", "RETRIEVER", "search", asked, hits, "observation"))
    if turn["memory_after"] is not None:
        parts.append(("remember", "LLM", "memory", before, turn["memory_after"], "memory"))
    for name, kind, phase, inputs, said, counted in parts:
        counts = {"prompt_tokens": tokens["prompt"], f"{counted}_tokens": tokens[counted]}
        part = client.start_span(
            name, trace, span.span_id, kind, inputs, attributes=counts, start_time_ns=at
        )
        at += int(turn["seconds"].get(phase, 0.0) * 1e9)
        client.end_span(trace, part.span_id, {"text": said}, end_time_ns=at)
    after = {"memory": turn["memory_after"], "cut": turn["memory_cut"]}
    client.end_span(trace, span.span_id, after, {"tokens": tokens}, end_time_ns=at)
    return at
