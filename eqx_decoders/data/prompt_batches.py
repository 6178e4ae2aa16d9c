"""Prompts for RL, and a resumable iterator over them.

A record has a field `prompt` (text or messages) or `messages`. Reward functions read the other fields. Messages are
rendered by the chat template with a generation prompt. A text is tokenized without a template, in the same way as the
start of a document.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.chats import omissions_of_prompt
from eqx_decoders.data.packing_plans import check_same_data, permutation
from eqx_decoders.data.sources.documents import ReadReport, checked_text, template_variables, warning_prefix
from eqx_decoders.data.sources.readers import ALL_COLUMNS, read_records
from eqx_decoders.data.sources.records import MEDIA_FIELDS, as_texts, normalize_prompt
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.io.status import StatusLine, quantity
from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, check_messages
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, prompt_ids


RECORDS_PER_CHUNK = 1024  # records that are rendered and tokenized together


class Prompt(NamedTuple):
    """A tokenized prompt.

    **Fields:**

    - `number`: index of the prompt in the order of the run.
    - `tokens`: token ids of the prompt; empty for a task of an environment.
    - `record`: the JSON record with `prompt` and the fields that reward functions read.
    """

    number: int
    tokens: tuple[int, ...]
    record: Mapping[str, Any]


class Prompts:
    """Prompts in the order of their records.

    **Arguments:**

    - `prompts`: the prompts, each of at most `max_tokens` tokens.
    - `max_tokens`: maximum length of a prompt.
    - `num_too_long`: number of prompts that were skipped because they are longer than `max_tokens`.
    - `notes`: number of affected prompts by warning.
    """

    def __init__(
        self, prompts: Sequence[Prompt], max_tokens: int, num_too_long: int, notes: Mapping[str, int] | None = None
    ):
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.num_too_long = num_too_long
        self.notes = dict(notes or {})

    @functools.cached_property
    def content_hash(self) -> str:
        """Hash of the tokens and records of all prompts, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.tokens, prompt.record], sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def max_length(self) -> int:
        """Number of tokens of the longest prompt; 0 for tasks of an environment."""
        return max(len(prompt.tokens) for prompt in self.prompts)

    def describe(self) -> str:
        """Return a summary with the number of prompts, the number of skipped prompts, and the warnings."""
        if not self.max_length:
            return quantity(len(self.prompts), "task")
        line = f"{quantity(len(self.prompts), 'prompt')} of up to {quantity(self.max_length, 'token')}"
        if self.num_too_long:
            warning = warning_prefix(self.num_too_long, len(self.prompts))
            line = f"{warning}{line}; skipped {self.num_too_long:,} of more than {self.max_tokens:,} tokens"
        notes = [f"warning: {quantity(count, 'prompt')}: {note}" for note, count in self.notes.items()]
        return "\n".join([line, *notes])


def read_prompts(
    path: Paths, tokenizer: Tokenizer, *, max_tokens: int, template: ChatTemplate | None = None, flag: str = DATA
) -> Prompts:
    """Read and tokenize prompts from records such as `{"prompt": …, "answer": …}`.

    **Arguments:**

    - `path`: files, directories or data sets with the records.
    - `max_tokens`: maximum length of a prompt; longer prompts are skipped and counted.
    - `template`: chat template, which is needed only for prompts that consist of messages.
    - `flag`: command-line option named in errors about `path`.

    Raises DataError, with file and row, if a record is invalid, and if there are no prompts of at most `max_tokens`
    tokens.
    """
    records = _records(path, flag)
    prompts = list[Prompt]()
    num_too_long = 0
    number = 0
    report = ReadReport()
    with StatusLine("tokenizing prompts", remains="no tokenized prompts were saved"):
        while chunk := list(itertools.islice(records, RECORDS_PER_CHUNK)):
            for (where, record), tokens in zip(chunk, _encode(chunk, tokenizer, template, report), strict=True):
                if not tokens:
                    raise DataError(
                        f"{where}: field 'prompt' is empty, and the tokenizer has no beginning-of-sequence token. "
                        "Remove the record."
                    )
                if len(tokens) <= max_tokens:
                    prompts.append(Prompt(number, tokens, record))
                else:
                    num_too_long += 1
                number += 1
    if not prompts:
        reason = f": all {number:,} prompts have more than {max_tokens:,} tokens. Raise --seq-len" if number else ""
        raise DataError(f"{path} contains no usable prompts{reason}.")
    return Prompts(prompts, max_tokens, num_too_long, report.notes)


def read_tasks(path: Paths, *, flag: str = DATA) -> Prompts:
    """Read the tasks of an RL environment as prompts without tokens.

    A task is any JSON object; the environment interprets it. Raises DataError if a record is not a JSON object, and if
    there are no records.
    """
    tasks = list[Prompt]()
    for source in find_sources(path, flag):
        for where, record in read_records(source, ALL_COLUMNS):
            check(isinstance(record, dict), f"{where}: a task must be a JSON object.", DataError)
            tasks.append(Prompt(len(tasks), (), record))
    check(bool(tasks), f"{path} contains no tasks.", DataError)
    return Prompts(tasks, 0, 0)


def _records(path: Paths, flag: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location (file and row) of each record, and the record with a validated `prompt`."""
    for source in find_sources(path, flag):
        for where, record in read_records(source, ALL_COLUMNS):
            record = normalize_prompt(record, where)
            media = [name for names in MEDIA_FIELDS.items() for name in names if record.get(name)]
            check(
                not media,
                f"{where} has the fields {', '.join(media)}, but prompts for RL can only contain text.",
                DataError,
            )
            prompt = record["prompt"]
            if isinstance(prompt, list):
                prompt = check_messages(as_texts(prompt), f"{where}: messages")
                if prompt[-1]["role"] == "assistant":
                    raise DataError(
                        f"{where}: the last message is an assistant message, so the prompt is already answered. Remove "
                        "the message, or put the messages before it into 'prompt'."
                    )
            else:
                checked_text(prompt, "prompt", where)
            yield where, {**record, "prompt": prompt}


def _encode(
    chunk: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    report: ReadReport,
) -> Iterator[tuple[int, ...]]:
    chats = [(where, record) for where, record in chunk if isinstance(record["prompt"], list)]
    encoded = iter(_encode_chats(chats, tokenizer, template, report) if chats else ())
    for _, record in chunk:
        prompt = record["prompt"]
        yield next(encoded) if isinstance(prompt, list) else encode_text_prompt(tokenizer, prompt)


def _encode_chats(
    chats: Sequence[tuple[str, Mapping[str, Any]]],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    report: ReadReport,
) -> Iterator[tuple[int, ...]]:
    if template is None:
        raise DataError(
            f"{chats[0][0]}: the prompt consists of messages, but there is no chat template to render them. "
            "Start from a chat model (--init-from), or set --chat-template (DataConfig.chat_template) to a Jinja file."
        )
    requests = [
        Conversation(record["prompt"], template_variables(record, where), add_generation_prompt=True)
        for where, record in chats
    ]
    for (where, _), request, text in zip(chats, requests, template.render_many(requests), strict=True):
        if isinstance(text, ConversionError):
            raise DataError(f"{where}: {text}") from text
        report.notes.update(omissions_of_prompt(request, text, f"{where}: {template.where}"))
        yield encode_rendered(tokenizer, text.text, text.literal)


def encode_rendered(tokenizer: Tokenizer, text: str, literal: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """Tokenize text that was rendered by a chat template.

    `literal`: character spans `[start, stop)` in which the names of special tokens are tokenized as ordinary text.
    """
    if isinstance(tokenizer, JsonTokenizer):
        return tuple(tokenizer.encode(text, special=True, literal=[(start, stop) for start, stop in literal]).tolist())
    return tuple(tokenizer.encode(text).tolist())


def encode_text_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Tokenize a prompt without a chat template, in the same way as the completions API of the server."""
    return tuple(prompt_ids(tokenizer, text).tolist())


class PromptBatches:
    """Infinite, resumable iterator over the prompts of each step, shuffled again in each epoch.

    All processes get the same prompts.

    **Arguments:**

    - `count`: number of prompts per step.
    - `held_out`: make one pass in the order of the records instead.
    """

    def __init__(self, prompts: Prompts, *, count: int, seed: int, held_out: bool = False):
        self.prompts = prompts
        self._count = count
        self._seed = seed
        self._held_out = held_out
        self._num_taken = 0

    def __iter__(self) -> Iterator[list[Prompt]]:
        return self

    def __next__(self) -> list[Prompt]:
        if not self._held_out:
            return self.take(self._count)
        remaining = len(self.prompts.prompts) - self._num_taken
        if remaining <= 0:
            raise StopIteration
        return self.take(min(self._count, remaining))

    def __enter__(self) -> "PromptBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, numbered by their positions in the sequence of all prompts of the run."""
        num_prompts = len(self.prompts.prompts)
        prompts = []
        for number in range(self._num_taken, self._num_taken + count):
            epoch, index = divmod(number, num_prompts)
            if not self._held_out:
                index = int(_order(num_prompts, f"{self._seed}/{epoch}")[index])
            prompts.append(self.prompts.prompts[index]._replace(number=number))
        self._num_taken += count
        return prompts

    def close(self) -> None:
        """Do nothing: this iterator has no background thread."""

    def rewind(self) -> "PromptBatches":
        """Go back to the first prompt."""
        self._num_taken = 0
        return self

    @property
    def epochs(self) -> float:
        """Number of passes over the prompts so far."""
        return self._num_taken / len(self.prompts.prompts)

    def source_epochs(self) -> Mapping[str, float]:
        """Return an empty mapping: mixtures of prompts are not supported."""
        return {}

    def describe(self, start: int, steps: int) -> str:
        """Return a summary of the prompts; the arguments are ignored."""
        return self.prompts.describe()

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON values: the number of prompts so far, the hash of the prompts, and the settings."""
        return {"prompt": self._num_taken, **self._identity()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume exactly where `get_state` was called.

        Raises DataError if `state` was made with other prompts or other settings.
        """
        check_same_data(state, self._identity())
        self._num_taken = int(state["prompt"])

    def _identity(self) -> dict[str, Any]:
        return {"prompts": self.prompts.content_hash, "seed": self._seed, "held_out": self._held_out}


@functools.lru_cache(2)
def _order(count: int, seed: str) -> np.ndarray:
    return permutation(count, seed)
