"""The demo's encyclopedia: invented people, films, companies and towns, from a seed.

Short fixed sentences out of about a thousand words, so that a policy of one million parameters can
learn to read them. The lines keep the quirks of the 2018 Wikipedia dump: a title line in quotes
except for one plain ASCII word, inner quotes doubled, several chunks under one title. Names share
their words (two films called "Silent ...", three people called "... Tovin"), and variants of whole
names stand beside the original, so a search can pick the wrong passage.

The entities form two halves, train and test, and a relation never leaves its half: no training
question can teach a fact about an entity that a test question passes through.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Literal

from memsearcher.files import BadInput

Side = Literal["train", "test"]
TEST_SHARE = 0.4
VARIANT_SHARE = 0.04  # near-copies of other names; in the corpus, never asked about
CHUNK_SHARE = 0.15  # entities with a second passage
MAX_WORDS = 25

# kind -> (share of the entities, relations in the first chunk, the relation of the second chunk)
KINDS: dict[str, tuple[float, tuple[str, ...], str | None]] = {
    "film": (0.36, ("director", "star", "year"), "studio"),
    "person": (0.36, ("birthplace", "spouse", "employer"), "teacher"),
    "company": (0.18, ("founder", "headquarters"), "rival"),
    "town": (0.10, ("mayor", "river"), None),
}
VALUE_KIND = {
    **dict.fromkeys(("director", "star", "spouse", "teacher", "founder", "mayor"), "person"),
    **dict.fromkeys(("studio", "employer", "rival"), "company"),
    **dict.fromkeys(("birthplace", "headquarters"), "town"),
    "year": "year",
    "river": "river",
}
YEARS = tuple(str(y) for y in range(1930, 1980))
COMPANY_TYPES = ("Works", "Studios", "Group", "Brothers", "Press", "Motors", "Foods", "Lines")
ADJECTIVES = """Silent Golden Broken Hidden Distant Frozen Burning Crimson Hollow Gentle Wicked
    Ancient Bitter Velvet Savage Quiet Painted Sacred Secret Electric Paper Iron Lonely Midnight
    Restless Scarlet Winter Wooden"""
NOUNS = """Harbor Garden Mirror River Mountain Letter Station Window Orchard Castle Bridge Island
    Lantern Forest Kingdom Prison Theater Hospital Carnival Desert Library Market Tower Valley
    Wedding Engine Soldier Captain Doctor Widow Painter Hunter Dancer Teacher Tiger Horse Falcon
    Spider Whale Rose"""
PLAIN_WORDS = "The Their their Its its is a an of and the film person company town"
ONSETS = "b br d dr f fr g gr h j k kl l m n p pr r s st t tr v w z"
MIDDLES = "b d g k l ld lv m n nd r rk rn s st t v x z"


@dataclass(slots=True)
class Entity:
    """`facts` maps a relation to the value's name; `links` to the entity, where it is one."""

    kind: str
    title: str
    side: Side
    facts: dict[str, str] = field(default_factory=dict)
    links: dict[str, "Entity"] = field(default_factory=dict)
    mentions: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """`lines` are the raw rows of the corpus; `entities` those that a question may ask about."""

    entities: tuple[Entity, ...]
    lines: tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Names:
    first: tuple[str, ...]
    last: tuple[str, ...]
    town: tuple[str, ...]
    company: tuple[str, ...]
    river: tuple[str, ...]

    def all(self) -> tuple[str, ...]:
        return self.first + self.last + self.town + self.company + self.river


@cache
def names() -> Names:
    """The pools, the same for every seed (they are the tiny policy's vocabulary). No word twice."""
    rng = random.Random(20181220)
    made: dict[str, None] = {}

    def pool(size: int, endings: str) -> tuple[str, ...]:
        start = len(made)
        while len(made) < start + size:
            parts = (ONSETS.split(), "aeiou", MIDDLES.split(), endings.split())
            made[("".join(rng.choice(p) for p in parts)).capitalize()] = None
        return tuple(list(made)[start:])

    return Names(
        first=pool(80, "a el in is o us en ia"),
        last=pool(110, "ov ane er ik ell und ash in"),
        town=pool(260, "burg ville mouth ford ham stad by"),
        company=pool(70, "ex ix on ax ium"),
        river=pool(30, "aqua ine ey"),
    )


def build(seed: int, passages: int) -> World:
    """Exactly `passages` lines, ids "0".. in order. The same arguments give the same world."""
    rng = random.Random(f"world {seed}")
    variants_wanted = round(VARIANT_SHARE * passages)
    base = round((passages - variants_wanted) / (1 + CHUNK_SHARE * 0.9))
    entities: list[Entity] = []
    for kind, (share, _, _) in KINDS.items():
        wanted = max(6, round(base * share))
        titles = _titles(kind, rng)
        if wanted > len(titles):
            raise BadInput(
                f"world.passages: {passages} need {wanted} {kind} names, there are {len(titles)}"
            )
        for i, title in enumerate(titles[:wanted]):
            entities.append(Entity(kind, title, "test" if i < TEST_SHARE * wanted else "train"))
    able = [i for i, e in enumerate(entities) if KINDS[e.kind][2] is not None]
    long = set(rng.sample(able, max(0, passages - variants_wanted - len(entities))))
    _relate(entities, long, rng)
    chunks = [chunk for e in entities for chunk in _chunks(e)]
    variants = _variants(entities, rng)
    while len(chunks) < passages:
        chunks.append(next(variants))
    rng.shuffle(chunks)
    lines = [{"id": str(i), "contents": _contents(t, text)} for i, (t, text) in enumerate(chunks)]
    return World(tuple(entities), tuple(lines))


def _titles(kind: str, rng: random.Random) -> list[str]:
    n = names()
    parts: dict[str, tuple[tuple[str, ...] | list[str], ...]] = {
        "film": (ADJECTIVES.split(), NOUNS.split()),
        "person": (n.first, n.last),
        "company": (n.company, COMPANY_TYPES),
        "town": (n.town,),
    }
    titles = [" ".join(words) for words in product(*parts[kind])]
    rng.shuffle(titles)
    return titles


def _relate(entities: list[Entity], long: set[int], rng: random.Random) -> None:
    """Draws every fact; those whose position is in `long` get the second chunk's relation."""
    by_kind: dict[tuple[str, Side], list[Entity]] = {}
    for e in entities:
        by_kind.setdefault((e.kind, e.side), []).append(e)
    for i, e in enumerate(entities):
        _, relations, extra = KINDS[e.kind]
        if extra is not None and i in long:
            relations = (*relations, extra)
        for relation in relations:
            kind = VALUE_KIND[relation]
            if kind == "year":
                e.facts[relation] = rng.choice(YEARS)
            elif kind == "river":
                e.facts[relation] = rng.choice(names().river)
            else:
                other = rng.choice([o for o in by_kind[kind, e.side] if o is not e])
                e.facts[relation], e.links[relation] = other.title, other
                other.mentions += 1


def _chunks(e: Entity) -> Iterator[tuple[str, str]]:
    """(title, text) of one or two passages."""
    _, relations, extra = KINDS[e.kind]
    yield e.title, _sentence(e.title, e.kind, [(r, e.facts[r]) for r in relations])
    if extra in e.facts:
        yield e.title, f"The {extra} of {e.title} is {e.facts[extra]}."


def _sentence(title: str, kind: str, facts: list[tuple[str, str]]) -> str:
    its = "their" if kind == "person" else "its"
    parts = [f"{its} {relation} is {value}" for relation, value in facts]
    listed = ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"{title} is a {kind}. {listed[0].upper()}{listed[1:]}."


def _variants(entities: list[Entity], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Passages about near-namesakes: a nickname in quotes, a middle name, a foreign letter."""
    n = names()
    change: dict[str, Callable[[str, str], str]] = {
        "film": lambda a, b: f'The "{a}" {b}',
        "person": lambda a, b: f"{a} {rng.choice(n.first)} {b}",
        "company": lambda a, b: f"{a.replace('o', 'ö').replace('a', 'ä')} {b}",
    }
    seen = {e.title for e in entities}
    while True:
        e = rng.choice([e for e in entities if e.kind in change])
        title = change[e.kind](*e.title.split())
        if title in seen:
            continue
        seen.add(title)
        other = rng.choice([o for o in entities if o.kind == e.kind])
        yield title, _sentence(title, e.kind, [(r, other.facts[r]) for r in KINDS[e.kind][1][:2]])


def _contents(title: str, text: str) -> str:
    """A line of the dump: title in quotes unless it is one plain word, inner quotes doubled."""
    doubled = title.replace('"', '""')
    line = title if title.isascii() and title.isalnum() else f'"{doubled}"'
    return line + "\n" + text.replace('"', '""')


def pools() -> list[tuple[str, ...]]:
    """Words of one kind that can stand for each other in any sentence of the world."""
    n = names()
    listed = [tuple(ADJECTIVES.split()), tuple(NOUNS.split()), YEARS]
    return [n.first, n.last, n.town, n.company, n.river, *listed]


def words() -> list[str]:
    """Every word that a line of the world may hold, sorted."""
    listed = (ADJECTIVES, NOUNS, PLAIN_WORDS)
    texts = [word for text in listed for word in text.split()]
    return sorted({*names().all(), *COMPANY_TYPES, *YEARS, *VALUE_KIND, *texts})
