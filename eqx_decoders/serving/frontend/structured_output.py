"""Structured output with llguidance (extra "serve"): JSON of a schema, a regular expression, a choice or a grammar.

llguidance walks the grammar and the vocabulary together, in microseconds per token. Its limits on the size of grammars
and on the work for one token bound the cost of the grammars that clients send. A compilation may take a second of a
thread, and cannot be interrupted. Two threads compile, and requests for the same grammar share one compilation.
"""

import asyncio
import collections
import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.errors import ConfigError, check, missing_package
from eqx_decoders.io.text.tokenizer import JsonTokenizer, RenamedTokens, Tokenizer
from eqx_decoders.serving.engine.sampler import Constraint
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.completion_grammar import (
    ANY_OBJECT as ANY_OBJECT,
    MARKERS,
    CompletionGrammar,
    Grammar,
    Kind as Kind,
    errors_of_tool,
    simplify_choice,
    to_llguidance,
    with_prepared_schemas,
    without_forcing,
)
from eqx_decoders.serving.frontend.json_schemas import schemas_to_check


MAX_CACHED, MAX_CACHED_SECONDS = 32, 2.0  # grammars and their compilation time; a second makes some 100 MB
MAX_CHARACTERS = 100_000  # of a grammar
MAX_SYMBOLS = 100_000  # in the productions of a grammar
THREADS = 2  # that compile grammars
MAX_SECONDS = 30.0  # that a request waits for its grammar
MAX_MESSAGE = 300  # characters of an error of llguidance
MAX_RESERVED = 1024  # tokens that are reserved for the completion after the reasoning


AnyGrammar = Grammar | CompletionGrammar


class CompiledGrammar(NamedTuple):
    """Compiled grammar of a completion.

    - `matcher`: matcher of the complete completion.
    - `ending`: matcher of the completion from the end marker of the reasoning on; None if there is no reasoning.
    - `begin`, `end`: markers around the reasoning. `begin` is empty if the prompt ends with it.
    - `token_bytes`: function that returns the bytes of a token. For a control token, these are its name.
    """

    matcher: Any
    ending: Any = None
    begin: bytes = b""
    end: bytes = b""
    token_bytes: Callable[[int], bytes] = bytes


class TokenConstraint(Constraint):
    """Constraint of one completion. When the grammar is complete, or cannot be matched, only stop ids are allowed.

    **Arguments:**

    - `compiled`: grammar of the completion.
    - `max_reasoning`: maximum number of reasoning tokens. After these, the end marker of the reasoning is forced. None:
        unlimited.
    """

    def __init__(self, compiled: CompiledGrammar, max_reasoning: int | None = None):
        self._matcher = compiled.matcher.deep_copy()
        self._compiled, self._max_reasoning = compiled, max_reasoning
        self._count, self._text = 0, b""
        self._in_reasoning = compiled.ending is not None and max_reasoning is not None
        self._started = not compiled.begin
        if self._in_reasoning and self._started and max_reasoning == 0:
            self._end_reasoning()

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of allowed tokens: one bit each, the lowest of an int32 word first."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
        words[: len(mask)] = mask
        words[len(mask) :] = 0

    def accept(self, token: int) -> None:
        """Advance by one token of the completion."""
        self._matcher.consume_token(token)
        if self._in_reasoning:
            self._follow_reasoning(token)

    def _follow_reasoning(self, token: int) -> None:
        """Add a token to the reasoning. The reasoning is ended after `max_reasoning` tokens."""
        begin, end = self._compiled.begin, self._compiled.end
        self._count += 1
        self._text += self._compiled.token_bytes(token)
        if not self._started:
            self._started = self._text.startswith(begin)
            self._in_reasoning = self._started or begin.startswith(self._text)
        if self._started and end in self._text:
            self._in_reasoning = False
        elif self._started and self._count >= (self._max_reasoning or 0):
            self._end_reasoning()
        if self._started:
            self._text = self._text[-len(end) :]

    def _end_reasoning(self) -> None:
        """Force the end marker of the reasoning."""
        self._in_reasoning = False
        self._matcher = self._compiled.ending.deep_copy()

    @property
    def error(self) -> str:
        """Reason why the grammar cannot be matched, such as a limit; empty if it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


@dataclasses.dataclass
class _Compilation:
    """Compilation of a grammar in a thread, and the number of requests that wait for it."""

    future: concurrent.futures.Future[Any]
    num_requests: int = 0


class GrammarCompiler:
    """Compiler of grammars for one vocabulary.

    **Arguments:**

    - `tokenizer`: the model's tokenizer.
    - `vocab_size`: number of logits.
    - `stop_ids`: all ids that end a completion: the only ones allowed when a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._lock, self._vocabulary_lock = threading.Lock(), threading.Lock()
        self._control: Mapping[str, int] = {}  # ids of the control tokens by name
        self._vocabulary: Any = None
        # matchers or ConfigErrors, each with its compilation time
        self._cache: collections.OrderedDict[AnyGrammar, tuple[Any, float]] = collections.OrderedDict()
        self._compiling: dict[AnyGrammar, _Compilation] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, "grammars")

    def warm_up(self) -> None:
        """Read the vocabulary, and compile the grammar of any JSON object, in a thread before the first request."""
        self._threads.submit(self._compile_cached, ANY_OBJECT)

    def close(self) -> None:
        """End the threads when their current compilations are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self, grammar: AnyGrammar, count: int, max_tokens: int | None = None) -> list[TokenConstraint]:
        """Compile a grammar in a thread, and return `count` constraints for it.

        `max_tokens`: maximum number of tokens of a completion. If there is reasoning, some of these tokens are reserved
        for the completion after the reasoning (see `reserved_tokens`).

        Raises ConfigError, with llguidance's reason, for an invalid grammar. Raises ApiError 429 if the compilation
        takes too long. If this is cancelled, and no other request waits for the grammar, it is not compiled.
        """
        compiled = self._look_up(grammar)
        if compiled is None:
            _check_size(grammar)
            compiled = await self._compile_in_thread(grammar)
        if isinstance(compiled, ConfigError):
            raise ConfigError(str(compiled))
        limit = None if max_tokens is None else max_tokens - reserved_tokens(max_tokens)
        return [TokenConstraint(compiled, limit) for _ in range(count)]

    async def _compile_in_thread(self, grammar: AnyGrammar) -> Any:
        compilation = self._compiling.get(grammar)
        if compilation is None:
            compilation = self._compiling[grammar] = _Compilation(self._threads.submit(self._compile_cached, grammar))
            compilation.future.add_done_callback(lambda _: self._compiling.pop(grammar, None))
        compilation.num_requests += 1
        try:
            async with asyncio.timeout(MAX_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(compilation.future))
        except TimeoutError as error:
            raise ApiError(
                429,
                f"The grammar of the request was not compiled within {MAX_SECONDS:g} s. Simplify it, or try later.",
                code="busy",
                retry_after=1,
            ) from error
        finally:
            compilation.num_requests -= 1
            if compilation.num_requests == 0:
                compilation.future.cancel()  # no effect if a thread has started

    def _look_up(self, grammar: AnyGrammar) -> Any:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar, (None, 0.0))[0]

    def _compile_cached(self, grammar: AnyGrammar) -> Any:
        """Return the matchers of a grammar, or the ConfigError for an invalid grammar, from the cache or compiled."""
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

    def _store(self, grammar: AnyGrammar, compiled: Any, seconds: float) -> None:
        with self._lock:
            self._cache[grammar] = compiled, 0.0 if isinstance(compiled, ConfigError) else seconds
            if ANY_OBJECT in self._cache:
                self._cache.move_to_end(ANY_OBJECT)  # the most common grammar
            spent = sum(seconds for _, seconds in self._cache.values())
            while len(self._cache) > MAX_CACHED or (spent > MAX_CACHED_SECONDS and len(self._cache) > 2):
                spent -= self._cache.popitem(last=False)[1][1]

    def _compile(self, grammar: AnyGrammar) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise missing_package("llguidance", "serve") from error
        check(len(self._stop_ids) > 0, f"{grammar.label} needs a model with a token that ends its completions.")
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary, self._control = _vocabulary(
                    llguidance, self._tokenizer, self._vocab_size, self._stop_ids
                )
        if isinstance(grammar, Grammar):
            grammar = CompletionGrammar(grammar)
        grammar = with_prepared_schemas(simplify_choice(grammar, self._control))
        matcher = self._matcher(llguidance, grammar, reasoning_ends=False)
        self._check_subschemas(llguidance, grammar)
        if not grammar.end_marker:
            return CompiledGrammar(matcher)
        ending = self._matcher(llguidance, grammar, reasoning_ends=True)
        names = {token: name.encode() for name, token in self._control.items()}
        vocabulary = self._vocabulary

        def token_bytes(token: int) -> bytes:
            return names[token] if token in names else vocabulary.decode_bytes([token])

        begin, end = grammar.begin_marker.encode(), grammar.end_marker.encode()
        return CompiledGrammar(matcher, ending, begin, end, token_bytes)

    def _matcher(self, llguidance: Any, grammar: CompletionGrammar, reasoning_ends: bool) -> Any:
        source = to_llguidance(grammar, self._control, self._stop_ids, reasoning_ends=reasoning_ends)
        if self._vocabulary.decode_str(self._vocabulary.tokenize_str(source)) != source:
            source = without_forcing(source)
        matcher = self._start_matcher(llguidance, source)
        if matcher.is_error():
            self._check_tools(llguidance, grammar)
            raise ConfigError(f"{grammar.label} is not supported: {_first_line(matcher.get_error())}.")
        return matcher

    def _check_tools(self, llguidance: Any, grammar: CompletionGrammar) -> None:
        """Raise ConfigError for a tool whose JSON Schema llguidance does not support."""
        for name, schema in grammar.schemas:
            if name is None:
                continue
            matcher = self._start_matcher(llguidance, _source_of(schema))
            if matcher.is_error():
                with errors_of_tool(name):
                    raise ConfigError(f"The JSON Schema is not supported: {_first_line(matcher.get_error())}.")

    def _start_matcher(self, llguidance: Any, source: str) -> Any:
        limits = llguidance.LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # raises the errors of its lexer, such as a regular expression that is too large
        return matcher

    def _check_subschemas(self, llguidance: Any, grammar: CompletionGrammar) -> None:
        """Raise ConfigError for a subschema that no value matches. A completion that reaches it could not continue."""
        for name, schema in grammar.schemas:
            for path, subschema in schemas_to_check(schema):
                matcher = self._start_matcher(llguidance, _source_of(subschema))
                if not matcher.is_error() and matcher.is_stopped():
                    with errors_of_tool(name):
                        raise ConfigError(
                            f"Invalid JSON Schema: no value matches all rules of `{path[:MAX_MESSAGE]}`. "
                            "Change the rules."
                        )


def _source_of(schema: Any) -> str:
    """Return the grammar of llguidance for a JSON Schema."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def reserved_tokens(max_tokens: int) -> int:
    """Return the number of tokens that are reserved for the completion after the reasoning."""
    return min(3 * max_tokens // 4, MAX_RESERVED)


def _check_size(grammar: AnyGrammar) -> None:
    length = sum(map(len, grammar.content)) if isinstance(grammar, Grammar) else grammar.size
    check(
        length <= MAX_CHARACTERS,
        f"{grammar.label} has {length:,} characters. At most {MAX_CHARACTERS:,} are supported. Make it shorter.",
    )


def _first_line(text: str) -> str:
    """Return the first line of an error of llguidance. The grammar comes after it."""
    if "coerce_one_of" in text:  # an option of llguidance, which clients cannot set
        return "the schemas of `oneOf` may overlap. Use `anyOf` instead"
    lines = [line.strip() for line in text.strip().split("\n")]
    error = next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])
    error = error.partition("following special tokens")[0]  # llguidance's names of the control tokens follow
    return error.removeprefix("error: ")[:MAX_MESSAGE].rstrip(" ;,").rstrip(".")


class _Bytes:
    """`ByteTokenizer` with the interface that llguidance requires."""

    def __init__(self, vocab_size: int, stop_ids: Sequence[int]):
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [f"<|{index}|>".encode() for index in range(256, vocab_size)]
        self.special_token_ids = list(range(256, vocab_size))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _vocabulary(
    llguidance: Any, tokenizer: Tokenizer, vocab_size: int, stop_ids: list[int]
) -> tuple[Any, Mapping[str, int]]:
    """Return the vocabulary for llguidance, and the ids of the control tokens by name.

    The control tokens have other names in llguidance's vocabulary. llguidance tokenizes text that a grammar forces:
    with the original names, a literal that contains the name of a control token would become this token.
    """
    options: Mapping[str, Any] = dict(n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=stop_ids)
    if isinstance(tokenizer, JsonTokenizer):
        content = tokenizer.to_json()
        control = {
            token["content"]: token["id"]
            for token in json.loads(content)["added_tokens"]
            if token["content"] and (token["special"] or token["content"] in MARKERS or token["id"] in stop_ids)
        }
        return llguidance.LLTokenizer(RenamedTokens(content, tuple(control)).inner.to_str(), **options), control
    wrapped = llguidance.TokenizerWrapper(_Bytes(max(vocab_size, tokenizer.vocab_size), stop_ids))
    return llguidance.LLTokenizer(wrapped, **options), {}
