"""From the engine's updates to what clients read: pieces of an answer, and the shapes of OpenAI's API around them."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.serving.engine.request import RequestOutput, TokenScore
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings, TokenTexts
from eqx_decoders.serving.http.json_fields import ApiError
from eqx_decoders.serving.http.protocol import GenerationRequest


LEAST_LOGPROB = -9999.0  # for what cannot come: JSON has no infinity


@dataclasses.dataclass(kw_only=True)
class Delta:
    """What an update adds to an answer.

    - `text`: that can be shown now.
    - `tokens`: of which the text is, or will be.
    - `scores`: of the tokens, where they are asked for; None for a prompt's first token, which has none.
    - `offsets`: where the text of each scored token begins.
    - `finish`: `"stop"` or `"length"` when the answer is complete.
    - `reason`: the stop string, or the token of `stop_token_ids`, that ended it.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    scored: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore | None] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it that a client could want."""
        return not (self.text or self.tokens or self.scored or self.finish)


class CollectedDeltas:
    """The pieces of one answer, one behind the other. Texts are joined once: no token copies a long echo."""

    def __init__(self):
        self._piece, self._texts = Delta(), list[str]()

    def add(self, other: Delta) -> None:
        """Put a piece behind the others."""
        self._texts.append(other.text)
        for name in ("tokens", "scored", "scores", "offsets"):
            getattr(self._piece, name).extend(getattr(other, name))
        self._piece.finish, self._piece.reason = other.finish, other.reason

    def whole(self) -> Delta:
        """All of them as one."""
        self._piece.text = "".join(self._texts)
        return self._piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo:
    """A prompt that stands before its answer."""

    text: str
    ids: tuple[int, ...]


class Choice:
    """One answer: takes the engine's updates, gives pieces. Streamed or not, the pieces are the same.

    **Arguments:**

    - `asked`: by the client.
    - `text`: that of the prompt whose text the answer goes on from; None for an answer that stands alone. It is copied.
    - `echo`: what stands before it.
    - `write`: False: the answer itself is not wanted, only what is before it.
    """

    def __init__(
        self,
        asked: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        text: Detokenizer | None = None,
        echo: Echo | None = None,
        write: bool = True,
    ):
        self._asked, self._tokenizer, self._echo, self._write = asked, tokenizer, echo, write
        self._text = Detokenizer(tokenizer, special=asked.special) if text is None else text.copy()
        self._stops = StopStrings(asked.stop, include=asked.include_stop)
        self._letters = 0 if echo is None else len(echo.text)  # of the whole text, before what is held back
        self.count = 0  # tokens of the answer
        self.cached = 0
        self.finished = False

    def take(self, update: RequestOutput) -> Delta:
        """What an update adds. Raises ApiError for an answer that is not completed."""
        if update.finish_reason == "error":
            raise ApiError(500, update.error or "The engine could not answer this request.")
        if update.finish_reason == "cancelled":
            raise ApiError(503, "The server is stopping: this answer was cut off.")
        self.cached = max(self.cached, update.cached_tokens)
        piece = Delta()
        if self._echo is not None and (self._asked.logprobs is None or update.prompt_scores or update.tokens):
            self._before(piece, self._echo, update.prompt_scores)
            self._echo = None
        for number, (token, score) in enumerate(itertools.zip_longest(update.tokens, update.scores)):
            last = number == len(update.tokens) - 1 and update.finish_reason is not None
            self._token(piece, token, score, update.finish_reason if last else None)
            if self.finished:
                return piece
        if update.finish_reason is not None and not self.finished:  # without a token of its own
            self._end(piece, update.finish_reason)
        return piece

    def _before(self, piece: Delta, echo: Echo, scores: Sequence[TokenScore]) -> None:
        piece.text = echo.text
        if self._asked.logprobs is None:
            return
        text, place = Detokenizer(self._tokenizer), 0
        for token, score in zip(echo.ids, [None, *scores], strict=True):
            self._score(piece, token, score, min(place, len(echo.text)))
            place += len(text.push(token))

    def _token(self, piece: Delta, token: int, score: TokenScore | None, finish: str | None) -> None:
        self.count += 1
        if not self._write:
            self.count = 0
            self._end(piece, "length")
            return
        piece.tokens.append(token)
        if self._asked.logprobs is not None:
            self._score(piece, token, score, self._letters)
        if finish != "stop":
            self._show(piece, self._text.push(token))
        elif self._asked.include_stop:
            self._show(piece, self._text.push(token), search=False)
        if self._stops.found is not None:
            self._end(piece, "stop", self._stops.found)
        elif finish is not None:
            own = finish == "stop" and token in self._asked.stop_token_ids
            self._end(piece, finish, token if own else None)

    def _score(self, piece: Delta, token: int, score: TokenScore | None, place: int) -> None:
        piece.scored.append(token)
        piece.scores.append(score)
        piece.offsets.append(place)

    def _show(self, piece: Delta, text: str, *, search: bool = True) -> None:
        self._letters += len(text)
        searched = search and self.count > self._asked.min_tokens
        piece.text += self._stops.push(text) if searched else self._stops.flush() + text

    def _end(self, piece: Delta, finish: str, reason: str | int | None = None) -> None:
        if self._write and self._stops.found is None:
            self._show(piece, self._text.flush())
            found = self._stops.found
            piece.text += self._stops.flush()
            if found is not None:
                finish, reason = "stop", found
        piece.finish, piece.reason, self.finished = finish, reason, True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of prompts and answers."""

    prompt: int
    answers: int
    cached: int

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answers,
            "total_tokens": self.prompt + self.answers,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ResponseBuilder:
    """The JSON objects of one response; those of /v1/completions and of /v1/chat/completions differ."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request_id: str, model: str, asked: GenerationRequest, texts: TokenTexts):
        self.id, self._model, self._asked, self._texts = f"{self.prefix}-{request_id}", model, asked, texts
        self._created = int(time.time())

    def whole(self, pieces: Sequence[Delta], usage: Usage, prompts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """A complete response. `prompts`: the ids of each choice's prompt, to be given back."""
        choices = [
            self._choice(number, piece) | self._ids(piece, prompts.get(number)) for number, piece in enumerate(pieces)
        ]
        return self._frame(self.whole_object, choices) | {"usage": usage.body}

    def chunk(self, number: int, piece: Delta, prompt: Sequence[int] | None) -> dict[str, Any]:
        """A part of a streamed response."""
        choice = self._delta(number, piece) | self._ids(piece, prompt)
        return self._frame(self.chunk_object, [choice]) | ({"usage": None} if self._asked.include_usage else {})

    def last(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind all others that has the usage."""
        return self._frame(self.chunk_object, []) | {"usage": usage.body}

    def first(self, number: int) -> dict[str, Any] | None:
        """The chunk before all others of a choice, where there is one."""
        return None

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _ids(self, piece: Delta, prompt: Sequence[int] | None) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        found: dict[str, Any] = {"token_ids": piece.tokens}
        return found if prompt is None else {**found, "prompt_token_ids": list(prompt)}

    def _choice(self, number: int, piece: Delta) -> dict[str, Any]:
        return {
            "index": number,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish,
            "stop_reason": piece.reason,
        }

    def _delta(self, number: int, piece: Delta) -> dict[str, Any]:
        return self._choice(number, piece)

    def _logprobs(self, piece: Delta) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        return {
            "tokens": [self._texts.key(token) for token in piece.scored],
            "token_logprobs": [None if score is None else number(score.logprob) for score in piece.scores],
            "top_logprobs": [None if score is None else self._top(score) for score in piece.scores],
            "text_offset": piece.offsets,
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        """The most likely tokens and the chosen one; of two with one text the likelier counts."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            key = self._texts.key(token)
            found[key] = max(number(logprob), found.get(key, LEAST_LOGPROB))
        return found


class ChatResponseBuilder(ResponseBuilder):
    """The JSON objects of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first(self, number: int) -> dict[str, Any] | None:
        choice = {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        frame = self._frame(self.chunk_object, [choice | {"finish_reason": None}])
        return frame | ({"usage": None} if self._asked.include_usage else {})

    def _choice(self, number: int, piece: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._with_end({"index": number, "message": message}, piece)

    def _delta(self, number: int, piece: Delta) -> dict[str, Any]:
        return self._with_end({"index": number, "delta": {"content": piece.text} if piece.text else {}}, piece)

    def _with_end(self, choice: dict[str, Any], piece: Delta) -> dict[str, Any]:
        end = {"finish_reason": piece.finish, "stop_reason": piece.reason}
        return choice | {"logprobs": self._logprobs(piece)} | end

    def _logprobs(self, piece: Delta) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        return {"content": [self._scored(score) for score in piece.scores if score is not None], "refusal": None}

    def _scored(self, score: TokenScore) -> dict[str, Any]:
        top = [self._named(token, logprob) for token, logprob in score.top[: self._asked.logprobs]]
        return {**self._named(score.token, score.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": number(logprob), "bytes": list(self._texts.content(token))}


def number(logprob: float) -> float:
    """A log-probability as JSON has numbers: -9999 for those that are not finite, or less."""
    return float(logprob) if logprob >= LEAST_LOGPROB and logprob != float("inf") else LEAST_LOGPROB
