"""The scripted teacher: plays the policy in one trajectory by following the question's plan.

It reads the prompt as a policy would (question, memory, passages), but knows which passages to
want and what the answer is. Warm-up keeps its trajectories as examples.

It errs on purpose, at the rates of `warmup`: it answers a multi-hop question after too few hops
(`early_answer`, drawn once a trajectory, with a value from the way there), loses a fact when it
rewrites the memory (`drop_fact`), searches for half a name (`wrong_search`). A policy that was
shown only perfect play has nothing to unlearn, and then nobody sees whether reinforcement works.
With `notes: passage` it keeps the whole passage in place of the fact, for memories that a cap cuts.
Draws come from the `rng` that is passed in, so a trajectory can be played again.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from memsearcher.agent.chat import Chat
from memsearcher.agent.prompts import PREFIX, WORDS
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.params import Warmup
from memsearcher.questions import key
from memsearcher.types import Question

TRIES = 2  # searches for one hop before it is given up
UNKNOWN = "unknown"
NOTE_WORDS = 40


@dataclass(frozen=True, slots=True)
class Hop:
    """`fact` is None on real data: then the note is a sentence of the passage called `title`, and
    where `title` is empty too, a sentence that holds an answer."""

    query: str
    title: str
    fact: str | None
    value: str


class ScriptedTeacher:
    """An Engine for one trajectory of `question`, which must have a plan in its metadata."""

    def __init__(self, question: Question, chat: Chat, params: Warmup, rng: random.Random) -> None:
        plan = cast("list[dict[str, str | None]]", question.metadata.get("plan") or [])
        if not plan:
            raise ValueError(f"{question.id}: the scripted teacher needs metadata['plan']")
        self._hops = [
            Hop(str(h["query"]), h["title"] or "", h["fact"], str(h.get("value") or h["title"]))
            for h in plan
        ]
        self._question, self._chat, self._params, self._rng = question, chat, params, rng
        # of a chain only the last fact answers; otherwise every hop has to be known
        self._chain = self._hops[0].fact is not None and question.metadata["type"] != "comparison"
        early = len(plan) > 1 and rng.random() < params.early_answer
        self._hops_wanted = rng.randint(1, len(plan) - 1) if early else len(plan)
        self._tag_room = len(chat.trusted("<memory> ")) + len(chat.trusted(" </memory>")) + 1
        self._tries: Counter[int] = Counter()
        self._notes: dict[int, str] = {}  # what the memory should hold, by hop

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """An action where the prompt ends in <think>, a memory where it does not."""
        text = self._chat.decode(prompt_ids).rpartition("<question>")[2]
        if text.endswith(PREFIX):
            ids = self._action(text.removesuffix(PREFIX))
        else:
            ids = self._memory(text, sampling.max_tokens)
        ids.append(self._chat.end_id)
        cut = ids[: sampling.max_tokens]
        return Completion(cut, [0.0] * len(cut), stopped=len(cut) == len(ids), weight_version=0)

    @property
    def weight_version(self) -> int:
        return 0

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineFailed("a scripted teacher has no weights")

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...

    def _action(self, text: str) -> list[int]:
        """`text`: the context from the question on."""
        memory = re.search(r"<memory>(.*?)</memory>", text, re.DOTALL)
        if memory is None:  # ReAct: what was read is still there
            self._take_notes(
                "\n".join(re.findall(r"<tool_response>(.*?)</tool_response>", text, re.S))
            )
            known = set(self._notes)
        else:
            known = {i for i, note in self._notes.items() if note in memory.group(1)}
        tail = re.split(r"</memory>|</tool_response>", text)[-1]
        last = any(words.answer_now in tail for words in WORDS.values())
        hop = self._next(known)
        early = self._hops_wanted < len(self._hops) and self._progress(known) >= self._hops_wanted
        if hop is None or last or early:
            return self._answer(known, early=early)
        self._tries[hop] += 1
        query = self._hops[hop].query
        thought = " look it up"
        if self._hops[hop].fact is not None:
            thought = f" find the {query.partition(' of ')[0]}"
        if self._rng.random() < self._params.wrong_search and " " in query:
            query = query.rpartition(" ")[0]
        call = json.dumps({"query": query}, ensure_ascii=False)
        return self._say((thought, "</think><tool_call>"), (f" {call}", "</tool_call>"))

    def _answer(self, known: set[int], *, early: bool) -> list[int]:
        """Right where the memory bears it out; it never shows how to guess."""
        golds = self._question.golds
        enough = max(known, default=-1) == len(self._hops) - 1 if self._chain else False
        if enough or len(known) == len(self._hops):
            answer = golds[0]
        elif early and known:
            answer = self._hops[max(known)].value
        else:
            held = [g for g in golds if any(_holds(self._notes[i], g) for i in known)]
            answer = held[0] if held else UNKNOWN
        return self._say((" done", "</think>\\boxed{"), (f" {answer}", " }"))

    def _next(self, known: set[int]) -> int | None:
        """The hop to search for; None where nothing is left that is worth it."""
        first = max(known, default=-1) + 1 if self._chain else 0
        ahead = [i for i in range(first, len(self._hops)) if i not in known]
        if self._chain:
            ahead = ahead[:1]
        return next((i for i in ahead if self._tries[i] < TRIES), None)

    def _progress(self, known: set[int]) -> int:
        return max(known, default=-1) + 1 if self._chain else len(known)

    def _memory(self, text: str, max_tokens: int) -> list[int]:
        before = re.search(r"<memory>(.*?)</memory>", text, re.DOTALL)
        held = before.group(1) if before else ""
        self._notes = {i: note for i, note in self._notes.items() if note in held}
        self._take_notes(text.rpartition("<tool_response>")[2].rpartition("</tool_response>")[0])
        if self._notes and self._rng.random() < self._params.drop_fact:
            del self._notes[self._rng.choice(sorted(self._notes))]
        self._trim(max_tokens - self._tag_room)
        return self._say(("", "<memory>"), (self._written(), "</memory>"))

    def _written(self) -> str:
        return "".join(f" {self._notes[i]}" for i in sorted(self._notes))

    def _trim(self, limit: int) -> None:
        """Facts go whole, the oldest first; sentences lose words, the longest first."""
        while self._notes and len(self._chat.plain(self._written())) > limit:
            i = min(self._notes)
            if self._hops[i].fact is None:
                i = max(self._notes, key=lambda n: len(self._notes[n]))
                shorter = self._notes[i].rpartition(" ")[0]
                if shorter:
                    self._notes[i] = shorter
                    continue
            del self._notes[i]

    def _take_notes(self, observation: str) -> None:
        passages = re.split(r"(?:^|\s)\[\d+\] ", observation)
        for i, hop in enumerate(self._hops):
            # in a chain a later hop means nothing before the earlier one is known
            reach = max(self._notes, default=-1) + 1 if self._chain else len(self._hops)
            if i in self._notes or i > reach:
                continue
            note = self._fact(hop, passages) if hop.fact else self._sentence(hop, passages)
            if note is not None:
                self._notes[i] = note

    def _fact(self, hop: Hop, passages: list[str]) -> str | None:
        words = set(re.findall(r"\w+", hop.fact or ""))
        for passage in passages:
            if _titled(passage, hop.title) and words.issubset(re.findall(r"\w+", passage)):
                if self._params.notes == "fact":
                    return hop.fact
                return passage[len(hop.title) :].strip(" :\n")
        return None

    def _sentence(self, hop: Hop, passages: list[str]) -> str | None:
        """One that holds an answer before one that names the title before the first there is."""
        best: tuple[int, str] | None = None
        for passage in passages:
            if hop.title and not _titled(passage, hop.title):
                continue
            text = " ".join(passage[len(hop.title) :].lstrip(" :\n").split())
            if hop.title and text.startswith(f"{hop.title} {hop.title}"):  # as first chunks do
                text = text[len(hop.title) + 1 :]
            for sentence in re.split(r"(?<=[.!?])\s+", text):
                answers = any(_holds(sentence, gold) for gold in self._question.golds)
                rank = 2 * answers + (bool(hop.title) and hop.title in sentence)
                if (hop.title or answers) and (best is None or rank > best[0]):
                    best = rank, sentence
        if best is None:
            return None
        sentence = " ".join(best[1].split()[:NOTE_WORDS])
        return f"{hop.title}: {sentence}" if hop.title else sentence

    def _say(self, *pieces: tuple[str, str]) -> list[int]:
        """Token ids of pairs: somebody else's words, then our own with control tokens."""
        ids: list[int] = []
        for plain, trusted in pieces:
            ids += self._chat.plain(plain) + self._chat.trusted(trusted)
        return ids


def _titled(passage: str, title: str) -> bool:
    return passage.startswith((f"{title} :", f"{title}\n"))


def _holds(text: str, gold: str) -> bool:
    return bool(key(gold)) and f" {key(gold)} " in f" {key(text)} "
