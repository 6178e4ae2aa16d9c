"""Response bodies as declared types, in the format of OpenAI's API with fields of vLLM."""

from typing import Literal

import msgspec

from eqx_decoders.serving.frontend.api_errors import ApiError


ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

FinishReason = Literal["stop", "length", "tool_calls"]
Unset = msgspec.UnsetType  # type of a field that is left out


class ResponseFields(msgspec.Struct, kw_only=True):
    """Base of the declared types of responses and of the objects in them."""


class ErrorDetails(ResponseFields, kw_only=True):
    """Error message, error type, name of the invalid field, and machine-readable reason."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseFields, kw_only=True):
    """Response to a request that is refused or has failed."""

    error: ErrorDetails

    @classmethod
    def of(cls, error: ApiError) -> "ErrorBody":
        """Return the body of the response for an error."""
        error_type = ERROR_TYPES.get(error.status, "invalid_request_error")
        return cls(error=ErrorDetails(message=error.message, type=error_type, param=error.param, code=error.code))


class Health(ResponseFields, kw_only=True):
    """State of the server."""

    status: Literal["ok", "stopping", "failed", "hanging"]


class Model(ResponseFields, kw_only=True):
    """The served model, or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eqx_decoders"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(ResponseFields, kw_only=True):
    """List of the served model and its adapters."""

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
    """Description of the tokenizer."""

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
    """Number of prompt tokens that were in the prefix cache."""

    cached_tokens: int


class Usage(ResponseFields, kw_only=True):
    """Number of tokens of prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ScoredText(ResponseFields, kw_only=True):
    """Scores of one text: probabilities, or with `use_activation=false` the outputs of the model."""

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
    """Choice of a response or of a chunk. It has token ids if the request sets `return_token_ids`."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | Unset = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | Unset = msgspec.UNSET


class AnyResponse(ResponseFields, kw_only=True):
    """Fields of all responses and chunks."""

    id: str
    created: int
    model: str
    usage: Usage | Unset | None = msgspec.UNSET


class Logprobs(ResponseFields, kw_only=True):
    """Log-probabilities of the tokens of a text. None for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnyChoice, kw_only=True):
    """Completion of a prompt, or a piece of it."""

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
    """Token of a completion with its log-probability, and the most likely tokens with theirs."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseFields, kw_only=True):
    """Log-probabilities of the tokens of a completion."""

    content: list[ScoredToken]
    refusal: None = None


class CalledFunction(ResponseFields, kw_only=True):
    """Function that a tool call calls, with arguments as JSON text."""

    name: str
    arguments: str


class CompletedToolCall(ResponseFields, kw_only=True):
    """Tool call of a completion."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallDelta(CompletedToolCall, kw_only=True):
    """Tool call in a chunk. It is always complete."""

    index: int


class AssistantMessage(ResponseFields, kw_only=True):
    """Message that completes a conversation."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: list[CompletedToolCall] | Unset = msgspec.UNSET


class ChatChoice(AnyChoice, kw_only=True):
    """Choice of a chat completion."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnyResponse, kw_only=True):
    """Response of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class MessageDelta(ResponseFields, kw_only=True):
    """Text and tool calls that a chunk adds to a message."""

    role: Literal["assistant"] | Unset = msgspec.UNSET
    content: str | Unset = msgspec.UNSET
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | Unset = msgspec.UNSET


class ChatChunkChoice(AnyChoice, kw_only=True):
    """Choice of a chunk of a chat completion."""

    delta: MessageDelta
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(AnyResponse, kw_only=True):
    """Chunk of a streamed response of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
