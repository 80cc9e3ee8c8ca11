"""A teacher behind an OpenAI-compatible endpoint, as an Engine: the agent's own loop runs over it.

MEMSEARCHER_TEACHER_URL (up to /v1), _MODEL, _KEY (without one none is sent) and _TIMEOUT_S in the
environment say which; or OPENAI_BASE_URL and OPENAI_API_KEY. The key stands in no message and no
file. The model is no parameter: after another one, `dvc repro -f warmup@memsearcher`.

    chat    /chat/completions: the context is taken apart into messages again, and what the model
            writes is encoded with the policy's tokenizer. For any server and any model; ask with
            agent.template full, since the compact one explains nothing.
    tokens  /completions with prompt ids, answered with ids (vLLM's `return_token_ids`). For a
            model with the policy's own tokenizer: no text is rendered or encoded anywhere.

A request is repeated, with growing pauses, where the connection breaks, the time is up, the status
is 408, 409, 425, 429 or 5xx, or the reply is not the JSON that the API promises. Then EngineFailed.
What the model says is data, however odd.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)
from torch import Tensor

from memsearcher.agent.chat import Chat
from memsearcher.agent.messages import encode, messages, said
from memsearcher.engine.contract import Completion, EngineFailed, Sampling
from memsearcher.files import BadInput

Api = Literal["chat", "tokens"]
NAME = "MEMSEARCHER_TEACHER_"
TRIES = 10  # about a minute of pauses
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AGAIN = {408, 409, 425, 429}


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    model: str
    key: str | None = field(repr=False)
    timeout_s: float

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Endpoint":
        def first(*names: str) -> str | None:
            return next((environment[name] for name in names if environment.get(name)), None)

        url, model = first(f"{NAME}URL", "OPENAI_BASE_URL"), first(f"{NAME}MODEL")
        if url is None or model is None:
            raise BadInput(
                f"warmup.teacher is endpoint: the environment must hold {NAME}URL and {NAME}MODEL"
            )
        # a key for one server is not shown to another
        keys = [f"{NAME}KEY"] if first(f"{NAME}URL") else [f"{NAME}KEY", "OPENAI_API_KEY"]
        key = (first(*keys) or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise BadInput(f"{NAME}KEY: holds characters that no header can carry")
        limit = first(f"{NAME}TIMEOUT_S") or "120"
        try:
            return cls(url.rstrip("/"), model, key or None, float(limit))
        except ValueError as e:
            raise BadInput(f"{NAME}TIMEOUT_S: not a number: {limit!r}") from e


class _Unwell(RuntimeError):
    """Worth another try. `pause_s`: what the server asked for."""

    def __init__(self, kind: str, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(cause)
        self.kind, self.pause_s = kind, pause_s


class EndpointTeacher:
    """`counts`: requests, and what was wrong with those that were repeated."""

    def __init__(
        self, endpoint: Endpoint, chat: Chat, api: Api, concurrency: int, tries: int = TRIES
    ) -> None:
        self._endpoint, self._chat, self._api, self._tries = endpoint, chat, api, tries
        self.counts: Counter[str] = Counter()
        key = endpoint.key
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=endpoint.timeout_s,
            limits=httpx.Limits(max_connections=concurrency),
        )

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        """Log-probs are 0.0 throughout: the teacher's are not the policy's."""
        body: dict[str, object] = {
            "model": self._endpoint.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if self._api == "tokens":
            body |= {"prompt": prompt_ids, "return_token_ids": True}
            body |= {"stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": True}
            choice = await self._ask("completions", body, "token_ids", list)
            ids = [int(i) for i in choice["token_ids"]]
            stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        else:
            asked, begun = messages(self._chat, prompt_ids)
            body |= {"messages": asked}
            choice = await self._ask("chat/completions", body, "message", dict)
            ids = encode(self._chat, said(choice["message"], begun))
            ids += [self._chat.end_id] * (choice.get("finish_reason") != "length")
            stopped = ids[-1:] == [self._chat.end_id] and len(ids) <= sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        return Completion(ids, [0.0] * len(ids), stopped, weight_version=0)

    @property
    def weight_version(self) -> int:
        return 0

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise EngineFailed("the weights behind an endpoint are somebody else's")

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, path: str, body: dict[str, object], part: str, kind: type) -> dict:
        """The reply's first choice, which has a `part` of this kind."""
        tries = AsyncRetrying(
            retry=retry_if_exception_type(_Unwell),
            stop=stop_after_attempt(self._tries),
            wait=_pause,
            before_sleep=self._count,
            retry_error_callback=_give_up,
        )
        return await tries(self._post, f"{self._endpoint.url}/{path}", body, part, kind)

    async def _post(self, url: str, body: dict[str, object], part: str, kind: type) -> dict:
        self.counts["requests"] += 1
        try:
            async with asyncio.timeout(self._endpoint.timeout_s):  # httpx's own is for each read
                reply = await self._client.post(url, json=body)
        except (httpx.TimeoutException, TimeoutError) as e:
            raise _Unwell("timeout", f"no reply in {self._endpoint.timeout_s:g} s") from e
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as e:
            raise BadInput(f"{NAME}URL: {e}") from e
        except httpx.RequestError as e:
            raise _Unwell("connection", f"{type(e).__name__}: {e}") from e
        status, text = reply.status_code, reply.text
        if self._endpoint.key:
            text = text.replace(self._endpoint.key, "***")
        if status in AGAIN or status >= 500:
            wish = reply.headers.get("Retry-After", "")
            pause_s = min(float(wish), 2 * LONGEST_PAUSE_S) if wish.isdecimal() else 0.0
            raise _Unwell("status", f"status {status}: {text[:300]}", pause_s)
        if status != 200:
            raise BadInput(
                f"the teacher's endpoint refuses {self._endpoint.model!r}, "
                f"status {status}: {text[:300]}"
            )
        try:
            choice = reply.json()["choices"][0]
            if not isinstance(choice[part], kind):
                raise TypeError(f"no {part}")
        except (ValueError, LookupError, TypeError) as e:
            raise _Unwell("junk", f"not a reply of this API: {text[:300]!r}") from e
        return choice

    def _count(self, state: RetryCallState) -> None:
        self.counts[_cause(state).kind] += 1


def _pause(state: RetryCallState) -> float:
    drawn = wait_random_exponential(multiplier=PAUSE_S, max=LONGEST_PAUSE_S)(state)
    return max(drawn, _cause(state).pause_s)


def _give_up(state: RetryCallState) -> dict:
    cause, tries = _cause(state), state.attempt_number
    raise EngineFailed(f"the teacher's endpoint, {tries} times in a row: {cause}") from cause


def _cause(state: RetryCallState) -> _Unwell:
    assert state.outcome is not None
    cause = state.outcome.exception()
    assert isinstance(cause, _Unwell)
    return cause
