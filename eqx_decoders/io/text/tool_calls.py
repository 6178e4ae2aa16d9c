"""Calls of tools in the text of an answer, in the formats in which models are trained to write them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple


ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "harmony"]

# What the chat templates of each format have, the most telling ones first.
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)
# Beginnings of calls: of whole answers, and within them.
BEGINS: dict[ToolFormat, tuple[Sequence[str], Sequence[str]]] = {
    "hermes": ((), ("<tool_call>",)),
    "llama3_json": (("{", "<|python_tag|>"), ()),
    "mistral": (("[",), ("[TOOL_CALLS]",)),
    "qwen3_coder": ((), ("<tool_call>", "<function=")),
    "harmony": ((), ()),  # by headers of messages
}
_FUNCTION = re.compile(r"\s*([^>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
_DECODER = json.JSONDecoder()


class FunctionCall(NamedTuple):
    """Call of a tool by name, with arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


class ParsedAnswer(NamedTuple):
    """Text of an answer, and its calls.

    **Arguments:**

    - `content`: what stands before the calls; the whole text if there are none.
    - `calls`: calls in their order.
    - `malformed`: for each call that can't be read, the reason.
    """

    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()


def tool_format(template: str) -> ToolFormat:
    """Return the format in which the models of a chat template write calls, by what its source mentions."""
    for mark, form in _MARKS:
        if mark in template:
            return form
    return "hermes"


def parse_tool_calls(text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
    """Find the calls of tools in an answer; what stands in thoughts, up to `</think>`, is none.

    **Arguments:**

    - `text`: with the names of special tokens, where the format has such.
    - `form`: `hermes` is `<tool_call>{"name": …, "arguments": …}</tool_call>` (Qwen 2.5 and 3, too); `llama3_json` is
        `{"name": …, "parameters": …}` alone, several with `;` between them; `mistral` is `[TOOL_CALLS] [{…}, …]`, or
        `[TOOL_CALLS]name[ARGS]{…}`; `qwen3_coder` is
        `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; `harmony` (gpt-oss) is a
        message ` to=functions.name<|channel|>commentary json<|message|>{…}<|call|>` among those of other channels, of
        which `final` is the content.
    - `tools`: their descriptions, for the types of arguments that are written without (`qwen3_coder`).
    """
    end = text.rfind("</think>") + 1 and text.rfind("</think>") + len("</think>")
    if form == "qwen3_coder":
        content, parts = _xml_calls(text[end:], tools)
    else:
        content, parts = _PARSERS[form](text[end:])
    if not parts:
        return ParsedAnswer(text)
    calls = tuple(each for each in parts if isinstance(each, FunctionCall))
    return ParsedAnswer((text[:end] + content).rstrip(), calls, tuple(each for each in parts if isinstance(each, str)))


class HarmonyMessage(NamedTuple):
    """Message in an answer of gpt-oss.

    **Arguments:**

    - `channel`: `analysis` for thoughts, `commentary`, or `final`.
    - `tool`: name of the tool that is called with the text; None where none is.
    - `text`: what is said so far.
    """

    channel: str
    tool: str | None
    text: str

    @classmethod
    def of(cls, header: str, text: str) -> "HarmonyMessage":
        """Return the message with such a header."""
        channel, tool = _CHANNEL.search(header), _RECIPIENT.search(header)
        return cls("final" if channel is None else channel[1], None if tool is None else tool[1], text)

    @property
    def call(self) -> "FunctionCall | str | None":
        """The call that the message is, or why it can't be read; None of one that calls no tool."""
        return None if self.tool is None else _call_of_text(self.tool, self.text)


Found = tuple[str, list[FunctionCall | str]]  # the content, and calls or the reasons why they are none


def _hermes_calls(text: str) -> Found:
    content, *pieces = text.split("<tool_call>")
    return content, [_call_of_json(piece.partition("</tool_call>")[0]) for piece in pieces]


def _llama3_calls(text: str) -> Found:
    body = text.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not re.match(r'\{\s*"(name|type|parameters|arguments)"', body):
        return text, []
    return "", [_call_of(value) if error is None else error for value, error in _json_values(body)]


def _mistral_calls(text: str) -> Found:
    content, *pieces = text.split("[TOOL_CALLS]")
    if not pieces and re.match(r'\s*\[\s*\{\s*"name"', text):  # the special token was left out
        content, pieces = "", [text]
    parts: list[FunctionCall | str] = []
    for piece in map(str.strip, pieces):
        named = _NAMED.match(piece)
        value, error = next(_json_values(piece[named.end() :] if named else piece), (None, "it is empty"))
        if error is not None:
            parts.append(error)
        elif named:
            parts.append(_call_of({"name": named[1], "arguments": value}))
        else:
            parts += map(_call_of, value if isinstance(value, list) else [value])
    return content, parts


def _harmony_messages(text: str) -> Iterator[HarmonyMessage]:
    """Yield the messages of an answer that begins behind `<|start|>assistant`."""
    for piece in re.split(r"<\|(?:end|call|return)\|>", text):
        header, said, body = piece.partition("<|message|>")
        if said:
            yield HarmonyMessage.of(header, body)
        elif piece.strip():
            yield HarmonyMessage("final", None, piece)  # without a header


def _harmony_calls(text: str) -> Found:
    messages = [*_harmony_messages(text)]
    content = "".join(each.text for each in messages if each.tool is None and each.channel != "analysis")
    return content, [each.call for each in messages if each.call is not None]


_PARSERS: dict[str, Callable[[str], Found]] = {
    "harmony": _harmony_calls,
    "hermes": _hermes_calls,
    "llama3_json": _llama3_calls,
    "mistral": _mistral_calls,
}


def _xml_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    begin = re.search(r"<tool_call>|<function=", text)
    if begin is None:
        return text, []
    first, *pieces = text[begin.start() :].split("<function=")
    if not pieces:
        return text[: begin.start()], [f"{first[:80]!r} has no <function=name>"]
    return text[: begin.start()], [_call_of_xml(piece, tools) for piece in pieces]


def _call_of_xml(piece: str, tools: Sequence[Mapping[str, Any]]) -> FunctionCall | str:
    body, end, _ = piece.partition("</function>")
    named = _FUNCTION.match(body)
    if not end or named is None:
        return f"{body[:80]!r} has no name, or no </function>"
    types = _types_of(named[1], tools)
    arguments = {name: _typed(value, types.get(name)) for name, value in _PARAMETER.findall(named[2])}
    left = _PARAMETER.sub("", named[2]).strip()
    return f"{left[:80]!r} is no <parameter=name>value</parameter>" if left else FunctionCall(named[1], arguments)


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the types of a tool's parameters, by their names."""
    functions = [tool.get("function", tool) for tool in tools]
    parameters = next((each.get("parameters") for each in functions if each.get("name") == name), None) or {}
    return {key: value.get("type") for key, value in parameters.get("properties", {}).items()}


def _typed(value: str, kind: Any) -> Any:
    """Return the value of a parameter: a text where that is its type, otherwise JSON, if it is any."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _call_of_json(text: str) -> FunctionCall | str:
    try:
        return _call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"it is no JSON: {error}"


def _call_of(value: Any) -> FunctionCall | str:
    """Return the call that a JSON value describes, or why it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f"{json.dumps(value)[:80]} has no name"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI's API has it
        return _call_of_text(value["name"], arguments)
    return _call_with(value["name"], arguments)


def _call_of_text(name: str, arguments: str) -> FunctionCall | str:
    try:
        return _call_with(name, json.loads(arguments))
    except (ValueError, RecursionError) as error:
        return f"the arguments of {name} are no JSON: {error}"


def _call_with(name: str, arguments: Any) -> FunctionCall | str:
    return FunctionCall(name, arguments) if isinstance(arguments, dict) else f"the arguments of {name} are no object"


def _json_values(text: str) -> Iterator[tuple[Any, str | None]]:
    """Yield the JSON values that stand behind one another, with `;` or `,` between them; an error ends them."""
    place = 0
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield None, f"it is no JSON: {error}"
            return
        yield value, None
        place += len(text[place:]) - len(text[place:].lstrip(" \t\r\n;,"))
