"""Structured output (llguidance, extra "serve"): JSON of a schema, a regular expression, one of some texts, or a
grammar.

The library walks the grammar and the vocabulary together, in microseconds for a token. Grammars come from strangers:
the library's limits on their size and on the work for one token bound their cost. Compiling one may take a second of a
thread, which cannot be interrupted: two run at once, clients take turns, and each grammar is compiled once.
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
from eqx_decoders.serving.engine.sampler import Constraint
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.fair_semaphore import FairSemaphore


Kind = Literal["json", "regex", "choice", "grammar"]

BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"  # between the parts of JSON: without a limit a model may write spaces for ever
MAX_CACHED, MAX_CACHED_SECONDS = 32, 2.0  # grammars and their compilation time; a second makes some 100 MB
MAX_CHARACTERS = 100_000  # of a grammar
MAX_SYMBOLS = 100_000  # in the productions of a grammar
THREADS, MAX_WAITING = 2, 64  # compiling threads, and grammars that wait for them
SECONDS = 30.0  # that a request waits for its grammar
MAX_MESSAGE = 300  # characters of the library's error


class Grammar(NamedTuple):
    """Grammar that an answer must match.

    - `kind`: `"json"`, `"regex"`, `"choice"` or `"grammar"`.
    - `content`: the JSON schema as a text, the regular expression (of Rust's crate `regex`, without look-around), the
        texts, or the grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    content: str | tuple[str, ...]


ANY_OBJECT = Grammar("json", '{"type": "object"}')


class TokenConstraint(Constraint):
    """Constraint of one answer. When the grammar is complete, or cannot be matched, only stop ids are allowed."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens: one bit each, the lowest of an int32 word first."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
        words[: len(mask)] = mask
        words[len(mask) :] = 0

    def accept(self, token: int) -> None:
        """Advance by one token of the answer."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Reason why the grammar cannot be matched, such as a limit; empty if it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class _Compilation:
    """Compilation of a grammar that waits or runs, with the client whose turn it takes and the number of waiting
    requests.
    """

    task: asyncio.Future[Any]
    client, requests, started = "", 0, False


class GrammarCompiler:
    """Compiler of grammars for one vocabulary.

    **Arguments:**

    - `tokenizer`: the model's tokenizer.
    - `vocab_size`: number of logits.
    - `stop_ids`: all ids that end an answer: the only ones allowed when a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._vocabulary: Any = None
        # matchers or ConfigErrors, each with its compilation time
        self._cache: collections.OrderedDict[Grammar, tuple[Any, float]] = collections.OrderedDict()
        self._compiling: dict[Grammar, _Compilation] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "forms")
        self._semaphore = FairSemaphore("their forms", THREADS, MAX_WAITING)

    def warm_up(self) -> None:
        """Read the vocabulary, and compile the grammar of any object, in a thread: no request should wait for these."""
        self._threads.submit(self._compile_cached, ANY_OBJECT)

    def close(self) -> None:
        """End the threads when their current compilations are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, grammar: Grammar, count: int, client: str = "") -> list[TokenConstraint]:
        """Compile a grammar in a thread, and return `count` constraints for it.

        Raises ConfigError, with the library's reason, for an invalid one, and ApiError 429 where too many wait, or too
        long.
        """
        compiled = self._look_up(grammar)
        if compiled is None:
            _check_size(grammar)
        while compiled is None:
            compilation = self._compiling.get(grammar) or self._start(grammar, client)
            try:
                compiled = await self._wait(grammar, compilation)
            except ApiError:
                # the turn of another client was refused, since it has too many: this client tries again
                if compilation.client == client or not compilation.task.done():
                    raise
        return _copies(compiled, count)

    def _start(self, grammar: Grammar, client: str) -> _Compilation:
        compilation = self._compiling[grammar] = _Compilation()
        compilation.client = client
        compilation.task = asyncio.ensure_future(self._compile_in_thread(grammar, client, compilation))

        def on_done(task: asyncio.Future[Any]) -> None:
            _ = task.cancelled() or task.exception()  # retrieves the exception, where nobody waits any more
            if self._compiling.get(grammar) is compilation:
                del self._compiling[grammar]

        compilation.task.add_done_callback(on_done)  # before those who wait are woken
        return compilation

    async def _compile_in_thread(self, grammar: Grammar, client: str, compilation: _Compilation) -> Any:
        async with self._semaphore.acquire(client):
            compilation.started = True
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile_cached, grammar)

    async def _wait(self, grammar: Grammar, compilation: _Compilation) -> Any:
        """Return the result of a compilation. It is dropped when nobody waits any more, unless a thread has started."""
        compilation.requests += 1
        try:
            async with asyncio.timeout(SECONDS):
                return await asyncio.shield(compilation.task)
        except TimeoutError as error:
            message = f"The form that was asked for was not compiled within {SECONDS:g} s"
            remedy = "make it simpler, or come again later"
            raise ApiError(429, f"{message}: {remedy}.", code="busy", retry_after=1) from error
        finally:
            compilation.requests -= 1
            if compilation.requests == 0 and not compilation.started and not compilation.task.done():
                self._compiling.pop(grammar, None)
                compilation.task.cancel()

    def _look_up(self, grammar: Grammar) -> Any:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar, (None, 0.0))[0]

    def _compile_cached(self, grammar: Grammar) -> Any:
        """Return a matcher, or the ConfigError for an invalid grammar, from the cache or compiled."""
        compiled = self._look_up(grammar)
        if compiled is None:
            _check_size(grammar)
            start_time = time.thread_time()
            try:
                compiled = self._compile(grammar)
            except ConfigError as error:
                compiled = ConfigError(str(error))  # without the frames of its traceback
            self._store(grammar, compiled, time.thread_time() - start_time)
        return compiled

    def _store(self, grammar: Grammar, compiled: Any, seconds: float) -> None:
        with self._lock:
            self._cache[grammar] = compiled, 0.0 if isinstance(compiled, ConfigError) else seconds
            if ANY_OBJECT in self._cache:
                self._cache.move_to_end(ANY_OBJECT)  # the most common one
            spent = sum(each for _, each in self._cache.values())
            while len(self._cache) > MAX_CACHED or (spent > MAX_CACHED_SECONDS and len(self._cache) > 2):
                spent -= self._cache.popitem(last=False)[1][1]

    def _compile(self, grammar: Grammar) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise need_extra("llguidance", "serve") from error
        check(len(self._stop_ids) > 0, f"{grammar.kind} needs a model with a token that ends its answers.")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(llguidance, self._tokenizer, self._vocab_size, self._stop_ids)
        try:
            source = _to_llguidance(llguidance.LLMatcher, grammar)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{grammar.kind} cannot be read: {_first_line(str(error))}.") from error
        limits = llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large for its lexer shows here
        if matcher.is_error():
            raise ConfigError(f"{grammar.kind} cannot be kept: {_first_line(matcher.get_error())}.")
        return matcher


def _check_size(grammar: Grammar) -> None:
    length = sum(map(len, grammar.content))
    check(length <= MAX_CHARACTERS, f"{grammar.kind} has {length:,} characters: at most {MAX_CHARACTERS:,} are taken.")


def _copies(compiled: Any, count: int) -> list[TokenConstraint]:
    """Copy a matcher for each answer, or raise its ConfigError."""
    if isinstance(compiled, ConfigError):
        raise ConfigError(str(compiled))
    return [TokenConstraint(compiled.deep_copy()) for _ in range(count)]


def _to_llguidance(matcher: Any, grammar: Grammar) -> str:
    """Return the library's form of a grammar."""
    if isinstance(grammar.content, tuple):
        return matcher.grammar_from_lark("start: " + " | ".join(_quoted(text) for text in grammar.content))
    if grammar.kind == "json":
        return matcher.grammar_from_json_schema(grammar.content, overrides={"whitespace_pattern": BLANKS})
    return matcher.grammar_from_regex(grammar.content) if grammar.kind == "regex" else grammar.content


def _quoted(text: str) -> str:
    """Write a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which the library wants to be escaped


def _first_line(text: str) -> str:
    """Return the first line of the library's error; the grammar comes after it."""
    if "coerce_one_of" in text:  # an option of the library, which clients can't set
        return "of several schemas in oneOf it is not certain that they exclude each other: give anyOf"
    lines = [line.strip() for line in text.strip().split("\n")]
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])
    return error.removeprefix("error: ")[:MAX_MESSAGE].rstrip(".")


class _Bytes:
    """`ByteTokenizer` with the interface that the library needs."""

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
