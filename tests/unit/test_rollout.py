import asyncio
import json
import selectors
import threading
import time
from collections.abc import Sequence

import pytest
from conftest import FixtureRetriever, ScriptedEngine

from memsearcher.agent.chat import Chat
from memsearcher.agent.memsearcher import MemSearcher
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.learner.collate import rows
from memsearcher.params import Agent as AgentParams
from memsearcher.retrieval.contract import RetrieverDown
from memsearcher.rollout import UNKNOWN_ID, from_json, roll_out, to_json
from memsearcher.training import TooManyFailures, check_failures
from memsearcher.types import Hit, Question, StopReason, Trajectory

CALL = ' </think> <tool_call> {"query": "mayor of Marel"} </tool_call>'
QUESTIONS = [Question(f"nq/{i}", "nq", f"question {i}", ("Ida Quent",)) for i in range(4)]
JOBS = [(question, member) for question in QUESTIONS for member in range(3)]


def _policy(chat: Chat) -> ScriptedEngine:
    """Searches once, remembers, answers; what to do is read off the prompt."""

    def say(prompt: list[int]) -> str:
        text = chat.decode(prompt)
        if not text.endswith("<think>"):
            return "<memory> Ida Quent </memory>"
        return r" </think> \boxed{Ida Quent}" if "Ida" in text else CALL

    return ScriptedEngine(chat, say)


def _roll(
    agent: MemSearcher, engine: ScriptedEngine, retriever: FixtureRetriever, **more: object
) -> list[Trajectory]:
    options = {"concurrency": 8, "max_turns": 4, "seed": 1} | more
    return asyncio.run(
        roll_out(agent, JOBS, engine, retriever, sampling=Sampling(0), **options)  # type: ignore[arg-type]
    )


@pytest.fixture
def agent(chat: Chat, agent_params: AgentParams) -> MemSearcher:
    return MemSearcher(agent_params, chat, 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_trajectories_come_in_the_order_of_the_jobs(
    chat: Chat, agent: MemSearcher, retriever: FixtureRetriever, deterministic: bool
) -> None:
    seen: list[str] = []
    done = _roll(
        agent,
        _policy(chat),
        retriever,
        on_done=lambda t: seen.append(t.id),
        deterministic=deterministic,
    )
    assert [t.id for t in done] == [f"{q.id}#{m}" for q, m in JOBS]
    assert sorted(seen) == sorted(t.id for t in done)
    assert {t.stop for t in done} == {StopReason.ANSWERED}
    assert len(retriever.batches) < len(JOBS)  # searches went together
    assert {len(batch) for batch in retriever.batches} == {1}  # all for the same, asked once


def test_a_retriever_that_is_down_fails_its_trajectories_alone(
    chat: Chat, agent: MemSearcher
) -> None:
    """C9: the cause is on the trajectory, and no word of it in anything trained on."""

    class Flaky(FixtureRetriever):
        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            if len(self.batches) == 0:
                self.batches.append([])
                raise RetrieverDown("connection refused")
            return super().search(queries, k)

    done = _roll(agent, _policy(chat), Flaky(), patience_s=0)
    failed = [t for t in done if t.stop is StopReason.INFRA_FAILED]
    assert 0 < len(failed) < len(done)
    (cause,) = {t.failure for t in failed}
    assert cause.endswith("in 1 calls over 0 s: RetrieverDown: connection refused")
    assert all(t.turns == () for t in failed)
    trained = [chat.decode(turn.response_ids) for t in done for turn in t.turns]
    assert not any("refused" in text for text in trained)


class Jumping(selectors.DefaultSelector):
    """Instead of waiting for a timer it turns the clock forward."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        self.now += timeout or 0.0
        return super().select(timeout if timeout is None else 0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Jumping()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


class Outage(FixtureRetriever):
    """Refuses connections from second 2 on, for `seconds` of the loop's time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.until, self.refused = 2.0 + seconds, 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if 2.0 <= asyncio.get_running_loop().time() < self.until:
            self.refused += 1
            raise ConnectionRefusedError(111, "Connection refused")
        return super().search(queries, k)


def _roll_through(
    chat: Chat, agent: MemSearcher, outage: Outage, rest_s: float = 1.0
) -> tuple[list[Trajectory], float]:
    """Rolled out on a simulated clock, each message taking up to `rest_s` × 4; the end's time."""

    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            await asyncio.sleep(rest_s * (1 + len(self.prompts) % 4))
            return await super().generate(prompt_ids, sampling)

    engine = Slow(chat, _policy(chat)._script)
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        done = runner.run(
            roll_out(
                *(agent, JOBS, engine, outage),
                sampling=Sampling(0),
                max_turns=4,
                seed=1,
                concurrency=3,
                deterministic=True,
            )
        )
        return done, runner.get_loop().time()


def _grep(chat: Chat, done: list[Trajectory], word: str) -> bool:
    """Whether `word` stands anywhere in dumped rollouts but in the field `failure`, or in anything
    that the learner would be given."""
    dumped = [json.dumps(to_json(t, tokens=True) | {"failure": None}) for t in done]
    trained = [chat.decode(row.ids) for row in rows(done, [1.0] * len(done))]
    assert not any(t.turns for t in done if t.failure)
    return any(word in text.lower() for text in dumped + trained)


def test_an_outage_of_half_a_minute_is_waited_out(chat: Chat, agent: MemSearcher) -> None:
    outage = Outage(30)
    done, ended = _roll_through(chat, agent, outage)
    assert {t.stop for t in done} == {StopReason.ANSWERED}
    assert outage.batches, "nothing was searched before or after"
    assert 3 <= outage.refused <= 20  # pauses grow
    assert ended > 32
    assert not _grep(chat, done, "refused")


def test_an_outage_of_a_whole_step_ends_the_run_with_its_cause(
    chat: Chat, agent: MemSearcher
) -> None:
    """C9. What had searched before the outage is whole; nothing of the outage is in it."""
    outage = Outage(1e9)
    done, ended = _roll_through(chat, agent, outage)
    failed = [t for t in done if t.stop is StopReason.INFRA_FAILED]
    assert 0 < len(done) - len(failed) < 6
    assert all(
        "ConnectionRefusedError: [Errno 111] Connection refused" in t.failure for t in failed
    )
    assert 62 < ended < 6 * 75  # patience, three at a time
    assert not _grep(chat, done, "refused")
    assert len(rows(done, [1.0] * len(done))) == 2 * (len(done) - len(failed))
    with pytest.raises(TooManyFailures, match=r"of 12 trajectories failed, .* Connection refused"):
        check_failures(done, 0.2)


def test_calls_to_the_retriever_overlap_up_to_the_limit(chat: Chat, agent: MemSearcher) -> None:
    """Four calls meet inside the retriever, which a fifth would not join."""
    meet = threading.Barrier(4, timeout=30)

    class Meeting(FixtureRetriever):
        out = most = 0

        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            found = super().search(queries, k)
            self.out += 1
            self.most = max(self.most, self.out)
            meet.wait()
            self.out -= 1
            return found

    retriever = Meeting()

    class InTurn(ScriptedEngine):
        """The n-th question is spoken about once n calls are out, so that each gets its own."""

        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            text = chat.decode(prompt_ids)
            number = next(i for i in range(8) if f"question {i}" in text)
            while len(retriever.batches) < number:
                await asyncio.sleep(0.001)
            return await super().generate(prompt_ids, sampling)

    questions = [Question(f"nq/{i}", "nq", f"question {i}", ("x",)) for i in range(8)]
    done = asyncio.run(
        roll_out(
            *(agent, [(q, 0) for q in questions], InTurn(chat, _policy(chat)._script), retriever),
            sampling=Sampling(0),
            max_turns=4,
            seed=1,
            concurrency=8,
            in_flight=4,
        )
    )
    assert {t.stop for t in done} == {StopReason.ANSWERED}
    assert retriever.most == 4


def test_an_engine_that_fails_is_no_model_s_fault(
    chat: Chat, agent: MemSearcher, retriever: FixtureRetriever
) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            raise EngineFailed("worker died")

    done = _roll(agent, Broken(chat, []), retriever)
    assert {(t.stop, t.failure) for t in done} == {
        (StopReason.INFRA_FAILED, "EngineFailed: worker died")
    }


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fault_of_ours_ends_everything(
    chat: Chat, agent: MemSearcher, deterministic: bool
) -> None:
    class Wrong(FixtureRetriever):
        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        _roll(agent, _policy(chat), Wrong(), deterministic=deterministic)


def test_generation_goes_on_while_others_search(chat: Chat, agent: MemSearcher) -> None:
    """Nobody waits for a slow search but who asked: the first trajectories end while it runs."""
    release = threading.Event()

    class Slow(FixtureRetriever):
        def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
            assert release.wait(10)
            return super().search(queries, k)

    def say(prompt: list[int]) -> str:
        text = chat.decode(prompt)
        if not text.endswith("<think>"):
            return "<memory> m </memory>"
        return (
            CALL if "question 0" in text and "m </memory>" not in text else r" </think> \boxed{a}"
        )

    ended: list[str] = []

    def on_done(trajectory: Trajectory) -> None:
        ended.append(trajectory.id)
        if len(ended) == 9:
            release.set()

    _roll(agent, ScriptedEngine(chat, say), Slow(), on_done=on_done, concurrency=12)
    assert not any(name.startswith("nq/0") for name in ended[:9])
    assert len(ended) == 12


def test_concurrency_is_a_limit(
    chat: Chat, agent: MemSearcher, retriever: FixtureRetriever
) -> None:
    busy = most = 0

    class Counting(ScriptedEngine):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            try:
                await asyncio.sleep(0.001)
                return await super().generate(prompt_ids, sampling)
            finally:
                busy -= 1

    _roll(agent, Counting(chat, _policy(chat)._script), retriever, concurrency=5)
    assert most == 5


def test_rows_can_be_read_back(chat: Chat, agent: MemSearcher, retriever: FixtureRetriever) -> None:
    trajectory = _roll(agent, _policy(chat), retriever)[0]
    full = json.loads(json.dumps(to_json(trajectory, tokens=True)))
    assert from_json(full) == trajectory
    row = json.loads(json.dumps(to_json(trajectory)))
    assert "prompt_ids" not in row["turns"][0]
    assert row["turns"][0]["query"] == "mayor of Marel"
    light = from_json(row)
    assert light.context_tokens == trajectory.context_tokens
    assert set(light.turns[0].prompt_ids) == {UNKNOWN_ID}
    assert (light.turns[0].hits, light.stop) == (trajectory.turns[0].hits, trajectory.stop)


def test_no_jobs_no_trajectories(
    chat: Chat, agent: MemSearcher, retriever: FixtureRetriever
) -> None:
    started = time.monotonic()
    assert (
        asyncio.run(
            roll_out(
                agent,
                [],
                _policy(chat),
                retriever,
                sampling=Sampling(0),
                max_turns=2,
                seed=0,
                concurrency=4,
            )
        )
        == []
    )
    assert time.monotonic() - started < 1
