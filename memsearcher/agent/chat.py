"""Text to token ids and back, for one policy: trusted text, plain text, the seams between messages.

Two encoders of one vocabulary. `trusted` is for our own words and knows the control tokens;
`plain` is for questions, passages and memories, and no id of the tokenizer's
`added_tokens_decoder` can come out of it. The seams (what opens and closes a message) are read off
the tokenizer's own chat template: sentinels are rendered as messages and the text between them is
the seam.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from memsearcher.files import BadInput, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

DATE = "26 Jul 2024"  # for templates that would put today's: prompts must not change overnight
_SYSTEM, _USER, _ASSISTANT, _USER2, _ASSISTANT2 = (f"sentinel{i}x" for i in range(5))


class Chat:
    """`end_id` ends an assistant message. A context is put together as

    opening(system) + user text + to_assistant + assistant text + [end_id] + to_user + user text + …
    """

    end_id: int
    to_assistant: list[int]  # closes a user message and opens the assistant's
    to_user: list[int]  # what follows end_id up to the text of the next user message

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoTokenizer

        path = Path(folder)
        spec = read_json(path / "tokenizer.json")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if not tokenizer.chat_template:
            raise BadInput(f"{path}: the tokenizer has no chat template")
        self.folder = path
        self.vocabulary = len(tokenizer)
        self.control_ids = frozenset(tokenizer.added_tokens_decoder)
        self._trusted = tokenizer.backend_tokenizer
        self._plain = _without_added_tokens(spec)
        controls = (token.content for token in tokenizer.added_tokens_decoder.values())
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._read_seams(tokenizer)

    def trusted(self, text: str) -> list[int]:
        """Ids of our own words, control tokens included. Nothing is put in front or behind."""
        return self._trusted.encode(_sound(text), add_special_tokens=False).ids

    def plain(self, text: str) -> list[int]:
        """Ids of somebody else's words. `<|im_end|>` in them is nine letters and four signs.

        Where the vocabulary has a control token as an ordinary word too, that word is spelled out
        in characters; a character that has no other id (an unknown one) is left out.
        """
        encoding = self._plain.encode(_sound(text), add_special_tokens=False)
        if self.control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        ids: list[int] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in self.control_ids:
                ids.append(token)
                continue
            for letter in _sound(text)[start:end]:
                spelled = self._plain.encode(letter, add_special_tokens=False).ids
                ids += [i for i in spelled if i not in self.control_ids]
        return ids

    def whole(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, is it ours?) pieces as one text, so that a token may reach from one piece
        into the next. Only in ours a control token is one."""
        ids: list[int] = []
        run = ""
        for text, ours in pieces:
            for i, part in enumerate(self._controls.split(text) if ours else [text]):
                if i % 2:  # a control token: no merge reaches over it
                    ids += self.plain(run) + self.trusted(part)
                    run = ""
                else:
                    run += part
        return ids + self.plain(run)

    def decode(self, ids: list[int]) -> str:
        """Text with its control tokens. Ids past the vocabulary (padded rows) give nothing."""
        return self._trusted.decode(ids, skip_special_tokens=False)

    def opening(self, system: str | None) -> list[int]:
        """Everything before the first user text. Without a system text there is no system message,
        not even the template's default, where the template lets it be left out."""
        if system is None:
            return list(self._bare)
        return self._before_system + self.trusted(system) + self._after_system

    def _read_seams(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        def render(*messages: tuple[str, str], prompt: bool = False) -> str:
            rows = [{"role": role, "content": text} for role, text in messages]
            return str(
                tokenizer.apply_chat_template(
                    rows, tokenize=False, add_generation_prompt=prompt, date_string=DATE
                )
            )

        talk = [("system", _SYSTEM), ("user", _USER), ("assistant", _ASSISTANT), ("user", _USER2)]
        try:
            whole = render(*talk, ("assistant", _ASSISTANT2))
            asked = render(*talk, prompt=True)
            bare = render(("user", _USER))
        except TemplateError as e:
            raise BadInput(f"{self.folder}: the chat template cannot be used: {e}") from e
        before_system, after_system, _, between, _, close = _split(
            whole, _SYSTEM, _USER, _ASSISTANT, _USER2, _ASSISTANT2
        )
        to_assistant = asked.rpartition(_USER2)[2]
        closing = self.trusted(close)
        ends = [i for i in closing if i in self.control_ids]
        if not ends:
            raise BadInput(
                f"{self.folder}: assistant messages end in {close!r}, not in a control token"
            )
        self.end_id = ends[0]
        after_end = closing[closing.index(self.end_id) + 1 :]
        user_open = between.removeprefix(close)
        if between.startswith(close):
            self.to_user = after_end + self.trusted(user_open)
        else:  # the closing differs in the middle of a talk: cut behind the end token instead
            middle = self.trusted(between)
            if self.end_id not in middle:
                raise BadInput(f"{self.folder}: {between!r} between messages lacks the end token")
            self.to_user = middle[middle.index(self.end_id) + 1 :]
        self.to_assistant = self.trusted(to_assistant)
        self._before_system = self.trusted(before_system)
        self._after_system = self.trusted(after_system)
        bos = tokenizer.bos_token or ""
        if user_open and after_system.endswith(user_open):
            opens = user_open.startswith(bos)  # SmolLM2's bos is <|im_start|> itself
            begin = bos if before_system.startswith(bos) and not opens else ""
            self._bare = self.trusted(begin + user_open)
        else:
            self._bare = self.trusted(bare.partition(_USER)[0])


def _split(text: str, *sentinels: str) -> list[str]:
    """The text around and between the sentinels, which must all be there in this order."""
    pieces = []
    for sentinel in sentinels:
        piece, found, text = text.partition(sentinel)
        if not found:
            raise BadInput(f"the chat template drops messages or changes their order: {piece!r}")
        pieces.append(piece)
    return [*pieces, text]


def _without_added_tokens(spec: dict[str, object]) -> "Tokenizer":
    """The tokenizer of tokenizer.json that never heard of its added tokens."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "post_processor": None}))


def _sound(text: str) -> str:
    """Lone surrogates, which no encoder takes, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
