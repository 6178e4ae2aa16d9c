"""Conversion of the outputs of the engine to responses in the format of OpenAI's API."""

import dataclasses
import hashlib
import itertools
import json
import math
import string
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from eqx_decoders.io.text.output_parsing.formats import FunctionCall, ToolFormatName
from eqx_decoders.io.text.output_parsing.truncated_calls import TruncatedCall
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer
from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.completion_reader import CompletionParts, CompletionReader
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings, TokenTexts
from eqx_decoders.serving.frontend.prompts import PreparedPrompt
from eqx_decoders.serving.http.engine_thread import RequestOutputs
from eqx_decoders.serving.http.protocol import CompletionRequest, GenerationRequest
from eqx_decoders.serving.http.response_types import (
    AnyChoice,
    AnyResponse,
    AssistantMessage,
    CachedTokens,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Classification,
    CompletedToolCall,
    Completion,
    CompletionChoice,
    Logprobs,
    MessageDelta,
    ScoredText,
    ScoredToken,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)


ID_CHARACTERS = string.ascii_letters + string.digits
MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


@dataclasses.dataclass(kw_only=True)
class Delta:
    """Text, tokens and tool calls that an output of the engine adds to a completion.

    - `text`: content that further tokens cannot change.
    - `tokens`: tokens of the output. Some of their text may still be buffered.
    - `scored`, `scores`: tokens and their log-probs, if the request has `logprobs`; None for the first prompt token.
    - `offsets`: positions of the scored tokens in the text.
    - `finish`: `"stop"` or `"length"` when the completion is finished.
    - `reason`: the stop string, or the token of `stop_token_ids`, that ended the completion.
    - `reasoning`: text of the reasoning.
    - `was_reasoning`: all content and calls of earlier deltas belong to the reasoning.
    - `discards_scores`: the scores of earlier deltas belong to the reasoning and are discarded.
    - `calls`: complete tool calls. If a call is required, also a call that is cut off by the end of the completion.
    - `first_call`: index in the completion of the first call in `calls`.
    - `has_called`: the completion up to this delta has tool calls.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    scored: list[int] = dataclasses.field(default_factory=list)
    scores: list[TokenScore | None] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    reason: str | int | None = None
    reasoning: str = ""
    was_reasoning: bool = False
    discards_scores: bool = False
    calls: list[FunctionCall | TruncatedCall] = dataclasses.field(default_factory=list)
    first_call: int = 0
    has_called: bool = False

    def clear_scores(self) -> None:
        """Remove all scored tokens."""
        self.scored, self.scores, self.offsets = [], [], []

    def add_scores(self, other: "Delta") -> None:
        """Append the scored tokens of another delta."""
        self.scored += other.scored
        self.scores += other.scores
        self.offsets += other.offsets

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send to the client."""
        return not (self.text or self.reasoning or self.calls or self.tokens or self.scored or self.finish)


class CollectedDeltas:
    """Concatenation of the deltas of one completion. Texts are joined once, so that no token copies a long echo."""

    def __init__(self):
        self._delta = Delta()
        self._texts, self._reasoning_texts = list[str](), list[str]()

    def add(self, other: Delta) -> None:
        """Append a delta."""
        if other.was_reasoning:
            self._reasoning_texts += self._texts
            self._texts, self._delta.calls = [], []
        if other.discards_scores:
            self._delta.clear_scores()
        self._texts.append(other.text)
        self._reasoning_texts.append(other.reasoning)
        if other.was_reasoning:
            self._reasoning_texts = ["".join(self._reasoning_texts).strip()]
        self._delta.tokens += other.tokens
        self._delta.calls += other.calls
        self._delta.add_scores(other)
        self._delta.finish, self._delta.reason, self._delta.has_called = other.finish, other.reason, other.has_called

    def join(self) -> Delta:
        """Return the concatenation as one delta."""
        self._delta.text, self._delta.reasoning = "".join(self._texts), "".join(self._reasoning_texts)
        return self._delta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Echo:
    """Prompt that is returned before its completion."""

    text: str
    ids: tuple[int, ...]


class Choice:
    """Converter of the outputs of the engine to the deltas of one completion. Streaming does not change the deltas.

    **Arguments:**

    - `request`: request of the client.
    - `text`: detokenizer of the prompt, which is copied; None: the text of the completion does not continue a prompt.
    - `echo`: prompt to return before the completion.
    - `wanted`: False: only the echo is returned.
    - `reader`: reader that splits the completion into reasoning, content and tool calls; None: all text is content.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        text: Detokenizer | None = None,
        echo: Echo | None = None,
        wanted: bool = True,
        reader: CompletionReader | None = None,
    ):
        self._request, self._tokenizer, self._echo, self._wanted = request, tokenizer, echo, wanted
        self._reader = reader
        special = not request.skip_special_tokens
        self._text = Detokenizer(tokenizer, special=special) if text is None else text.copy()
        self._stops = StopStrings(request.stops, include=request.include_stop_str_in_output)
        if reader is not None:
            reader.stops = self._stops
        self._stop_tokens = stop_tokens(request, tokenizer)
        self._length = 0 if echo is None else len(echo.text)  # of the text, including buffered text
        self._num_calls, self._has_called = 0, False
        self._undecided = Delta()  # scores of tokens that may belong to the start of the reasoning
        self.count = 0  # tokens of the completion
        self.cached = 0
        self.finished = False

    @property
    def engine_stop_ids(self) -> tuple[int, ...]:
        """Stop tokens of the request for the engine. Empty if the model reasons: the engine would end the reasoning."""
        return () if self._reader is not None and self._reader.may_reason else self._request.stop_token_ids

    def take(self, output: RequestOutput) -> Delta:
        """Return the delta of an output. Raises ApiError if the request failed or was cancelled."""
        if output.finish_reason == "error":
            raise ApiError(500, output.error or "The engine failed to process this request.")
        if output.finish_reason == "cancelled":
            raise ApiError(503, "The server is stopping and has cancelled this request.")
        self.cached = max(self.cached, output.cached_tokens)
        delta = Delta(first_call=self._num_calls)
        if self._echo is not None and (self._request.alternatives is None or output.prompt_scores or output.tokens):
            self._add_echo(delta, self._echo, output.prompt_scores)
            self._echo = None
        for index, (token, score) in enumerate(itertools.zip_longest(output.tokens, output.scores)):
            last = index == len(output.tokens) - 1 and output.finish_reason is not None
            self._add_token(delta, token, score, output.finish_reason if last else None)
            if self.finished:
                break
        if output.finish_reason is not None and not self.finished:  # it finished without a new token
            self._finish(delta, output.finish_reason)
        self._num_calls += len(delta.calls)
        self._has_called = bool(delta.calls) or (self._has_called and not delta.was_reasoning)
        delta.has_called = self._has_called
        return delta

    def _add_echo(self, delta: Delta, echo: Echo, scores: Sequence[TokenScore]) -> None:
        delta.text = echo.text
        if self._request.alternatives is None:
            return
        text, offset = Detokenizer(self._tokenizer), 0
        for token, score in zip(echo.ids, [None, *scores], strict=True):
            piece, start = text.push_with_offset(token)
            self._add_score(delta, token, score, min(offset + start, len(echo.text)))
            offset += len(piece)

    def _add_token(self, delta: Delta, token: int, score: TokenScore | None, finish: str | None) -> None:
        self.count += 1
        if not self._wanted:
            self.count = 0
            self._finish(delta, "length")
            return
        delta.tokens.append(token)
        reason = self._stop_reason(token)
        if reason is not None:
            finish = "stop"
        started_in_reasoning = self._reader is not None and self._reader.in_reasoning
        offset, ended_reasoning = self._length, False
        is_pushed = finish != "stop" or self._request.include_stop_str_in_output
        if is_pushed:
            search = finish != "stop" and self.count > self._request.min_tokens
            if self._reader is None:
                offset += self._add_text(delta, token, search=search)
            else:
                parts = self._reader.push(token, search=search)
                self._add_parts(delta, parts)
                ended_reasoning = parts.was_reasoning
        if self._request.alternatives is not None:
            if ended_reasoning and not self._request.return_token_ids:
                delta.clear_scores()
                delta.discards_scores, self._undecided = True, Delta()
            is_content = not (started_in_reasoning or (ended_reasoning and not delta.text))
            if is_pushed and self._reader is not None and self._reader.separates_parts(token):
                is_content, self._undecided = False, Delta()
            self._add_token_score(delta, token, score, offset, is_content=is_content)
        if self._stops.found is not None:
            self._finish(delta, "stop", self._stops.found)
        elif finish is not None:
            self._finish(delta, finish, reason)

    def _stop_reason(self, token: int) -> str | int | None:
        """Return the stop string or stop token that ends the completion at this token; None if it continues."""
        reason = self._stop_tokens.get(token)
        if reason is None or self.count <= self._request.min_tokens:
            return None
        return reason if self._reader is None or self._reader.may_stop(token) else None

    def _add_score(self, delta: Delta, token: int, score: TokenScore | None, offset: int) -> None:
        delta.scored.append(token)
        delta.scores.append(score)
        delta.offsets.append(offset)

    def _add_token_score(
        self, delta: Delta, token: int, score: TokenScore | None, offset: int, *, is_content: bool
    ) -> None:
        """Add the score of a token if it belongs to the content, or if the response contains all token ids."""
        reader = self._reader
        if reader is None or self._request.return_token_ids:
            self._add_score(delta, token, score, offset)
        elif not is_content:
            return
        elif reader.is_undecided:
            self._add_score(self._undecided, token, score, offset)
        elif reader.in_reasoning:
            self._undecided = Delta()
        else:
            self._add_undecided(delta)
            self._add_score(delta, token, score, offset)

    def _add_undecided(self, delta: Delta) -> None:
        delta.add_scores(self._undecided)
        self._undecided = Delta()

    def _add_text(self, delta: Delta, token: int, *, search: bool) -> int:
        """Add the text of a token of a completion without parts.

        Returns the position of the token's text in the new text. `search`: search for stop strings.
        """
        text, start = self._text.push_with_offset(token)
        self._length += len(text)
        delta.text += self._stops.push(text) if search else self._stops.flush() + text
        return start

    def _add_parts(self, delta: Delta, parts: CompletionParts) -> None:
        if parts.was_reasoning:
            delta.reasoning, delta.text, delta.was_reasoning = delta.reasoning + delta.text, "", True
            delta.calls = []
        delta.text, delta.reasoning = delta.text + parts.content, delta.reasoning + parts.reasoning
        delta.calls += parts.calls

    def _finish(self, delta: Delta, finish: str, reason: str | int | None = None) -> None:
        if self._wanted and self._reader is not None:
            found = self._stops.found
            self._add_parts(delta, self._reader.flush(search=self.count > self._request.min_tokens))
            if not self._reader.in_reasoning:
                self._add_undecided(delta)
            if found is None and self._stops.found is not None:
                finish, reason = "stop", self._stops.found
        elif self._wanted and self._stops.found is None:
            text = self._text.flush()
            self._length += len(text)
            delta.text += self._stops.push(text) if self.count > self._request.min_tokens else text
            stop = self._stops.found
            delta.text += self._stops.flush()
            if stop is not None:
                finish, reason = "stop", stop
        delta.finish, delta.reason, self.finished = finish, reason, True


def stop_tokens(request: GenerationRequest, tokenizer: Tokenizer) -> dict[int, str | int]:
    """Return the stop tokens of a request, with the `stop_reason` of each token.

    A stop string that is the name of a special token selects this token, because the names of special tokens do not
    occur in the text of a completion.
    """
    tokens: dict[int, str | int] = {token: token for token in request.stop_token_ids}
    if isinstance(tokenizer, JsonTokenizer):
        names = set(request.stops)
        tokens |= {token: name for token, name in tokenizer.special_ids.items() if name in names}
    return tokens


class ResponseBuilder:
    """Builder of the bodies of one response of /v1/completions."""

    prefix = "cmpl"
    complete_type: Any = Completion
    chunk_type: Any = Completion

    def __init__(self, request_id: str, model: str, request: GenerationRequest, texts: TokenTexts):
        self._request, self._texts = request, texts
        self._frame: dict[str, Any] = dict(id=f"{self.prefix}-{request_id}", created=int(time.time()), model=model)
        self._chunk_frame: dict[str, Any] = self._frame | dict(usage=None if request.include_usage else msgspec.UNSET)

    def complete(self, deltas: Sequence[Delta], usage: Usage, prompts: Mapping[int, tuple[int, ...]]) -> AnyResponse:
        """Build a complete response. `prompts`: token ids of the prompts to return, by index of the choice."""
        ends = [self._end(index, delta, prompts.get(index)) for index, delta in enumerate(deltas)]
        choices = [self._choice(delta, end) for delta, end in zip(deltas, ends, strict=True)]
        return self.complete_type(**self._frame, choices=choices, usage=usage)

    def chunk(self, index: int, delta: Delta, prompt: tuple[int, ...] | None) -> AnyResponse:
        """Build a chunk of a streamed response."""
        choice = self._delta(delta, self._end(index, delta, prompt))
        return self.chunk_type(**self._chunk_frame, choices=[choice])

    def last(self, usage: Usage) -> AnyResponse:
        """Build the last chunk, with the token usage."""
        return self.chunk_type(**self._frame, choices=[], usage=usage)

    def first(self, index: int) -> AnyResponse | None:
        """Build the first chunk of a choice, if there is one."""
        return None

    def _choice(self, delta: Delta, end: dict[str, Any]) -> AnyChoice:
        return CompletionChoice(**end, text=delta.text, logprobs=self._logprobs(delta))

    def _delta(self, delta: Delta, end: dict[str, Any]) -> AnyChoice:
        return self._choice(delta, end)

    def _end(self, index: int, delta: Delta, prompt: tuple[int, ...] | None) -> dict[str, Any]:
        """Return the fields of all kinds of choices."""
        finish = "tool_calls" if delta.has_called and delta.finish == "stop" else delta.finish
        fields = dict(index=index, finish_reason=finish, stop_reason=delta.reason)
        if self._request.return_token_ids:
            fields |= dict(token_ids=delta.tokens, prompt_token_ids=msgspec.UNSET if prompt is None else prompt)
        return fields

    def _logprobs(self, delta: Delta) -> Logprobs | None:
        if self._request.alternatives is None:
            return None
        return Logprobs(
            tokens=[self._key(token) for token in delta.scored],
            token_logprobs=[None if score is None else finite(score.logprob) for score in delta.scores],
            top_logprobs=[None if score is None else self._top(score) for score in delta.scores],
            text_offset=delta.offsets,
        )

    def _key(self, token: int) -> str:
        """Return the text of a token, or its id in vLLM's format if the request has `return_tokens_as_token_ids`."""
        as_ids = isinstance(self._request, CompletionRequest) and self._request.return_tokens_as_token_ids
        return f"token_id:{token}" if as_ids else self._texts.key(token)

    def _top(self, score: TokenScore) -> dict[str, float]:
        """Return the most likely tokens and the sampled token. Of tokens with equal text, the most likely counts."""
        logprobs: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            key = self._key(token)
            logprobs[key] = max(finite(logprob), logprobs.get(key, MIN_LOGPROB))
        return logprobs


class ChatResponseBuilder(ResponseBuilder):
    """Builder of the bodies of one response of /v1/chat/completions.

    **Arguments:**

    - `call_format`: format of tool calls, which determines the format of their ids.
    - `num_earlier_calls`: number of tool calls in the messages of the request.
    """

    prefix = "chatcmpl"
    complete_type, chunk_type = ChatCompletion, ChatCompletionChunk

    def __init__(
        self,
        request_id: str,
        model: str,
        request: GenerationRequest,
        texts: TokenTexts,
        *,
        call_format: ToolFormatName | None = None,
        num_earlier_calls: int = 0,
    ):
        super().__init__(request_id, model, request, texts)
        self._call_format, self._num_earlier_calls = call_format, num_earlier_calls

    def first(self, index: int) -> AnyResponse | None:
        choice = ChatChunkChoice(index=index, delta=MessageDelta(role="assistant", content=""))
        return ChatCompletionChunk(**self._chunk_frame, choices=[choice])

    def _choice(self, delta: Delta, end: dict[str, Any]) -> AnyChoice:
        calls = [CompletedToolCall(**call) for _, call in self._calls(delta, end["index"])] or msgspec.UNSET
        content = None if delta.calls and not delta.text else delta.text
        reasoning = delta.reasoning or msgspec.UNSET
        message = AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=calls)
        return ChatChoice(**end, message=message, logprobs=self._chat_logprobs(delta))

    def _delta(self, delta: Delta, end: dict[str, Any]) -> AnyChoice:
        calls = [ToolCallDelta(index=number, **call) for number, call in self._calls(delta, end["index"])]
        fields: dict[str, Any] = dict(content=delta.text, reasoning_content=delta.reasoning, tool_calls=calls)
        message = MessageDelta(**{name: value for name, value in fields.items() if value})
        return ChatChunkChoice(**end, delta=message, logprobs=self._chat_logprobs(delta))

    def _calls(self, delta: Delta, choice: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the tool calls of a delta as fields of the response, each with its index in the completion."""
        calls = []
        for number, call in enumerate(delta.calls, delta.first_call):
            is_cut = isinstance(call, TruncatedCall)
            arguments = call.arguments if is_cut else json.dumps(call.arguments, ensure_ascii=False)
            function = CalledFunction(name=call.name, arguments=arguments)
            calls.append((number, dict(id=self._call_id(choice, number, call.name), function=function)))
        return calls

    def _call_id(self, choice: int, number: int, name: str) -> str:
        """Return the id of a tool call: nine letters and digits, which Mistral's templates require.

        Kimi K2's templates write the id in place of the name, so that its ids contain the name.
        """
        if self._call_format == "kimi_k2":
            return f"functions.{name}:{self._num_earlier_calls + number}"
        text = f"{self._frame['id']} {choice} {number}"
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return "".join(ID_CHARACTERS[value // len(ID_CHARACTERS) ** place % len(ID_CHARACTERS)] for place in range(9))

    def _chat_logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._request.alternatives is None:
            return None
        return ChatLogprobs(content=[self._scored(score) for score in delta.scores if score is not None])

    def _scored(self, score: TokenScore) -> ScoredToken:
        top = [TokenLogprob(**self._named(*pair)) for pair in score.top[: self._request.alternatives]]
        return ScoredToken(**self._named(score.token, score.logprob), top_logprobs=top)

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return dict(token=self._texts.text(token), logprob=finite(logprob), bytes=list(self._texts.content(token)))


def activated(scores: Sequence[float]) -> list[float]:
    """Return the probability of a single score (logistic function), or those of several scores (softmax)."""
    if len(scores) == 1:
        return [1 / (1 + math.exp(-max(min(scores[0], 700.0), -700.0)))]
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


async def text_scores(outputs: RequestOutputs, count: int, *, activation: bool) -> list[list[float]]:
    """Wait for the scores of texts, or their probabilities. Raises ApiError if a text was not scored."""
    rows = [list[float]()] * count
    try:
        async for index, output in outputs:
            if output.finish_reason != "stop":
                raise ApiError(503, output.error or "The server is stopping and has cancelled this request.")
            rows[index] = activated(output.text_scores) if activation else [*output.text_scores]
    finally:
        outputs.close()
    return rows


def classification(
    request_id: str, model: str, prompts: Sequence[PreparedPrompt], scores: Sequence[list[float]]
) -> Classification:
    """Return the response with the scores of texts."""
    count = sum(len(prompt.ids) for prompt in prompts)
    details = CachedTokens(cached_tokens=0)
    usage = Usage(prompt_tokens=count, completion_tokens=0, total_tokens=count, prompt_tokens_details=details)
    data = [ScoredText(index=index, probs=row, num_classes=len(row)) for index, row in enumerate(scores)]
    return Classification(id=f"classify-{request_id}", created=int(time.time()), model=model, data=data, usage=usage)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent. Values that are not finite become -9999."""
    return float(logprob) if logprob >= MIN_LOGPROB and logprob != float("inf") else MIN_LOGPROB
