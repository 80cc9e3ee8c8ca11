"""One question, live in a terminal: what the policy thinks, finds and keeps, turn by turn."""

import asyncio
from pathlib import Path
from typing import TypedDict, cast

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from memsearcher import transcripts
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Found
from memsearcher.engine.contract import EngineFailed, Sampling
from memsearcher.engine.factory import open_engine
from memsearcher.files import BadInput
from memsearcher.params import Params
from memsearcher.policy import policy_folder
from memsearcher.retrieval.contract import Retriever, RetrieverDown
from memsearcher.retrieval.factory import open_retriever
from memsearcher.rollout import make_agent
from memsearcher.types import Question, StopReason, Trajectory, Turn

BROKEN = (EngineFailed, RetrieverDown)  # what may go wrong that is nobody's input
SHOWN_CHARS = 160  # of a passage
INDEXES = {"dense": ("index",), "bm25": ("bm25",), "fusion": ("index", "bm25")}


class _Row(TypedDict):
    """What is shown of a turn of `transcripts.readable`."""

    action: str
    bad_query: bool
    hits: list[tuple[str, float]]
    memory_after: str | None
    memory_cut: bool
    tokens: dict[str, int]
    seconds: dict[str, float]


def require(params: Params, policy: str) -> None:
    """Raises BadInput that names what has to be made before anybody can ask."""
    needed = [Path("data") / part for part in ("corpus", *INDEXES[params.search.mode])]
    if model := params.policies[policy].model:
        needed.append(Path(model))
    if missing := [str(path) for path in needed if not path.is_dir()]:
        raise BadInput(f"not there yet: {', '.join(missing)} (`make demo` makes everything)")


async def ask(
    params: Params,
    policy: str,
    question: Question,
    temperature: float,
    seed: int,
    console: Console,
) -> Trajectory:
    """One trajectory of a policy of params.yaml, shown on `console` while it is made."""
    entry = params.policies[policy]
    folder = policy_folder(params, entry.model)
    chat = Chat(folder)
    agent = make_agent(entry.agent, params, chat, evaluating=True)
    sampling = Sampling(0, temperature=temperature, constrained=params.engine.constrained_calls)
    with console.status("opening the index") as status:
        retriever = open_retriever(params)
        status.update(f"starting the {params.engine.kind} engine")
        engine = await open_engine(params, folder)
        view = _View(console, chat, retriever, question, keeps_history=entry.agent == "react")
        status.update("thinking")

        async def search(query: str) -> Found:
            status.update(f"searching: {escape(query)}")
            (hits,) = await asyncio.to_thread(retriever.search, [query], agent.k)
            status.update("reading")
            return [(hit, retriever.passage(hit.passage_id)) for hit in hits]

        def show(turn: Turn) -> None:
            view.turn(turn)
            status.update("thinking")

        try:
            return await agent.run(
                question,
                0,
                engine,
                search,
                sampling=sampling,
                max_turns=params.agent.max_turns_eval,
                seed=seed,
                on_turn=show,
            )
        finally:
            await engine.close()


class _View:
    def __init__(
        self,
        console: Console,
        chat: Chat,
        retriever: Retriever,
        question: Question,
        *,
        keeps_history: bool,
    ) -> None:
        self._console, self._chat, self._retriever = console, chat, retriever
        self._question, self._keeps_history = question, keeps_history
        self._number = 0

    def turn(self, turn: Turn) -> None:
        """A panel for a context; one for each of its turns where it holds several."""
        alone = Trajectory(self._question, 0, (turn,), StopReason.MAX_TURNS)
        rows = transcripts.readable(alone, self._said, keeps_history=self._keeps_history)["turns"]
        for row in cast("list[_Row]", rows):
            self._number += 1
            seconds, tokens = sum(row["seconds"].values()), sum(row["tokens"].values())
            self._console.print(
                Panel(
                    self._text(row),
                    title=f"turn {self._number}",
                    title_align="left",
                    subtitle=f"{tokens} tokens, {seconds:.1f} s",
                    subtitle_align="right",
                )
            )

    def _said(self, ids: list[int]) -> str:
        return self._chat.decode(ids[:-1] if ids[-1:] == [self._chat.end_id] else ids)

    def _text(self, row: _Row) -> Text:
        text = Text.assemble(("<think> ", "dim"), row["action"].strip())
        for rank, (passage_id, _) in enumerate(row["hits"], 1):
            passage = self._retriever.passage(passage_id)
            words = " ".join(passage.text.split())
            words = words if len(words) <= SHOWN_CHARS else f"{words[:SHOWN_CHARS]}…"
            text.append(f"\n{rank}. {passage.title}: ", "cyan").append(words)
        if row["bad_query"]:
            text.append("\nthe query was of no use", "yellow")
        if row["memory_after"] is not None:
            text.append("\nmemory ", "green").append(row["memory_after"])
            if row["memory_cut"]:
                text.append(" (cut)", "yellow")
        return text
