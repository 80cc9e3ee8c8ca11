"""A teacher's trajectories on training questions: the agent's own loop, journalled one by one.

Three teachers (warmup.teacher): the scripted one, which follows a question's plan; an
OpenAI-compatible endpoint; a policy in a folder. A killed run goes on where it was, under the same
teacher: each has its own journal. What was rolled out does not depend on when or in which order.
"""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from memsearcher import files
from memsearcher.agent.chat import Chat
from memsearcher.agent.contract import Agent
from memsearcher.agent.endpoint import Endpoint, EndpointTeacher
from memsearcher.agent.taught import Taught
from memsearcher.agent.teacher import ScriptedTeacher
from memsearcher.engine.contract import Engine, Sampling
from memsearcher.engine.factory import open_engine
from memsearcher.files import BadInput
from memsearcher.params import AgentName, Params
from memsearcher.retrieval.contract import Retriever
from memsearcher.rollout import from_json, make_agent, roll_out, to_json
from memsearcher.training import Log, check_failures, draw
from memsearcher.types import Question, Trajectory


@dataclass(frozen=True, slots=True)
class Teacher:
    """`name` tells it from others; `folder` is a policy's; `endpoint` a server's."""

    name: str
    folder: Path | None = None
    endpoint: Endpoint | None = None

    @classmethod
    def of(cls, params: Params, pupil: Path, environment: Mapping[str, str]) -> "Teacher":
        """Raises BadInput where it cannot be had, or does not speak the pupil's tokens."""
        w = params.warmup
        if w.teacher == "scripted":
            return cls("scripted")
        if w.teacher == "endpoint":
            endpoint = Endpoint.of(environment)
            return cls(f"{endpoint.model} ({w.endpoint_api})", endpoint=endpoint)
        folder = Path(str(w.teacher_path)).expanduser()
        if _vocabulary(folder) != _vocabulary(pupil):
            raise BadInput(
                f"warmup.teacher_path: {folder} has another tokenizer than {pupil}, so its ids "
                "cannot be imitated; serve it and use warmup.teacher=endpoint"
            )
        return cls(f"policy {files.content_hash(folder)[:16]}", folder=folder)


def choose(questions: Sequence[Question], params: Params) -> list[Question]:
    """warmup.questions of warmup.sets by seed; for the scripted teacher of those with a plan."""
    scripted, sets = params.warmup.teacher == "scripted", params.warmup.sets
    there = {q.dataset for q in questions}
    if unknown := sorted(set(sets or ()) - there):
        raise BadInput(
            f"warmup.sets: no training question is of {unknown}, only of {sorted(there)}"
        )
    fit = [
        q
        for q in questions
        if (sets is None or q.dataset in sets) and (q.metadata.get("plan") or not scripted)
    ]
    if not fit:
        raise BadInput(
            "data/questions/train.jsonl: no question has a plan that a teacher can follow"
        )
    return draw(fit, params.seed, 0, min(params.warmup.questions, len(fit)))


async def teach(
    teacher: Teacher,
    agent_name: AgentName,
    params: Params,
    chat: Chat,
    questions: Sequence[Question],
    retriever: Callable[[], Retriever],
    work: Path,
    on_done: Callable[[int, int], None],
    say: Callable[[str], None],
) -> list[Trajectory]:
    """warmup.samples of each question, in order. `work`: where the journal is; `retriever` is
    opened only where something is left to do; `on_done` is told how many are done, of how many.

    Raises TooManyFailures at the first trajectory whose machinery broke for good."""
    w = params.warmup
    wanted = [(q, member) for q in questions for member in range(w.samples)]
    slug = "" if teacher.name == "scripted" else f"-{files.digest(teacher.name)}"
    path = work / f"teacher{slug}.jsonl"
    _without_half_line(path)
    journal = Log(path, 0)
    made = {row["id"]: from_json(row) for row in journal.rows()}
    missing = [(q, member) for q, member in wanted if f"{q.id}#{member}" not in made]

    def done(trajectory: Trajectory) -> None:
        check_failures([trajectory], 0.0)
        made[trajectory.id] = trajectory
        journal.add({"step": 0} | to_json(trajectory, tokens=True))
        on_done(len(made), len(wanted))

    async def play(agent: Agent, engine: Engine, *, deterministic: bool) -> None:
        await roll_out(
            agent,
            missing,
            engine,
            retriever(),
            sampling=Sampling(params.agent.max_action_tokens, temperature=w.temperature),
            max_turns=params.agent.max_turns_train,
            seed=params.seed,
            concurrency=w.concurrency,
            in_flight=params.search.in_flight,
            patience_s=params.search.patience_s,
            on_done=done,
            deterministic=deterministic,
        )

    def scripted(question: Question, member: int) -> ScriptedTeacher:
        again = f" {member}" if member else ""
        rng = random.Random(f"teacher {params.seed} {question.id}{again}")
        return ScriptedTeacher(question, chat, w, rng)

    agent = make_agent(agent_name, params, chat)
    if missing and w.teacher == "scripted":
        nobody = scripted(*missing[0])  # never asked: every trajectory has its own
        await play(Taught(agent, scripted), nobody, deterministic=True)
    elif missing:
        async with _opened(teacher, params, chat, say) as engine:
            at_once = teacher.folder is not None and params.engine.kind == "inprocess"
            await play(agent, engine, deterministic=at_once)
    return [made[f"{q.id}#{member}"] for q, member in wanted]


@asynccontextmanager
async def _opened(
    teacher: Teacher, params: Params, chat: Chat, say: Callable[[str], None]
) -> AsyncIterator[Engine]:
    if teacher.folder is not None:
        engine = await open_engine(params, teacher.folder)
    else:
        assert teacher.endpoint is not None
        w = params.warmup
        engine = EndpointTeacher(teacher.endpoint, chat, w.endpoint_api, w.concurrency)
    try:
        yield engine
    finally:
        await engine.close()
        if isinstance(engine, EndpointTeacher):
            say(f"endpoint: {dict(engine.counts)}")


def _vocabulary(folder: Path) -> object:
    spec = files.read_json(folder / "tokenizer.json")
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    return spec["model"].get("vocab"), spec["model"].get("merges"), added


def _without_half_line(path: Path) -> None:
    """What a killed process had begun to write."""
    if path.is_file():
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with files.atomic_write(path, "wb") as f:
                f.write(whole)
