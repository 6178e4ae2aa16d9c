"""Request bodies with conversations as declared types: messages, parts, tools and variables of the chat template."""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from eqx_decoders.io.text.output_parsing.formats import ToolFormatName
from eqx_decoders.serving.frontend.api_errors import ApiError, refuse
from eqx_decoders.serving.frontend.completion_grammar import CallGrammar, call_grammar
from eqx_decoders.serving.http.config import ApiConfig
from eqx_decoders.serving.http.json_body import Meta, RequestFields, convert
from eqx_decoders.serving.http.protocol import (
    Count,
    Flag,
    GenerationRequest,
    NonEmpty,
    Prompt,
    RequestBody,
    Size,
    Text,
    check_alternatives,
    check_prompts,
    split_prompts,
)
from eqx_decoders.serving.http.unsupported_fields import ADVICE


# Variables of a chat template that clients cannot set. The last five are names of arguments of functions.
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self", "prompt", "images", "videos", "audio"}


class Url(RequestFields, forbid_unknown_fields=False):
    """URL of a file: a data: URL with the content in base64."""

    url: Text


class AudioData(RequestFields, forbid_unknown_fields=False):
    """Audio in base64."""

    data: Text


FileUrl = Annotated[Url, Meta(description="an object with a url")]


class TextPart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="text"):
    """Text in a message."""

    text: Text


class ImagePart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="image_url"):
    """Image in a message."""

    image_url: FileUrl


class VideoPart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="video_url"):
    """Video in a message."""

    video_url: FileUrl


class AudioPart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="audio_url"):
    """Audio in a message."""

    audio_url: FileUrl


class InputAudioPart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="input_audio"):
    """Audio in a message, as in OpenAI's API."""

    input_audio: Annotated[AudioData, Meta(description="an object with data")]


class RefusalPart(RequestFields, forbid_unknown_fields=False, tag_field="type", tag="refusal"):
    """Text of an assistant's refusal, as in OpenAI's API."""

    refusal: Text


PARTS = "an object with a type: text, image_url, video_url, audio_url, input_audio, refusal"
Part = Annotated[TextPart | RefusalPart | ImagePart | VideoPart | AudioPart | InputAudioPart, Meta(description=PARTS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class PastFunctionCall(RequestFields, forbid_unknown_fields=False):
    """Function that an earlier message called. Its arguments are JSON text or an object."""

    name: Text


class ToolCall(RequestFields, forbid_unknown_fields=False):
    """Tool call of an earlier message."""

    function: Annotated[PastFunctionCall, Meta(description="an object with a name and arguments")]


class Message(RequestFields, forbid_unknown_fields=False):
    """Message of a conversation. Further fields are passed to the chat template."""

    role: Annotated[Role, Meta(description="one of system, developer, user, assistant, tool")]
    content: Annotated[str | list[Part], Meta(description="a text or a list of parts")] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(description="objects with a function")] | None = None
    refusal: Text | None = None
    function_call: Any = None
    audio: Any = None
    prefix: Any = None
    partial: Any = None


class NamedFunction(RequestFields, forbid_unknown_fields=False):
    """Function that the completion may call. Further fields are passed to the chat template."""

    name: NonEmpty
    parameters: Annotated[dict[str, Any], Meta(description="an object with a JSON Schema")] | None = None


class Tool(RequestFields, forbid_unknown_fields=False):
    """Tool that the completion may call."""

    type: Annotated[Literal["function"], Meta(description="'function', because this server does not run tools")]
    function: Annotated[NamedFunction, Meta(description="an object with the name and parameters of the function")]


# Templates may use all fields of messages and tools, so they are checked by these types but passed unchanged.
Messages = Annotated[
    list[Any],
    Meta(
        min_length=1,
        description="a list with at least one message",
        extra_json_schema={"items": {"$ref": "#/components/schemas/Message"}},
    ),
]
Tools = Annotated[
    tuple[Any, ...],
    Meta(
        max_length=1000,
        description="a list of at most 1,000 functions with a name",
        extra_json_schema={"items": {"$ref": "#/components/schemas/Tool"}},
    ),
]
_MESSAGES = list[Annotated[Message, Meta(description="an object with role and content")]]
_TOOLS = Annotated[tuple[Tool, ...], Meta(description="a list of functions with a name")]
Object = Annotated[dict[str, Any], Meta(description="an object")]
TOOL_CHOICE = "'none', 'auto', 'required', an object that names a function, or an object of type allowed_tools"
ToolChoice = Annotated[
    Any,
    Meta(
        description=TOOL_CHOICE,
        extra_json_schema={"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]},
    ),
]
ReasoningEffort = Annotated[str, Meta(max_length=100, description="a text of at most 100 characters")]


class AllowedTools(NamedTuple):
    """Tools that a completion may call.

    - `tools`: tools that may be called.
    - `required`: the completion must call at least one tool.
    - `named`: `tool_choice` names a single tool, which the completion must call.
    - `restricts`: `tool_choice` limits which tools may be called, or requires a call.
    """

    tools: tuple[Any, ...]
    required: bool = False
    named: bool = False
    restricts: bool = False


def allowed_tools(choice: Any, tools: Sequence[Any]) -> AllowedTools:
    """Return the tools that `tool_choice` allows. Raises ApiError for invalid values and for unknown tools."""
    tools = tuple(tools)
    if choice == "none":
        return AllowedTools(())
    if choice in (None, "auto"):
        return AllowedTools(tools)
    if choice == "required":
        if not tools:
            raise refuse("tool_choice", choice, "needs tools. Add at least one function to 'tools'")
        return AllowedTools(tools, required=True, restricts=True)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        named = _named_tools("tool_choice", [choice], tools)
        return AllowedTools(named, required=True, named=True, restricts=True)
    if kind == "allowed_tools":
        options = choice.get("allowed_tools", choice)
        mode = options.get("mode", "auto") if isinstance(options, dict) else None
        if mode not in ("auto", "required") or not isinstance(options.get("tools"), list) or not options["tools"]:
            rule = "must have 'allowed_tools' with a 'mode', auto or required, and a non-empty list of 'tools'"
            raise refuse("tool_choice", choice, rule)
        named = _named_tools("tool_choice.allowed_tools.tools", options["tools"], tools)
        return AllowedTools(named, required=mode == "required", restricts=True)
    raise refuse("tool_choice", choice, f"must be {TOOL_CHOICE}")


def _named_tools(field: str, choices: Sequence[Any], tools: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tools that are named by choices of the form `{"type": "function", "function": {"name": …}}`."""
    named = {tool["function"]["name"]: tool for tool in tools}
    found = []
    for choice in choices:
        function = choice.get("function", choice) if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in named:
            raise refuse(field, choice, "must name a function that is in 'tools'")
        found.append(named[name])
    return tuple(found)


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """Request to complete a conversation."""

    messages: Messages
    add_generation_prompt: Flag = True
    chat_template_kwargs: Object | None = None
    tools: Tools = ()
    tool_choice: ToolChoice = None
    parallel_tool_calls: Flag = True
    reasoning_effort: ReasoningEffort | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: Flag = False
    top_logprobs: Size | None = None
    modalities: Annotated[tuple[Literal["text"], ...], Meta(max_length=1, description='["text"]')] = ()

    @functools.cached_property
    def allowed(self) -> AllowedTools:
        """Tools that the completion may or must call."""
        return allowed_tools(self.tool_choice, self.tools)

    @property
    def callable(self) -> tuple[Any, ...]:
        """Tools that the completion may call."""
        return self.allowed.tools

    @property
    def constrains_calls(self) -> bool:
        """Whether `tool_choice` or `parallel_tool_calls` constrains the tool calls of the completion."""
        return bool(self.callable) and (self.allowed.restricts or not self.parallel_tool_calls)

    def calls(self, format: ToolFormatName | None) -> CallGrammar | None:
        """Return the grammar of the tool calls of the completion; None if they are not constrained.

        Tool calls are also constrained if the request has structured output: the completion is then a tool call, or
        matches the grammar.

        `format`: tool-call format of the model; None: tool calls are text. Raises ApiError if `tool_choice` or
        `parallel_tool_calls` constrains the tool calls, and there is no format.
        """
        has_grammar = self.callable and self.grammar[1] is not None and format is not None
        if not self.constrains_calls and not has_grammar:
            return None
        if format is None:
            raise refuse(
                "tool_choice" if self.allowed.restricts else "parallel_tool_calls",
                self.tool_choice if self.allowed.restricts else self.parallel_tool_calls,
                "is not supported, because this server returns tool calls as text. "
                "Start the server with --tool-call-parser and the name of a format",
                "unsupported_parameter",
            )
        one_call = self.allowed.named or not self.parallel_tool_calls
        return call_grammar(format, self.callable, required=self.allowed.required, max_calls=1 if one_call else None)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def max_new_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def check(self, config: ApiConfig) -> None:
        check_alternatives("top_logprobs", self.top_logprobs, config)
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", self.top_logprobs, "requires logprobs=true")
        super().check(config)
        check_conversation(self, config)
        if self.constrains_calls and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise refuse(name, getattr(self, name), "cannot be combined with constrained tool calls. Remove it")


class TokenizeRequest(RequestBody):
    """Request for the token ids of a text, or of a rendered conversation."""

    prompt: Text | None = None
    add_special_tokens: Flag = True
    messages: Messages | None = None
    add_generation_prompt: Flag = True
    chat_template_kwargs: Object | None = None
    tools: Tools = ()
    tool_choice: ToolChoice = None
    reasoning_effort: ReasoningEffort | None = None

    def check(self, config: ApiConfig) -> None:
        if self.messages is not None:
            check_conversation(self, config)
        elif self.prompt is None:
            raise ApiError(400, "prompt is missing. Send prompt or messages.", param="prompt")


class ClassifyRequest(RequestBody):
    """Request for the scores of texts, token ids, or a conversation that ends with a message of the assistant."""

    input: Prompt | None = None
    add_special_tokens: Flag = True
    messages: Messages | None = None
    chat_template_kwargs: Object | None = None
    tools: Tools = ()
    tool_choice: ToolChoice = None
    reasoning_effort: ReasoningEffort | None = None
    use_activation: Flag = True

    @property
    def prompts(self) -> tuple[Any, ...]:
        """Texts and tuples of token ids to score."""
        return () if self.input is None else split_prompts(self.input)

    def check(self, config: ApiConfig) -> None:
        if config.scores is None:
            raise ApiError(400, "This model generates text and has no scores. Use /v1/chat/completions.")
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "Exactly one of input and messages is required.", param="input")
        if self.messages is not None:
            check_conversation(self, config)
        check_prompts("input", self.prompts, config)


AnyConversation = ChatCompletionRequest | TokenizeRequest | ClassifyRequest


def check_conversation(request: AnyConversation, config: ApiConfig) -> None:
    """Raise ApiError for invalid messages, tools or variables of the chat template."""
    messages = request.messages or []
    if len(messages) > config.max_length:  # a message has at least one token: refused before it is checked further
        raise ApiError(
            400,
            f"messages has {len(messages):,} entries. The maximum length is {config.max_length:,} tokens. Send fewer.",
            param="messages",
            code="context_length_exceeded",
        )
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > config.max_length:
        raise ApiError(
            400,
            f"messages have {num_parts:,} parts. The maximum length is {config.max_length:,} tokens. Send fewer.",
            param="messages",
            code="context_length_exceeded",
        )
    for index, message in enumerate(convert(messages, _MESSAGES, "messages")):
        if message.content is None and message.tool_calls is None and message.role != "assistant":
            raise refuse(f"messages[{index}].content", None, "must be a text or a list of parts")
        if message.function_call is not None:
            raise refuse(
                f"messages[{index}].function_call",
                message.function_call,
                "is not supported. Use tool_calls, and a message with the role tool, instead",
            )
        if message.audio is not None:
            raise refuse(
                f"messages[{index}].audio",
                message.audio,
                "is not supported, because this server does not store audio. Send the transcript as content",
            )
        for name in ("prefix", "partial"):  # fields of Mistral, DeepSeek and Moonshot
            if getattr(message, name):
                raise refuse(f"messages[{index}].{name}", getattr(message, name), ADVICE["continue_final_message"])
    convert(request.tools, _TOOLS, "tools")
    reserved = sorted(RESERVED & (request.chat_template_kwargs or {}).keys())
    if reserved:
        raise refuse(
            "chat_template_kwargs",
            request.chat_template_kwargs,
            f"must not contain {reserved[0]!r}, which the server sets",
        )
    allowed_tools(request.tool_choice, request.tools)


def conversation(request: AnyConversation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and the variables of the chat template.

    If a message of the assistant has neither content nor tool calls, its content is the refusal, or an empty text.
    """
    variables = dict(request.chat_template_kwargs or {})
    if request.tools and request.tool_choice != "none":
        variables["tools"] = [_without_null(tool) for tool in request.tools]
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    if request.reasoning_effort == "none":  # most templates have a switch instead
        variables = {"enable_thinking": False, "thinking": False, **variables}
    messages = [
        {**message, "content": message.get("refusal") or ""}
        if message.get("content") is None and not message.get("tool_calls")
        else message
        for message in request.messages or []
    ]
    return messages, variables


def _without_null(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without null fields, for which templates would write None. Parameters are not changed."""
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {name: value for name, value in tool.items() if value is not None} | {"function": function}
