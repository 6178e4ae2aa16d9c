"""Answers of a form: JSON of a schema, a regular expression, one of some texts, a grammar (llguidance, extra "serve").

The library walks the grammar and the vocabulary together, in microseconds for a token. Grammars come from strangers:
its limits on their size and on the work for one token bound what they may cost.
"""

import collections
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from eqx_decoders.errors import ConfigError, check, need_extra
from eqx_decoders.io.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.serving.request import Constraint


Kind = Literal["json", "regex", "choice", "grammar"]

BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"  # between the parts of JSON: a model may otherwise write spaces for ever
KEPT = 32  # compiled grammars
MOST = 500_000  # characters of one
TOLD = 300  # characters of what the library says of one


class Form(NamedTuple):
    """What an answer must be.

    - `kind`: `"json"`, `"regex"`, `"choice"` or `"grammar"`.
    - `content`: the JSON schema as a text, the regular expression (of Rust's crate `regex`, without look-around), the
        texts, or the grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    content: str | tuple[str, ...]


ANY_OBJECT = Form("json", '{"type": "object"}')


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


class Forms:
    """Compiles what answers must be for one vocabulary. May be called from any thread.

    **Arguments:**

    - `tokenizer`: of the model.
    - `vocab_size`: the number of its logits.
    - `stop_ids`: all ids that end an answer: the only ones that are allowed when a form is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._known: collections.OrderedDict[Form, Any] = collections.OrderedDict()

    def constraints(self, form: Form, count: int) -> list[TokenConstraint]:
        """What keeps so many answers in a form. Raises ConfigError, with the library's reason, for one that is none."""
        size = sum(map(len, form.content))
        check(size <= MOST, f"{form.kind} has {size:,} characters: at most {MOST:,} are taken.")
        with self._lock:
            if form not in self._known:
                self._known[form] = self._compile(form)
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(form)
            return [TokenConstraint(self._known[form].deep_copy()) for _ in range(count)]

    def _compile(self, form: Form) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise need_extra("llguidance", "serve") from error
        check(len(self._stop_ids) > 0, f"{form.kind} needs a model with a token that ends its answers.")
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(llguidance, self._tokenizer, self._vocab_size, self._stop_ids)
        try:
            grammar = _grammar(llguidance.LLMatcher, form)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{form.kind} cannot be read: {_first_line(str(error))}.") from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too large for its lexer shows here
        if matcher.is_error():
            raise ConfigError(f"{form.kind} cannot be kept: {_first_line(matcher.get_error())}.")
        return matcher


def _grammar(matcher: Any, form: Form) -> str:
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
