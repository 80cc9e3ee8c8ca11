"""Published results, EM × 100, for the table beside ours. None: not found.

`second_hand`: not read in the paper's own table, whose full text was not available.
"""

from dataclasses import dataclass

LABELS = {
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2Wiki",
    "musique": "MuSiQue",
    "bamboogle": "Bamboogle",
}
COLUMNS = tuple(LABELS)


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """`scores`: the seven columns; `average` as stated there (unweighted over the seven)."""

    name: str
    scores: tuple[float | None, ...]
    average: float | None
    second_hand: bool = False
    note: str = ""


_NONE = (None,) * 7
_SIZE = "the source gives no size for these cells; they exceed the 7B row"
_FROM_TEXT = "average only"

ROWS = (
    PublishedRow("MemSearcher 3B", _NONE, 43.8, True, _FROM_TEXT),
    PublishedRow("MemSearcher 7B", (52.7, 68.1, 47.8, 50.8, 48.6, 25.8, 48.8), 48.9, True),
    PublishedRow("MemSearcher 14B", (None, None, 48.8, None, 51.5, None, 57.6), 51.7, True, _SIZE),
    PublishedRow("3B, untrained", _NONE, 14.4, True, _FROM_TEXT),
    PublishedRow("7B, untrained", _NONE, 25.8, True, _FROM_TEXT),
    PublishedRow("14B, untrained", _NONE, 27.7, True, _FROM_TEXT),
    PublishedRow("3B, SFT on a 72B teacher's trajectories", _NONE, 28.5, True, _FROM_TEXT),
    PublishedRow("Search-R1-3B-instruct", (34.1, 54.5, 37.8, 32.4, 31.9, 10.3, 26.4), 32.5),
    PublishedRow("Search-R1-7B-base", (48.0, 63.8, 45.7, 43.3, 38.2, 19.6, 43.2), 43.1),
    PublishedRow("Search-R1-14B-base", (48.6, 67.6, 48.0, 46.8, 47.0, 24.1, 52.8), 47.8),
    PublishedRow("ReSearch-7B", (40.9, 63.7, 44.6, 43.5, 47.6, 22.3, 42.4), 43.6),
    PublishedRow("ReSearch-32B", _NONE, 48.3, False, _FROM_TEXT),
    PublishedRow("AutoRefine-3B-base", (46.7, 62.0, 45.0, 40.5, 39.3, 15.7, 34.4), 40.5),
    PublishedRow("AutoRefine-7B-base", (48.4, 65.9, 48.7, 45.1, 40.5, 18.7, 51.2), 45.5),
    PublishedRow("O2-Searcher-3B", _NONE, 39.1, False, _FROM_TEXT),
    PublishedRow(
        "plain ReAct GRPO, Qwen2.5-3B-Instruct, 3 turns (SkyRL)",
        (44.9, 61.6, 44.4, 41.7, 39.6, 17.9, 44.8),
        42.1,
    ),
)

# The paper's settings by our parameter, for the list of what differs. Not found ones are left out.
SETTINGS: dict[str, object] = {
    "corpus.kind": "wiki18",
    "questions.kind": "flashrag",
    "encode.model": "intfloat/e5-base-v2",
    "index.kind": "flat",
    "search.mode": "dense",
    "policy.source": "hub",
    "agent.max_memory_tokens": 1024,
    "agents.memsearcher.init": "base",
    "reward.preset": "paper",
    "train.questions_per_step": 256,
    "train.group_size": 5,
    "train.lr": 1e-6,
    "train.kl_coef": 0.001,
    "train.clip_low": 0.2,
    "train.clip_high": 0.2,
    "train.temperature": 1.0,
    "train.normalise": "std",
    "evaluate.sample": None,
}
