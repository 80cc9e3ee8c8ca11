"""memsearcher ask "who directed …?": one question, live, with the policies of params.yaml.
memsearcher serve: the retriever for many processes.

Heavy packages are imported once there is something to do, so that --help is quick.
"""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from memsearcher.files import ROOT, BadInput
from memsearcher.params import load
from memsearcher.types import Question

app = typer.Typer(add_completion=False, no_args_is_help=True)
tracking_app = typer.Typer(no_args_is_help=True, help="What MLflow is told.")
app.add_typer(tracking_app, name="tracking")


@app.callback()
def main() -> None:
    """A search agent that carries a bounded memory."""


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    policy: Annotated[
        str | None,
        typer.Option(help="A name under `policies` in params.yaml; the last one if none."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws, where the temperature is above 0.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for machines.")] = False,
) -> None:
    """Answers one question by searching the corpus, turn by turn before your eyes."""
    console = Console(quiet=as_json)
    os.chdir(ROOT)
    try:
        if not question.strip():
            raise BadInput("the question is empty")
        params = load()
        name = policy or list(params.policies)[-1]
        if name not in params.policies:
            raise BadInput(f"no policy {name!r} in params.yaml, only {sorted(params.policies)}")
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(params.engine.threads)
        )  # before torch reads it
        from memsearcher import live

        live.require(params, name)
        asked = Question("cli/0", "cli", question.strip(), ())
        try:
            trajectory = asyncio.run(live.ask(params, name, asked, temperature, seed, console))
        except live.BROKEN as e:
            raise _failed(e, 1) from e
    except BadInput as e:
        raise _failed(e, 2) from e
    if as_json:
        from memsearcher.rollout import to_json

        typer.echo(json.dumps(to_json(trajectory), ensure_ascii=False))
        return
    answer = trajectory.answer
    shown = "[dim]none[/]" if answer is None else f"[bold]{escape(answer)}[/]"
    tokens = max(trajectory.context_tokens)
    console.print(f"answer: {shown}   ({trajectory.stop}, longest context {tokens} tokens)")


def _failed(error: Exception, code: int) -> typer.Exit:
    line = f"memsearcher: error: {escape(str(error))}"
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    return typer.Exit(code)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="serve.host if none.")] = None,
    port: Annotated[int | None, typer.Option(help="serve.port if none; 0: a free one.")] = None,
    data: Annotated[Path, typer.Option(help="Where corpus, index and bm25 are.")] = ROOT / "data",
) -> None:
    """Serves the index that search.mode names to many processes, until SIGTERM or Ctrl-C."""
    console, data = Console(), data.absolute()
    os.chdir(ROOT)
    try:
        params = load()
        settings = replace(
            params.serve,
            host=params.serve.host if host is None else host,
            port=params.serve.port if port is None else port,
        )
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))  # before what reads it
        from memsearcher.retrieval import server
        from memsearcher.retrieval.factory import count_and_sha256, manifest_hash, open_modes

        mode = params.search.mode

        def open_index() -> server.Opened:
            served, (count, _) = manifest_hash(params, data), count_and_sha256(data)
            return server.Opened(open_modes(params, (mode,), data)[mode], count, served)

        def ready(opened: server.Opened) -> None:
            what = f"{opened.passages:,} passages, {mode}, manifest {opened.manifest_hash}"
            console.print(f"ready: {what}", highlight=False, soft_wrap=True)

        server.serve(
            open_index,
            settings,
            params.search.k,
            on_listening=lambda url: console.print(f"{url}: loading", highlight=False),
            on_ready=ready,
        )
    except BadInput as e:
        raise _failed(e, 2) from e


@tracking_app.callback()
def _tracking() -> None:
    """Keeps `replay` a word of its own, although it is the only one."""


@tracking_app.command()
def replay(
    to: Annotated[
        str | None,
        typer.Option(help="A tracking server in place of the one that each run was meant for."),
    ] = None,
) -> None:
    """Sends what no server has: journals that were kept, and the metrics.jsonl of training runs."""
    from memsearcher import tracking, uploader

    try:
        tracking.journal_results(load())
        sent, left = uploader.replay(tracking.FOLDER, to)
    except BadInput as e:
        typer.echo(f"memsearcher: error: {e}", err=True)
        raise typer.Exit(2) from e
    except Exception as e:  # whatever the server, its driver or the network says
        typer.echo(f"memsearcher: error: the server took not all: {e}", err=True)
        raise typer.Exit(1) from e
    typer.echo(f"{sent} runs are there, {left} are still being written")


if __name__ == "__main__":
    app()
