"""Fine-tuning data: rows of messages, or of a prompt and its completion, as tokens. Only the tokens of the answers are learned.

A token that is no target is stored as its complement, a negative number. So a block keeps the marks without a second array::

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    -------------------------------------------------++++++++++++++++++-         + is a target

The chat template of the tokenizer's folder renders messages. If it has no ``{% generation %}`` marks, an answer is where the rendering of
the messages before it, with the prompt to generate, ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import date
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa

from vescale_ray.data.order.stream import Ids
from vescale_ray.data.text.encoders import BadDocument, Encoder, Tokens, half_character
from vescale_ray.errors import BadInput

REMEDY = "rename its fields to prompt and completion, or give messages with role and content"
"""The remedy for rows in the form of other programs: Alpaca, ShareGPT."""
IGNORED = -100
"""A target that does not count, as in ``torch.nn.functional.cross_entropy``."""
RULE = "answers 2"
"""Which tokens count. A run that resumes must have the same rule."""
TODAY = date(2024, 7, 26)
"""The date for templates that ask for it, so that every process and every epoch gets the same tokens."""
_PLACE = "\ue000\ue001"
"""A text that no conversation holds, to find where a message's content is rendered."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]


def normalized(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``messages`` and ``tools`` of a row, or ``prompt`` and ``completion`` as texts; None if the row has no answer to learn.

    Raises:
        ValueError: a field is missing or of another type.
    """
    prompt, completion, messages = (record.get(field) for field in ("prompt", "completion", "messages"))
    if messages is None:
        if isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": prompt, "completion": completion} if completion.strip() else None
        if completion is None and {"messages", "completion"} & set(record):
            return None
        if prompt is None or completion is None:
            raise ValueError(f"has neither messages nor prompt and completion; it has {', '.join(record) or 'no field'}; {REMEDY}")
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            kinds = f"prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}"
            raise ValueError(f"{kinds}; give two texts, or two lists of messages")
        messages = [{**one, "weight": 0} if isinstance(one, dict) else one for one in prompt] + completion
    messages = _from_json(messages)
    if not isinstance(messages, list):
        raise ValueError(f"messages is a {type(messages).__name__}, not a list; give a list of messages with role and content")
    kept = [_message(number, one) for number, one in enumerate(messages)]
    return {"messages": kept, "tools": _tools(record.get("tools"))} if any(map(_counts, kept)) else None


def roles_of(record: Mapping[str, Any]) -> set[str]:
    """Return the roles of a row that :func:`normalized` takes."""
    return {one["role"] for one in _from_json(record.get("messages")) or ()}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the descriptions of functions."""
    given = _from_json(tools) or None
    if given is not None and not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        raise ValueError(f"tools is {str(tools)[:40]!r}, not a list of functions; give one, or its JSON")
    return given or None


def _from_json(value: Any) -> Any:
    """Return the value of a field. It may be JSON, since a column of Parquet has one type."""
    try:
        return json.loads(value) if isinstance(value, str) and value else value
    except ValueError:
        return value


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        has = f"; it has {', '.join(message)}" if isinstance(message, dict) and "role" not in message else ""
        raise ValueError(f"message {number} has no role{has}")
    given = {key: value for key, value in message.items() if value is not None}
    if "content" not in given and not given.get("tool_calls"):
        raise ValueError(f"message {number} has no content")
    content = given.get("content", "")
    if isinstance(content, list):  # few templates read parts, and the others leave them out
        content = given["content"] = "".join(_text_of(number, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number}: its content is {str(content)[:40]}; give a text, or a list of parts")
    if given.get("weight", 1) not in (0, 1):
        raise ValueError(f"message {number}: its weight is {given['weight']!r}; give 0, or 1 to learn it")
    return given


def _text_of(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(
            f"message {number} has a part that is not text, but {str(kind)[:40]!r}; only text is learned, so leave the row out"
        )
    return text


def _counts(message: Mapping[str, Any]) -> bool:
    """Return whether a message is an answer to learn: the assistant's, with text or calls, and without a ``weight`` of 0."""
    content = message.get("content")
    said = content.strip() if content is not None else ""
    return message["role"] == "assistant" and message.get("weight", 1) != 0 and bool(said or message.get("tool_calls"))


def _parsed(messages: Messages) -> tuple[Messages, list[str]]:
    """Parse the arguments of tool calls that are JSON text.

    Returns the messages with the parsed arguments, and the original texts."""
    texts: list[str] = []

    def parsed(call: Any) -> Any:
        function: Any = call.get("function") if isinstance(call, dict) else None
        given: Any = function.get("arguments") if isinstance(function, dict) else None
        try:
            value = json.loads(given) if isinstance(given, str) else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return call
        texts.append(given)
        return {**call, "function": {**function, "arguments": value}}

    return [{**one, "tool_calls": [*map(parsed, one["tool_calls"])]} if one.get("tool_calls") else one for one in messages], texts


class ChatTemplate:
    """The chat template of a tokenizer's folder, as ``transformers`` renders it in a sandbox.

    Args:
        tokenizer: path of the ``tokenizer.json``.
        special: its special tokens.

    Attributes:
        digest: hash of the template and the special tokens that it may use.

    Raises:
        BadInput: transformers is missing, or can't read the folder.
    """

    def __init__(self, tokenizer: str, special: Sequence[str]) -> None:
        try:
            from transformers import PreTrainedTokenizerFast
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise BadInput("data.format = chat: the package transformers is not installed; pip install 'vescale-ray[hf]'") from None
        folder = os.path.dirname(tokenizer)
        if "://" in tokenizer or not os.path.isdir(folder):
            raise BadInput(f"data.tokenizer = {tokenizer}: data.format = chat needs a tokenizer.json in a local folder")
        try:
            made = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            text = made.get_chat_template() if made.chat_template else None
            tooled = made.get_chat_template(tools=[{}]) if made.chat_template else None
        except Exception as error:
            raise BadInput(f"data.tokenizer = {tokenizer}: its folder can't be read ({_line(error)})") from None
        self._render: Any = render_jinja_template
        self._special, self._named = tuple(special), dict(made.special_tokens_map)
        self._text, self._tooled = (one and _DATE.sub(lambda found: repr(TODAY.strftime(found[2])), one) for one in (text, tooled))
        if "strftime_now(" in f"{self._text} {self._tooled}":
            raise BadInput(f"data.tokenizer = {tokenizer}: its chat template chooses the form of the date; write the date into it")
        texts = (self._text,) if self._tooled == self._text else (self._text, self._tooled)
        self.digest = hashlib.sha256(repr((*texts, self._named)).encode()).hexdigest()[:16]

    def render(self, messages: Messages, tools: Any) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the parts of it that are answers to learn.

        Raises:
            ValueError: there is no template, it refuses the messages, or an answer can't be found.
        """
        if self._text is None:
            raise ValueError(
                "has messages, but the folder of data.tokenizer has no chat template; add chat_template.jinja, or give rows of prompt "
                "and completion"
            )
        messages = self._called(messages, tools)
        text, spans = self._rendered(messages, tools)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not self._marked(tools):
            spans = [self._span(text, messages, tools, turn) for turn in turns if _counts(messages[turn])]
        elif len(spans) == len(turns):
            spans = [span for span, turn in zip(spans, turns, strict=True) if _counts(messages[turn])]
        elif not all(_counts(messages[turn]) for turn in turns):
            raise ValueError(f"has {len(turns)} answers, of which some do not count, but the chat template marks {len(spans)} parts")
        return text, spans

    def _template(self, tools: Any) -> str | None:
        """Return the template. A tokenizer may have a separate one for conversations with tools."""
        return self._tooled if tools else self._text

    def _marked(self, tools: Any) -> bool:
        return _MARK.search(self._template(tools) or "") is not None

    def _called(self, messages: Messages, tools: Any) -> Messages:
        """Return the messages with the arguments of calls in the form that the template expects: JSON text, as in OpenAI's files, or
        mappings.

        Most templates convert the arguments to JSON themselves. They would put JSON text in quotes.
        """
        parsed, texts = _parsed(messages)
        if not texts:
            return messages
        try:
            shown = self._rendered(messages, tools)[0]
        except ValueError:
            return parsed
        return messages if all(text in shown and f'"{text}"' not in shown for text in texts) else parsed

    def _rendered(self, messages: Messages, tools: Any, prompt: bool = False) -> tuple[str, list[Span]]:
        if not messages:
            return "", []
        options: dict[str, Any] = {"add_generation_prompt": prompt, "return_assistant_tokens_mask": self._marked(tools)}
        try:
            texts, spans = self._render([messages], tools=tools, chat_template=self._template(tools), **options, **self._named)
        except Exception as error:
            raise ValueError(f"the chat template refuses the messages ({_line(error)}); correct them, or the template") from None
        return texts[0], spans[0] if spans else []

    def _span(self, text: str, messages: Messages, tools: Any, turn: int) -> Span:
        """Return the range of the answer ``turn`` in ``text``. It begins behind the prompt that asks for the answer, and ends with the
        turn."""
        before, prompted = (self._rendered(messages[:turn], tools, prompt)[0] for prompt in (False, True))
        through = self._rendered(messages[: turn + 1], tools)[0] if turn + 1 < len(messages) else text
        said = (messages[turn].get("content") or "").strip()
        if turn:
            start = len(os.path.commonprefix([text, prompted]))
        else:  # there is no prompt
            start = self._rendered([{**messages[0], "content": _PLACE}, *messages[1:]], tools)[0].find(_PLACE)
        end = len(through) if text.startswith(through) else self._changed_end(text, start, through, said)
        # A part that only one of the two has is the end of a whole conversation. Some templates have it in place of the prompt.
        if not text.startswith(os.path.commonprefix([before, prompted]).rstrip()) or start < 0 or end <= start:
            raise ValueError(
                f"message {turn} can't be found in the rendered conversation, since the chat template changes earlier messages; "
                "mark the answers in it with {% generation %} and {% endgeneration %}"
            )
        kept = text[start:end].rstrip()
        return start, start + len(kept) if kept.endswith(self._special) else end

    def _changed_end(self, text: str, start: int, through: str, said: str) -> int:
        """Return the end of a turn in ``text`` if ``text`` and ``through`` render the turn differently; -1 if it can't be found.
        ``through`` is the conversation rendered up to this turn. A template may render a last turn with its reasoning, or with another
        ending."""
        for place in range(start, len(through)):
            if text.startswith(through[place:], start) and through[place:].rstrip().endswith(self._special):
                return start + len(through) - place
        found = re.compile(re.escape(said)).finditer
        for shown, here in product(found(through, start), list(found(text, start))) if said else ():
            if through[start : shown.start()].endswith(text[start : here.start()]):  # equal up to the answer
                tail = os.path.commonprefix([through[shown.end() :], text[here.end() :]])
                ends = [tail.rfind(one) + len(one) for one in self._special if one in tail]
                return here.end() + max(ends, default=len(tail))
        return -1


class ChatEncoder(Encoder):
    """Encodes rows, each as JSON of a result of :func:`normalized`. Tokens that are no targets become their complements.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        last: token that ends a completion.
    """

    def __init__(self, tokenizer: Any, vocab: int, last: int, template: ChatTemplate) -> None:
        super().__init__(vocab, None, f"chat of template {template.digest}, {RULE}")
        self.dtype = np.int32
        self._tokenizer, self._last, self._template = tokenizer, last, template
        special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        self._ends = np.array([last, *special], np.int32)

    def values(self, documents: pa.Array) -> tuple[Tokens, Ids]:
        made = [np.zeros(0, np.int32)]
        for number, text in enumerate(documents.to_pylist()):
            try:
                made.append(self._encoded(json.loads(text)) if text is not None else made[0])
            except UnicodeEncodeError as error:  # it was an escape in JSON inside the row
                raise BadDocument(number, half_character(error), is_damage=True) from None
            except ValueError as error:
                raise BadDocument(number, str(error)) from None
        return np.concatenate(made), np.array([len(one) for one in made[1:]], dtype=np.int64)

    def ended(self, tokens: Tokens) -> int:
        """Return how many answers in ``tokens`` end with a special token among their last three tokens."""
        counted = np.append(tokens >= 0, False)
        last = np.flatnonzero(counted[:-1] & ~counted[1:])
        return int(np.isin(tokens[np.maximum(last[:, None] - np.arange(3), 0)], self._ends).any(axis=1).sum())

    def _encoded(self, row: Mapping[str, Any]) -> Tokens:
        if "messages" not in row:
            prompt, completion = self._completed(row["prompt"], row["completion"])
            ends = [] if completion[-1:] == [self._last] else [self._last]
            return np.concatenate([~np.array(prompt, np.int32), np.array([*completion, *ends], np.int32)])
        text, spans = self._template.render(row["messages"], row["tools"])
        found = self._tokenized(text, False)
        ids, places = np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)
        counted = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            counted |= (places[:, 0] < end) & (places[:, 1] > start)
        return np.where(counted, ids, ~ids)

    def _completed(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Return the tokens of the prompt, as at inference, and of the completion.

        Both are tokenized together, since some tokenizers put a space before a text that stands alone. If a token would reach from the
        prompt into the completion, they are tokenized apart.
        """
        before, whole = self._begun(prompt), self._begun(prompt + completion)
        if whole[: len(before)] == before and len(whole) > len(before):
            return before, whole[len(before) :]
        return before, self._tokenized(completion, False).ids

    def _begun(self, text: str) -> list[int]:
        """Return the tokens of a text that more text follows. Special tokens before the text are kept, those behind it are not."""
        found = self._tokenized(text, True)
        behind = list(found.special_tokens_mask[::-1]).index(0) if 0 in found.special_tokens_mask else 0
        ids: list[int] = found.ids
        return ids[: len(ids) - behind]

    def _tokenized(self, text: str, special: bool) -> Any:
        text.encode()  # the package's own error of half a character is another
        try:
            return self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the package raises no narrower class
            raise ValueError(f"data.tokenizer can't encode it ({_line(error)})") from None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
