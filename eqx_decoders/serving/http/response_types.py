"""Bodies of responses as declared types, in the format of OpenAI's API; further fields are vLLM's."""

from typing import Literal

import msgspec

from eqx_decoders.serving.frontend.api_errors import ApiError


KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

FinishReason = Literal["stop", "length", "tool_calls"]
Unset = msgspec.UnsetType  # of a field that is left out


class ResponseFields(msgspec.Struct, kw_only=True):
    """Base of the declared types of responses and of the objects in them."""


class ErrorDetails(ResponseFields, kw_only=True):
    """What is wrong: a sentence, its kind, the field, and a machine-readable reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseFields, kw_only=True):
    """Response to a request that is refused, or has failed."""

    error: ErrorDetails

    @classmethod
    def of(cls, error: ApiError) -> "ErrorBody":
        """Return the body of the response for an error."""
        kind = KINDS.get(error.status, "invalid_request_error")
        return cls(error=ErrorDetails(message=error.message, type=kind, param=error.param, code=error.code))


class Health(ResponseFields, kw_only=True):
    """State of the server."""

    status: Literal["ok", "stopping", "failed", "hanging"]


class Model(ResponseFields, kw_only=True):
    """The served model, or an adapter of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eqx_decoders"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(ResponseFields, kw_only=True):
    """List of the served model and of its adapters."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizedText(ResponseFields, kw_only=True):
    """Token ids of a text or conversation."""

    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class DetokenizedText(ResponseFields, kw_only=True):
    """Text of token ids."""

    prompt: str


class TokenizerInfo(ResponseFields, kw_only=True):
    """Tokenizer, for clients that write prompts themselves."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: None = None
    bos_token_id: int | None
    eos_token_id: int | None
    model_max_length: int
    chat_template: str | None


class CachedTokens(ResponseFields, kw_only=True):
    """Tokens of prompts that were in the prefix cache."""

    cached_tokens: int


class Usage(ResponseFields, kw_only=True):
    """Token counts of prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ScoredText(ResponseFields, kw_only=True):
    """Scores of one text: probabilities, or with `use_activation=false` the numbers that the model gives."""

    index: int
    label: None = None
    probs: list[float]
    num_classes: int


class Classification(ResponseFields, kw_only=True):
    """Scores of texts, as vLLM returns them."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoredText]
    usage: Usage


class AnyChoice(ResponseFields, kw_only=True):
    """One of the answers, or what a chunk adds to it. Token ids are there if `return_token_ids` asks for them."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | Unset = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | Unset = msgspec.UNSET


class AnyResponse(ResponseFields, kw_only=True):
    """Frame of a whole response, or of a chunk of a stream."""

    id: str
    created: int
    model: str
    usage: Usage | Unset | None = msgspec.UNSET


class Logprobs(ResponseFields, kw_only=True):
    """Log-probabilities of the tokens of a text; None for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnyChoice, kw_only=True):
    """Text that goes on from a prompt, or a piece of it."""

    text: str
    logprobs: Logprobs | None


class Completion(AnyResponse, kw_only=True):
    """Response of /v1/completions, or a chunk of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TokenLogprob(ResponseFields, kw_only=True):
    """Log-probability of a token."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob, kw_only=True):
    """Token of an answer with its log-probability, and those of the most likely tokens."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseFields, kw_only=True):
    """Log-probabilities of the tokens of an answer."""

    content: list[ScoredToken]
    refusal: None = None


class CalledFunction(ResponseFields, kw_only=True):
    """Function that an answer calls, with arguments as a text of JSON."""

    name: str
    arguments: str


class WrittenToolCall(ResponseFields, kw_only=True):
    """Call of a tool by an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(WrittenToolCall, kw_only=True):
    """Call of a tool in a chunk, whole."""

    index: int


class AnswerMessage(ResponseFields, kw_only=True):
    """Message that answers a conversation."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: list[WrittenToolCall] | Unset = msgspec.UNSET


class ChatChoice(AnyChoice, kw_only=True):
    """One of the answers to a conversation."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnyResponse, kw_only=True):
    """Response of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class MessageDelta(ResponseFields, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | Unset = msgspec.UNSET
    content: str | Unset = msgspec.UNSET
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | Unset = msgspec.UNSET


class ChatChunkChoice(AnyChoice, kw_only=True):
    """What a chunk adds to one of the answers to a conversation."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(AnyResponse, kw_only=True):
    """Chunk of a streamed response of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
