"""Prompts for RL, and a resumable iterator over them.

A record has a `prompt`, which is a text or messages, or `messages`, and other columns, which rewards read. The chat
template renders messages with a generation prompt. A text gets no template: its tokens are the tokens of a document
that starts with it.
"""

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.chats import left_out_of_prompt
from eqx_decoders.data.packing_plans import check_same_data, permutation
from eqx_decoders.data.sources.documents import ReadReport, checked_text, template_variables, warning_prefix
from eqx_decoders.data.sources.readers import ALL, read_records
from eqx_decoders.data.sources.records import FILES, as_texts, normalize_prompt
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.io.status import StatusLine, quantity
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, check_messages
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, prompt_ids


RECORDS_AT_ONCE = 1024  # records that are rendered and tokenized together


class Prompt(NamedTuple):
    """Prompt: its number, its tokens, and its record with `prompt` and the columns that rewards read."""

    number: int
    tokens: tuple[int, ...]
    record: Mapping[str, Any]


class Prompts:
    """Prompts of at most `most_tokens` tokens in the order of their records.

    too_long: number of prompts that were left out. notes: number of prompts by warning.
    """

    def __init__(
        self, prompts: Sequence[Prompt], most_tokens: int, too_long: int, notes: Mapping[str, int] | None = None
    ):
        self.prompts, self.most_tokens, self.too_long, self.notes = prompts, most_tokens, too_long, dict(notes or {})

    @functools.cached_property
    def content_hash(self) -> str:
        """Hash of the prompts, in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.tokens, prompt.record], sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    def describe(self) -> str:
        """Describe the prompts, the prompts that were left out, and warnings."""
        if not self.longest:
            return quantity(len(self.prompts), "task")
        line = f"{quantity(len(self.prompts), 'prompt')} of up to {quantity(self.longest, 'token')}"
        if self.too_long:
            warning = warning_prefix(self.too_long, len(self.prompts))
            line = f"{warning}{line}; left out: {self.too_long:,} of more than {self.most_tokens:,}"
        notes = [f"warning: {quantity(count, 'prompt')}: {note}" for note, count in self.notes.items()]
        return "\n".join([line, *notes])


def read_prompts(
    path: Paths, tokenizer: Tokenizer, *, most_tokens: int, template: ChatTemplate | None = None, flag: str = DATA
) -> Prompts:
    """Read prompts, `{"prompt": …, "answer": …, …}`, of at most `most_tokens` tokens.

    Raises DataError with file and row for other records, and if no prompt is left.
    """
    records, prompts, too_long, number = _records(path, flag), list[Prompt](), 0, 0
    report = ReadReport()
    with StatusLine("tokenizing prompts", remains="nothing of them is kept"):
        while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
            for (where, record), tokens in zip(group, _encode(group, tokenizer, template, report), strict=True):
                if not tokens:
                    raise DataError(
                        f"{where}: field 'prompt' is empty, and the tokenizer has no token that starts a text. "
                        "Remove the record."
                    )
                if len(tokens) <= most_tokens:
                    prompts.append(Prompt(number, tokens, record))
                too_long += len(tokens) > most_tokens
                number += 1
    if not prompts:
        reason = f": all {number:,} prompts have more than {most_tokens:,} tokens. Raise --seq-len" if number else ""
        raise DataError(f"{path} has no usable prompt{reason}.")
    return Prompts(prompts, most_tokens, too_long, report.notes)


def read_tasks(path: Paths, *, flag: str = DATA) -> Prompts:
    """Read tasks of an environment, which are any JSON objects, as prompts without tokens. Raises DataError."""
    records = (each for source in find_sources(path, flag) for each in read_records(source, ALL))
    tasks = list[Prompt]()
    for where, record in records:
        check(isinstance(record, dict), f"{where} must be a JSON object, which is the task.", DataError)
        tasks.append(Prompt(len(tasks), (), record))
    check(bool(tasks), f"{path} has no task.", DataError)
    return Prompts(tasks, 0, 0)


def _records(path: Paths, flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for source in find_sources(path, flag):
        for where, record in read_records(source, ALL):
            record = normalize_prompt(record, where)
            media = [name for names in FILES.items() for name in names if record.get(name)]
            check(not media, f"{where} has {', '.join(media)}: prompts can only contain text.", DataError)
            prompt = record["prompt"]
            if isinstance(prompt, list):
                prompt = check_messages(as_texts(prompt), f"{where}: messages")
                if prompt[-1]["role"] == "assistant":
                    raise DataError(
                        f"{where}: the last message is an assistant message, so there is nothing to answer. Remove the "
                        "message, or put the messages before it into 'prompt'."
                    )
            else:
                checked_text(prompt, "prompt", where)
            yield where, {**record, "prompt": prompt}


def _encode(
    group: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    report: ReadReport,
) -> Iterator[tuple[int, ...]]:
    chats = [(where, record) for where, record in group if isinstance(record["prompt"], list)]
    encoded = iter(_encode_chats(chats, tokenizer, template, report) if chats else ())
    for _, record in group:
        prompt = record["prompt"]
        yield next(encoded) if isinstance(prompt, list) else encode_beginning(tokenizer, prompt)


def _encode_chats(
    chats: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    report: ReadReport,
) -> Iterator[tuple[int, ...]]:
    if template is None:
        raise DataError(
            f"{chats[0][0]} is a conversation, but there is no chat template to render it. Start from a chat model "
            "(--init-from), or give a Jinja file with --chat-template (DataConfig.chat_template)."
        )
    requests = [
        Conversation(record["prompt"], template_variables(record, where), add_generation_prompt=True)
        for where, record in chats
    ]
    for (where, _), request, text in zip(chats, requests, template.render_many(requests), strict=True):
        if isinstance(text, ConversionError):
            raise DataError(f"{where}: {text}") from text
        report.notes.update(left_out_of_prompt(request, text, f"{where}: {template.where}"))
        yield encode_rendered(tokenizer, text.text, text.literal)


def encode_rendered(tokenizer: Tokenizer, text: str, literal: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Encode what a chat template wrote; `literal`: spans of names of special tokens that are letters."""
    if isinstance(tokenizer, JsonTokenizer):
        return tuple(tokenizer.encode(text, special=True, literal=[(start, stop) for start, stop in literal]).tolist())
    return tuple(tokenizer.encode(text).tolist())


def encode_beginning(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokenize a text to be continued, as the server and `generate` do."""
    return tuple(prompt_ids(tokenizer, text).tolist())


class PromptBatches:
    """Iterator over the prompts of each step: `count` prompts, in another order in each epoch.

    It never ends; with `held_out` it is one pass, in the order of the records. `take` returns additional prompts. All
    processes get the same prompts.
    """

    def __init__(self, prompts: Prompts, *, count: int, seed: int, held_out: bool = False):
        self.prompts, self._count, self._seed, self._held_out = prompts, count, seed, held_out
        self._taken = 0

    def __iter__(self) -> Iterator[list[Prompt]]:
        return self

    def __next__(self) -> list[Prompt]:
        left = len(self.prompts.prompts) - self._taken
        if self._held_out and left <= 0:
            raise StopIteration
        return self.take(min(self._count, left) if self._held_out else self._count)

    def __enter__(self) -> "PromptBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, count: int) -> list[Prompt]:
        """Return the next prompts. The number of each prompt is its position in the sequence of all prompts so far."""
        prompts = []
        for turn in range(self._taken, self._taken + count):
            epoch, place = divmod(turn, len(self.prompts.prompts))
            index = place if self._held_out else int(_order(len(self.prompts.prompts), f"{self._seed}/{epoch}")[place])
            prompts.append(self.prompts.prompts[index]._replace(number=turn))
        self._taken += count
        return prompts

    def close(self) -> None:
        """Do nothing: no thread reads ahead."""

    def rewind(self) -> "PromptBatches":
        """Go back to the first prompt."""
        self._taken = 0
        return self

    @property
    def epochs(self) -> float:
        """Number of passes over the prompts so far."""
        return self._taken / len(self.prompts.prompts)

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps that pass over the prompts `epochs` times; at least 1."""
        return max(1, math.ceil(epochs * len(self.prompts.prompts) / self._count))

    def source_epochs(self) -> Mapping[str, float]:
        """Return an empty mapping: prompts are not mixtures."""
        return {}

    def describe(self, start: int, steps: int) -> str:
        """Describe the prompts and the records that were left out."""
        return self.prompts.describe()

    def get_state(self) -> dict[str, Any]:
        """Return the state as plain JSON: the number of prompts so far, and everything that they depend on."""
        return {"prompt": self._taken, **self._identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where `get_state` was called. Raises DataError if the prompts of `state` differ."""
        check_same_data(state, self._identity())
        self._taken = int(state["prompt"])

    def _identity(self) -> dict[str, Any]:
        return {"prompts": self.prompts.content_hash, "seed": self._seed, "held_out": self._held_out}


@functools.lru_cache(2)
def _order(count: int, seed: str) -> np.ndarray:
    return permutation(count, seed)
