"""What the tests stand on: a byte tokenizer, a tiny policy, a scripted engine, twelve passages."""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memsearcher.agent.chat import Chat
from memsearcher.engine.contract import Completion, Sampling
from memsearcher.params import Agent as AgentParams
from memsearcher.params import Release
from memsearcher.types import Hit, Passage, Question


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":  # bounds are those of float32 on a CPU, also beside a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


torch.set_num_threads(1)  # tests share the cores with whatever else runs
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that they start

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] "
    "+ '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_CONTROL = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
TAGS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<memory>", "</memory>"),
    *("<question>", "</question>", "<tool_response>", "</tool_response>"),
]


def save_byte_tokenizer(
    folder: Path,
    *,
    template: str = CHATML,
    control: Sequence[str] = CONTROL,
    tags: Sequence[str] = TAGS,
    bos: str | None = None,
) -> Path:
    """A token per byte, plus control tokens and tags; the smallest real Hugging Face tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=control[1], bos_token=bos)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A random policy of two layers with tied embeddings over the byte tokenizer."""
    return save_policy(tmp_path_factory.mktemp("policy"), tokenizer_folder, tied=True)


@pytest.fixture(scope="session")
def untied_policy_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return save_policy(tmp_path_factory.mktemp("untied"), tokenizer_folder, tied=False)


def save_policy(folder: Path, tokenizer_folder: Path, *, tied: bool) -> Path:
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,  # large enough that neighbours do not share their best token
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat(tokenizer_folder: Path) -> Chat:
    return Chat(tokenizer_folder)


@pytest.fixture(scope="session", params=["chatml", "llama"])
def any_chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Qwen and SmolLM2 talk in the one, Llama in the other."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "chatml":
        return Chat(save_byte_tokenizer(folder))
    bos = LLAMA_CONTROL[0]
    return Chat(save_byte_tokenizer(folder, template=LLAMA, control=LLAMA_CONTROL, bos=bos))


OURS = Release(
    max_k=None,
    escaped_newlines=False,
    broken_memory=False,
    search_on_last_turn=False,
    whole_prompt=False,
)


@pytest.fixture
def agent_params() -> AgentParams:
    """Room for byte tokens: about five of them make a word."""
    return AgentParams(
        template="compact",
        release_template=None,
        release=OURS,
        max_question_tokens=100,
        max_action_tokens=200,
        max_observation_tokens=400,
        max_memory_tokens=60,
        max_context_tokens=1200,
        max_turns_train=4,
        max_turns_eval=6,
    )


class ScriptedEngine:
    """Says what it is told. `script` is a list of texts, said in order (an ENDLESS one runs into
    the limit), or a function of the prompt ids. Each token's log-prob is −0.5."""

    def __init__(self, chat: Chat, script: Sequence[str] | Callable[[list[int]], str]) -> None:
        self.chat = chat
        self.weight_version = 0
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self._script = script
        self._said = 0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        if callable(self._script):
            text = self._script(prompt_ids)
        else:
            text = self._script[self._said]
            self._said += 1
        endless = text.endswith(ENDLESS)
        ids = self.chat.trusted(text.removesuffix(ENDLESS))
        if endless:
            ids += self.chat.trusted("x") * (sampling.max_tokens - len(ids))
        else:
            ids.append(self.chat.end_id)
        ids = ids[: sampling.max_tokens]
        stopped = ids[-1] == self.chat.end_id
        return Completion(ids, [-0.5] * len(ids), stopped, self.weight_version)

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weight_version += 1

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


ENDLESS = "…"

PASSAGES = [
    Passage(str(i), title, text)
    for i, (title, text) in enumerate(
        [
            ("Tovin Bridge", "The Tovin Bridge crosses the river Ansel in the town of Marel."),
            ("Marel", "Marel is a town on the river Ansel. Its mayor is Ida Quent."),
            ("Ida Quent", "Ida Quent, born in Brost, is a politician and mayor of Marel."),
            ("Brost", "Brost is a city in the north with a harbour and 40,000 people."),
            ("Ansel (river)", "The Ansel is a river that rises in the Hollow Hills."),
            ("Ansel (singer)", "Ansel is a singer from Brost who recorded four albums."),
            (
                "Hollow Hills",
                "The Hollow Hills are a range of low hills; the highest is Mount Orr.",
            ),
            ("Mount Orr", "Mount Orr is 812 metres high and was first climbed by Pell Varga."),
            ("Pell Varga", "Pell Varga was a climber and a painter of the Brost school."),
            ("Brost school", "The Brost school was a group of painters between 1890 and 1920."),
            ("The Last Ferry", "The Last Ferry is a film of 1956 directed by Oda Lind."),
            ("Oda Lind", "Oda Lind was a film director born in Marel."),
        ]
    )
]


class FixtureRetriever:
    """Twelve passages ranked by how many words of the query they hold, then by position."""

    def __init__(self, passages: Sequence[Passage] = PASSAGES) -> None:
        self.passages = {p.id: p for p in passages}
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        return [self._rank(query, k) for query in queries]

    def passage(self, passage_id: str) -> Passage:
        return self.passages[passage_id]

    def _rank(self, query: str, k: int) -> list[Hit]:
        words = set(query.lower().split())

        def score(p: Passage) -> int:
            return len(words & set(f"{p.title} {p.text}".lower().split()))

        best = sorted(self.passages.values(), key=lambda p: (-score(p), int(p.id)))[:k]
        return [Hit(p.id, float(score(p)), rank) for rank, p in enumerate(best, 1)]


@pytest.fixture
def retriever() -> FixtureRetriever:
    return FixtureRetriever()


@pytest.fixture
def question() -> Question:
    return Question("nq/test_1", "nq", "Who is the mayor of Marel?", ("Ida Quent",))


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of the tests, for PREFECT_API_URL: a flow that starts one for itself takes
    ten seconds more."""
    from plumbing import server

    home = tmp_path_factory.mktemp("prefect")
    settings = {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    with server(home, "prefect", "server", "start", health="/api/health", **settings) as (_, url):
        yield f"{url}/api"
