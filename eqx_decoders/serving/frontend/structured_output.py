"""Answers of a form: JSON of a schema, a regular expression, one of some texts, a grammar (llguidance, extra "serve").

The library walks the grammar and the vocabulary together, in microseconds for a token. Grammars come from strangers:
its limits on their size and on the work for one token bound what they may cost. Compiling one may take a second of a
thread, which nothing can end: two at once, clients in turn, and each form once.
"""

import asyncio
import collections
import concurrent.futures
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from eqx_decoders.errors import ConfigError, check, need_extra
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.serving.engine.request import Constraint
from eqx_decoders.serving.frontend.fair_turns import FairTurns
from eqx_decoders.serving.http.json_fields import ApiError


Kind = Literal["json", "regex", "choice", "grammar"]

BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"  # between the parts of JSON: a model may otherwise write spaces for ever
KEPT, KEPT_SECONDS = 32, 2.0  # grammars, compiled or found to be none; a second makes some 100 MB
MOST = 100_000  # characters of one
SYMBOLS = 100_000  # of its productions
THREADS, WAITING = 2, 64  # that compile, and forms that wait for them
SECONDS = 30.0  # that a request waits for its form
TOLD = 300  # characters of what the library says of one


class Grammar(NamedTuple):
    """What an answer must be.

    - `kind`: `"json"`, `"regex"`, `"choice"` or `"grammar"`.
    - `content`: the JSON schema as a text, the regular expression (of Rust's crate `regex`, without look-around), the
        texts, or the grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    content: str | tuple[str, ...]


ANY_OBJECT = Grammar("json", '{"type": "object"}')


class TokenConstraint(Constraint):
    """Walks with one answer. When the form is complete, or can no more be kept, only the stop ids are allowed."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens: one bit each, the lowest of an int32 word first."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
        words[: len(mask)] = mask
        words[len(mask) :] = 0

    def accept(self, token: int) -> None:
        """The answer has gone on with this token."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the form can no more be kept, such as a limit; empty if it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class _Compiling:
    """A form on its way, whose turn it takes, how many requests wait for it, and whether a thread has begun."""

    task: asyncio.Future[Any]
    client, requests, begun = "", 0, False


class GrammarCompiler:
    """Compiles what answers must be for one vocabulary.

    **Arguments:**

    - `tokenizer`: of the model.
    - `vocab_size`: the number of its logits.
    - `stop_ids`: all ids that end an answer: the only ones that are allowed when a form is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._lock, self._first = threading.Lock(), threading.Lock()  # of what is known, and of the vocabulary
        self._vocabulary: Any = None
        # matchers or ConfigErrors, each with the processor time that it took
        self._known: collections.OrderedDict[Grammar, tuple[Any, float]] = collections.OrderedDict()
        self._compiling: dict[Grammar, _Compiling] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "forms")
        self._turns = FairTurns("their forms", THREADS, WAITING)

    def warm_up(self) -> None:
        """Read the vocabulary, and compile what "any object" is, in a thread: no request should wait for these."""
        self._threads.submit(self._find, ANY_OBJECT)

    def close(self) -> None:
        """End the threads when they have compiled what they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, form: Grammar, count: int, client: str = "") -> list[TokenConstraint]:
        """Compile a form beside the event loop, and give what keeps so many answers in it.

        Raises ConfigError, with the library's reason, for one that is none, and ApiError 429 where too many wait, or
        too long.
        """
        found = self._look_up(form)
        if found is None:
            _check_size(form)
        while found is None:
            work = self._compiling.get(form) or self._begin(form, client)
            try:
                found = await self._wait(form, work)
            except ApiError:
                # another client's turn, which was taken from it for having too many, is no reason to refuse this one
                if work.client == client or not work.task.done():
                    raise
        return _copies(found, count)

    def _begin(self, form: Grammar, client: str) -> _Compiling:
        work = self._compiling[form] = _Compiling()
        work.client = client
        work.task = asyncio.ensure_future(self._in_turn(form, client, work))

        def ended(task: asyncio.Future[Any]) -> None:
            _ = task.cancelled() or task.exception()  # also where nobody waits any more to hear it
            if self._compiling.get(form) is work:
                del self._compiling[form]

        work.task.add_done_callback(ended)  # before those who wait are woken
        return work

    async def _in_turn(self, form: Grammar, client: str, work: _Compiling) -> Any:
        async with self._turns.turn(client):
            work.begun = True
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._find, form)

    async def _wait(self, form: Grammar, work: _Compiling) -> Any:
        """What it gives. When nobody waits any more, it is dropped, unless a thread has begun."""
        work.requests += 1
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(work.task)
        except TimeoutError as error:
            told = f"The form that was asked for was not compiled within {SECONDS:g} s: make it simpler, or come again"
            raise ApiError(429, f"{told} later.", code="busy", retry_after=1) from error
        finally:
            work.requests -= 1
            if work.requests == 0 and not work.begun and not work.task.done():
                self._compiling.pop(form, None)
                work.task.cancel()

    def _look_up(self, form: Grammar) -> Any:
        with self._lock:
            if form in self._known:
                self._known.move_to_end(form)
            return self._known.get(form, (None, 0.0))[0]

    def _find(self, form: Grammar) -> Any:
        """A matcher, or the ConfigError that says why there is none."""
        found = self._look_up(form)
        if found is None:
            _check_size(form)
            begun = time.thread_time()
            try:
                found = self._compile(form)
            except ConfigError as error:
                found = ConfigError(str(error))  # without the frames of its traceback
            self._keep(form, found, time.thread_time() - begun)
        return found

    def _keep(self, form: Grammar, found: Any, seconds: float) -> None:
        with self._lock:
            self._known[form] = found, 0.0 if isinstance(found, ConfigError) else seconds
            if ANY_OBJECT in self._known:
                self._known.move_to_end(ANY_OBJECT)  # which many ask for
            spent = sum(each for _, each in self._known.values())
            while len(self._known) > KEPT or (spent > KEPT_SECONDS and len(self._known) > 2):
                spent -= self._known.popitem(last=False)[1][1]

    def _compile(self, form: Grammar) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise need_extra("llguidance", "serve") from error
        check(len(self._stop_ids) > 0, f"{form.kind} needs a model with a token that ends its answers.")
        with self._first:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(llguidance, self._tokenizer, self._vocab_size, self._stop_ids)
        try:
            grammar = _grammar(llguidance.LLMatcher, form)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{form.kind} cannot be read: {_first_line(str(error))}.") from error
        limits = llguidance.LLParserLimits(max_grammar_size=SYMBOLS, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large for its lexer shows here
        if matcher.is_error():
            raise ConfigError(f"{form.kind} cannot be kept: {_first_line(matcher.get_error())}.")
        return matcher


def _check_size(form: Grammar) -> None:
    size = sum(map(len, form.content))
    check(size <= MOST, f"{form.kind} has {size:,} characters: at most {MOST:,} are taken.")


def _copies(found: Any, count: int) -> list[TokenConstraint]:
    """Of a matcher; a ConfigError is raised."""
    if isinstance(found, ConfigError):
        raise ConfigError(str(found))
    return [TokenConstraint(found.deep_copy()) for _ in range(count)]


def _grammar(matcher: Any, form: Grammar) -> str:
    """What the library compiles."""
    if isinstance(form.content, tuple):
        return matcher.grammar_from_lark("start: " + " | ".join(_quoted(text) for text in form.content))
    if form.kind == "json":
        return matcher.grammar_from_json_schema(form.content, overrides={"whitespace_pattern": BLANKS})
    return matcher.grammar_from_regex(form.content) if form.kind == "regex" else form.content


def _quoted(text: str) -> str:
    """A text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which the library wants to be escaped


def _first_line(text: str) -> str:
    """The beginning of what the library says; behind it stands the grammar."""
    if "coerce_one_of" in text:  # an option of the library, which clients can't set
        return "of several schemas in oneOf it is not certain that they exclude each other: give anyOf"
    lines = [line.strip() for line in text.strip().split("\n")]
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])
    return said.removeprefix("error: ")[:TOLD].rstrip(".")


class _Bytes:
    """`ByteTokenizer` as the library asks for it."""

    def __init__(self, vocab_size: int, stop_ids: Sequence[int]):
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [f"<|{index}|>".encode() for index in range(256, vocab_size)]
        self.special_token_ids = list(range(256, vocab_size))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _vocabulary(llguidance: Any, tokenizer: Tokenizer, vocab_size: int, stop_ids: list[int]) -> Any:
    options: Mapping[str, Any] = dict(n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=stop_ids)
    if isinstance(tokenizer, JsonTokenizer):
        return llguidance.LLTokenizer(tokenizer.to_json(), **options)
    wrapped = llguidance.TokenizerWrapper(_Bytes(max(vocab_size, tokenizer.vocab_size), stop_ids))
    return llguidance.LLTokenizer(wrapped, **options)
