"""memsearcher ask "who directed …?": one question, live, with the policies of params.yaml.

Heavy packages are imported once there is something to do, so that --help is quick.
"""

import asyncio
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from memsearcher.files import ROOT, BadInput
from memsearcher.params import Params, load
from memsearcher.types import Question, Trajectory, Turn

if TYPE_CHECKING:
    from memsearcher.retrieval.contract import Retriever

app = typer.Typer(add_completion=False, no_args_is_help=True)
Show = Callable[[int, Turn, "Retriever"], None]


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
    from memsearcher.engine.contract import EngineFailed
    from memsearcher.retrieval.contract import RetrieverDown

    console, errors = Console(), Console(stderr=True)
    os.chdir(ROOT)
    try:
        if not question.strip():
            raise BadInput("the question is empty")
        params = load()
        name = policy or list(params.policies)[-1]
        if name not in params.policies:
            raise BadInput(f"no policy {name!r} in params.yaml, only {sorted(params.policies)}")
        os.environ.setdefault("OMP_NUM_THREADS", str(params.engine.threads))
        show: Show = _silent if as_json else _shower(console)
        asked = Question("cli/0", "cli", question.strip(), ())
        trajectory = asyncio.run(_ask(params, name, asked, temperature, seed, show))
    except (BadInput, EngineFailed, RetrieverDown) as e:
        errors.print(f"memsearcher: error: {escape(str(e))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(e, BadInput) else 1) from e
    if as_json:
        from memsearcher.rollout import to_json

        typer.echo(json.dumps(to_json(trajectory), ensure_ascii=False))
    else:
        answer = (
            "[dim]none[/]" if trajectory.answer is None else f"[bold]{escape(trajectory.answer)}[/]"
        )
        tokens = max(trajectory.context_tokens)
        console.print(f"answer: {answer}   ({trajectory.stop}, longest context {tokens} tokens)")


async def _ask(
    params: Params, name: str, question: Question, temperature: float, seed: int, show: Show
) -> Trajectory:
    from memsearcher.agent.chat import Chat
    from memsearcher.agent.contract import Found
    from memsearcher.engine.contract import Sampling
    from memsearcher.engine.factory import open_engine
    from memsearcher.policy import policy_folder
    from memsearcher.retrieval.factory import open_retriever
    from memsearcher.rollout import make_agent

    entry = params.policies[name]
    folder = policy_folder(params, entry.model)
    retriever = open_retriever(params)
    agent = make_agent(entry.agent, params, Chat(folder))
    engine = await open_engine(params, folder)

    async def search(query: str) -> Found:
        (hits,) = await asyncio.to_thread(retriever.search, [query], agent.k)
        return [(hit, retriever.passage(hit.passage_id)) for hit in hits]

    numbers = iter(range(1, params.agent.max_turns_eval + 1))
    try:
        return await agent.run(
            question,
            0,
            engine,
            search,
            sampling=Sampling(0, temperature=temperature),
            max_turns=params.agent.max_turns_eval,
            seed=seed,
            on_turn=lambda turn: show(next(numbers), turn, retriever),
        )
    finally:
        await engine.close()


def _silent(_number: int, _turn: Turn, _retriever: "Retriever") -> None:
    """--json: nothing but the object."""


def _shower(console: Console) -> Show:
    def show(number: int, turn: Turn, retriever: "Retriever") -> None:
        lines = [f"[dim]<think>[/]{escape(turn.action.strip())}"]
        for hit in turn.hits:
            passage = retriever.passage(hit.passage_id)
            text = passage.text if len(passage.text) <= 160 else f"{passage.text[:160]}…"
            lines.append(f"[cyan]{hit.rank}. {escape(passage.title)}[/] {escape(text)}")
        if turn.bad_query:
            lines.append("[yellow]the query was of no use[/]")
        if turn.memory_after is not None:
            cut = " [yellow](cut)[/]" if turn.memory_cut else ""
            lines.append(f"[green]memory[/]{cut} {escape(turn.memory_after)}")
        console.print(Panel("\n".join(lines), title=f"turn {number}", title_align="left"))

    return show


if __name__ == "__main__":
    app()
