"""Questions about the demo world: seven benchmarks with the hop structure of the real seven.

Rows have FlashRAG's shape and some of its quirks.
`metadata["plan"]` lists the hops: what to search, which title holds it, the short fact to keep.
Queries start with the relation ("director of Silent Harbor"), questions end in the deepest one, so
that a small policy can copy its first query from the end of the question.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from memsearcher.files import BadInput
from memsearcher.world import VALUE_KIND, Entity, Side, World

Row = dict[str, object]
ATTEMPTS = 200  # per question, before the world counts as too small


@dataclass(frozen=True, slots=True)
class Draft:
    question: str
    golds: list[str]
    hops: list[tuple[Entity, str]]
    kind: str
    extra: dict[str, object]


class _Author:
    """Draws questions about one side of the world and never the same one twice."""

    def __init__(self, world: World, side: Side, rng: random.Random) -> None:
        self.entities = [e for e in world.entities if e.side == side]
        self.rng = rng
        self.asked: set[str] = set()

    def rows(self, dataset: str, split: str, count: int) -> list[Row]:
        rows: list[Row] = []
        for i in range(count):
            for _ in range(ATTEMPTS):
                draft = FORMS[dataset](self, i)
                if draft is not None and draft.question.casefold().rstrip("?") not in self.asked:
                    break
            else:
                raise BadInput(
                    f"world: no {count} different {split} questions for {dataset} in "
                    f"{len(self.entities)} entities (got {i}); raise world.passages"
                )
            self.asked.add(draft.question.casefold().rstrip("?"))
            rows.append(_row(f"{split}_{i}", draft))
        return rows

    def chain(self, hops: int) -> list[tuple[Entity, str]] | None:
        """(entity, relation) pairs; each relation but the last leads to the next entity."""
        e, out = self.rng.choice(self.entities), []
        for left in range(hops, 0, -1):
            options = list(e.facts) if left == 1 else list(e.links)
            relation = self.rng.choice(options)
            out.append((e, relation))
            if left > 1:
                e = e.links[relation]
        met = [entity.title for entity, _ in out]
        return out if len(set(met)) == len(met) else None

    def chained(self, hops: int, opener: str | None = None, mark: str = "?") -> Draft | None:
        chain = self.chain(hops)
        if chain is None:
            return None
        e, relation = chain[-1]
        asks = "Who" if VALUE_KIND[relation] == "person" else "What"
        path = " of ".join(f"the {r}" for _, r in reversed(chain))
        text = f"{opener or f'{asks} is'} {path} of {chain[0][0].title}{mark}"
        return Draft(text, [e.facts[relation]], chain, "bridge" if hops > 1 else "factoid", {})

    def pair(self, same: bool) -> tuple[Entity, Entity, str]:
        """Two entities of one kind and a relation that both have, with one value or two."""
        while True:
            a = self.rng.choice(self.entities)
            relation = self.rng.choice(list(a.facts))
            others = [
                e
                for e in self.entities
                if e is not a
                and e.kind == a.kind
                and relation in e.facts
                and (e.facts[relation] == a.facts[relation]) == same
            ]
            if others:
                return a, self.rng.choice(others), relation

    def yes_no(self, i: int) -> Draft:
        same = i % 2 == 0
        a, b, relation = self.pair(same)
        text = f"Is the {relation} of {a.title} the {relation} of {b.title}?"
        return Draft(
            text, ["yes" if same else "no"], [(a, relation), (b, relation)], "comparison", {}
        )

    def choice(self) -> Draft:
        a, b, relation = self.pair(same=False)
        right = self.rng.choice((a, b))
        text = f"Which has the {relation} {right.facts[relation]}, {a.title} or {b.title}?"
        return Draft(text, [right.title], [(a, relation), (b, relation)], "comparison", {})


def _nq(a: _Author, i: int) -> Draft | None:
    """Every other one in lower case with no question mark, as in the real set. Not all: a policy
    would take the mark for a sign of two hops, and search twice on TriviaQA and PopQA."""
    d = a.chained(1, mark="" if i % 2 == 0 else "?")
    if i % 2:
        return d
    return d and Draft(d.question[0].lower() + d.question[1:], d.golds, d.hops, d.kind, d.extra)


def _triviaqa(a: _Author, i: int) -> Draft | None:
    """Several accepted answers: "Marel Tovin", "Tovin", "Tovin, Marel"; "town of Zizby"."""
    d = a.chained(1)
    if d is None:
        return None
    value, kind = d.golds[0], VALUE_KIND[d.hops[0][1]]
    more = [f"{kind} of {value}"]
    if kind == "person":
        first, last = value.split()
        more = [last, f"{last}, {first}"]
    return Draft(d.question, [value, *more], d.hops, d.kind, d.extra)


def _popqa(a: _Author, i: int) -> Draft | None:
    """About entities that at most one other passage mentions."""
    d = a.chained(1, opener="What is")
    if d is None or d.hops[0][0].mentions > 1:
        return None
    e, relation = d.hops[0]
    extra: dict[str, object] = {"subj": e.title, "prop": relation, "obj": e.facts[relation]}
    extra |= {"s_aliases": "[]", "o_aliases": "[]", "s_pop": e.mentions}
    return Draft(d.question, d.golds, d.hops, d.kind, extra)


def _hotpotqa(a: _Author, i: int) -> Draft | None:
    """70% bridge, 20% yes/no, 10% either-or."""
    if i % 10 < 7:
        return a.chained(2)
    return a.yes_no(i) if i % 10 < 9 else a.choice()


def _2wiki(a: _Author, i: int) -> Draft | None:
    """Half comparisons (yes/no and either-or), half compositional."""
    if i % 2 == 0:
        return a.chained(2)
    return a.choice() if i % 4 == 1 else a.yes_no((i - 3) // 4)


def _musique(a: _Author, i: int) -> Draft | None:
    return a.chained((2, 2, 3, 3, 4)[i % 5])


def _bamboogle(a: _Author, i: int) -> Draft | None:
    d = a.chained(2)  # the real file has a gold with a trailing newline
    return d and Draft(d.question, [d.golds[0] + "\n" * (i == 0)], d.hops, d.kind, d.extra)


FORMS: dict[str, Callable[[_Author, int], Draft | None]] = {
    "nq": _nq,
    "triviaqa": _triviaqa,
    "popqa": _popqa,
    "hotpotqa": _hotpotqa,
    "2wikimultihopqa": _2wiki,
    "musique": _musique,
    "bamboogle": _bamboogle,
}
WORDS = "Who who What what Which is Is the of has or yes no"  # beyond world.words()


def _row(row_id: str, d: Draft) -> Row:
    plan = [
        {
            "query": f"{relation} of {e.title}",
            "title": e.title,
            "fact": f"{e.title} {relation} {e.facts[relation]} ;",
            "value": e.facts[relation],
        }
        for e, relation in d.hops
    ]
    titles = list(dict.fromkeys(e.title for e, _ in d.hops))
    metadata = {
        "type": d.kind,
        "hops": len(plan),
        "supporting_titles": titles,
        "plan": plan,
        **d.extra,
    }
    return {"id": row_id, "question": d.question, "golden_answers": d.golds, "metadata": metadata}


def write(world: World, seed: int, train: int, test: int) -> dict[str, list[Row]]:
    """File name -> rows: <dataset>_test.jsonl for all seven, <dataset>_train.jsonl for two."""
    tested = _Author(world, "test", random.Random(f"test questions {seed}"))
    trained = _Author(world, "train", random.Random(f"train questions {seed}"))
    files = {f"{name}_test.jsonl": tested.rows(name, "test", test) for name in FORMS}
    files |= {
        f"{name}_train.jsonl": trained.rows(name, "train", train) for name in ("nq", "hotpotqa")
    }
    return files
