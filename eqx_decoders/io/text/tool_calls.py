"""Calls of tools in the text of an answer, in the formats in which models are trained to write them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple


ToolFormat = Literal["hermes", "llama3_json", "mistral", "qwen3_coder"]

# What the chat templates of each format have, the most telling ones first.
_MARKS: tuple[tuple[str, ToolFormat], ...] = (
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
)
# Beginnings of calls: of whole answers, and within them.
_BEGINS: dict[ToolFormat, tuple[Sequence[str], Sequence[str]]] = {
    "hermes": ((), ("<tool_call>",)),
    "llama3_json": (("{", "<|python_tag|>"), ()),
    "mistral": (("[",), ("[TOOL_CALLS]",)),
    "qwen3_coder": ((), ("<tool_call>", "<function=")),
}
_FUNCTION = re.compile(r"\s*([^>\s]+)>(.*)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
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
        `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
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


class CallDivider:
    """Divider of an answer that is being written: what is no call for sure is shown at once, the rest at its end.

    **Arguments:**

    - `form`, `tools`: as of `parse_tool_calls`.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()):
        self._form: ToolFormat = form
        self._tools, self._text, self._shown = tools, "", 0

    @property
    def special(self) -> bool:
        """Whether calls are known by names of special tokens, which must be in the text."""
        return self._form == "mistral"

    def push(self, text: str) -> str:
        """Add a piece of the answer; return what can be shown."""
        self._text += text
        begin, self._shown = self._shown, _begin_of_calls(self._text, self._shown, self._form)
        return self._text[begin : self._shown]

    def finish(self) -> ParsedAnswer:
        """Return the calls, and the content that was not shown yet; the whole text where a call can't be read."""
        parsed = parse_tool_calls(self._text, self._form, self._tools)
        if parsed.malformed or not parsed.calls:
            return ParsedAnswer(self._text[self._shown :])
        return ParsedAnswer(parsed.content[self._shown :], parsed.calls)


def _begin_of_calls(text: str, start: int, form: ToolFormat) -> int:
    """Return where calls begin, or may begin with what comes; `start`: they don't before."""
    alone, marks = _BEGINS[form]
    body = text.lstrip()
    if start == 0 and any(body.startswith(each) or each.startswith(body) for each in alone):
        return 0
    begins = [place for each in marks if (place := text.find(each, start)) >= 0]
    ends = ((each, length) for each in marks for length in range(len(each) - 1, 0, -1))
    begins += [len(text) - length for each, length in ends if text.endswith(each[:length])]
    return max(start, min(begins, default=len(text)))


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


_PARSERS: dict[str, Callable[[str], Found]] = {
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
    if isinstance(arguments, str):  # JSON as a text, as OpenAI's API has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {value['name']} are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {value['name']} are no object"
    return FunctionCall(value["name"], arguments)


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
