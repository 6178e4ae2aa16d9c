"""Rendering of chat templates with Jinja in this process, as transformers and vLLM do.

A template is a program in the files of a model. `ImmutableSandboxedEnvironment` keeps it from Python's internals, from
changing its variables, from loading other templates, and from ranges of more than 100,000 numbers. The length of the
rendered text and the processor time of the template's loops are limited, too. Other operations are not limited: `'a' *
10**10` takes 10 GB of memory. So render only templates of models that you choose to run.
"""

import datetime
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.special_names import NameEscaper


MAX_CHARACTERS = 10_000_000  # of a rendered text
MAX_SECONDS = 1.0  # of processor time in the loops of a template, for one conversation
PROBE = "@text@"  # content of a message that shows which form of content a template writes

Message = dict[str, Any]


class Rendered(NamedTuple):
    """Rendered text, with [start, stop) of its parts in characters.

    - `generated`: parts that the template marks with `{% generation %}`; None if it has no such mark.
    - `messages`: parts that each iteration of the template's loops over the messages wrote, as (index of the message,
      start, stop).
    - `literal`: names of special tokens that come from the messages, to be encoded as plain text (see
        `ChatTemplate.literal`).
    """

    text: str
    generated: Sequence[tuple[int, int]] | None
    messages: Sequence[tuple[int, int, int]]
    literal: Sequence[Sequence[int]] = ()


def render(source: str, variables: dict[str, Any], literal: tuple[str, ...] = ()) -> Rendered:
    """Render a conversation with the template `source`. Raises what the template raises: any exception.

    **Arguments:**

    - `variables`: variables of the template, as plain JSON values. They include `messages` and `tools`.
    - `literal`: names of special tokens that stay plain text in messages, tools and documents.
    """
    template, escaper = compile_template(source), _escaper(literal)
    _tracker.deadline = time.thread_time() + MAX_SECONDS
    parts_only = template.writes_only_parts(variables)
    variables, placeholders = escaper.escape(variables)
    if parts_only:
        variables = variables | {"messages": [_with_parts(message) for message in variables["messages"]]}
    rendered = _render_best_form(template, variables)
    if not placeholders:
        return rendered
    text, names, move = escaper.unescape(rendered.text, placeholders)
    return Rendered(
        text,
        None if rendered.generated is None else [(move(start), move(stop)) for start, stop in rendered.generated],
        [(index, move(start), move(stop)) for index, start, stop in rendered.messages],
        names,
    )


@functools.lru_cache(maxsize=16)
def _escaper(literal: tuple[str, ...]) -> NameEscaper:
    return NameEscaper(literal)


# --- forms of messages ------------------------------------------------------------------------------------------------


def _render_best_form(template: "CompiledTemplate", variables: dict[str, Any]) -> Rendered:
    """Render a conversation in the form that the template takes. Usually this is the first form, as in transformers.

    The best rendering has all names of called tools, no arguments in Python's syntax, and no word None where a message
    has no content.
    """
    names = [name for message in variables["messages"] for name in called_tools(message)]
    best, best_score, error = None, None, None
    for group in _forms(variables["messages"]):
        for messages in group:
            try:
                rendered = template.render({**variables, "messages": messages})
            except Exception as raised:  # a template can raise anything
                error = error or raised
                continue
            text = rendered.text
            num_python = sum(text.count(arguments) for arguments in _python_arguments(messages))
            score = sum(text.count(name) for name in names), -num_python, -text.count("None")
            if best_score is None or score > best_score:
                best, best_score = rendered, score
        if best_score is not None and error is None and best_score[1] == 0:
            break
    if best is not None:
        return best
    simple = {**variables, "messages": [_with_content_as_reasoning(message) for message in variables["messages"]]}
    if isinstance(variables.get("tools"), list):
        simple["tools"] = [_with_description(tool) for tool in variables["tools"]]
    if simple != variables:
        return _render_best_form(template, simple)
    raise error or ValueError("the template renders none of the forms of this conversation")


def _forms(messages: list[Message]) -> Iterator[Iterator[list[Message]]]:
    """Yield the forms in which templates take tool calls. The first form has the arguments of the messages.

    Some templates take arguments as objects, others as JSON texts. For a message with tool calls and without content,
    some templates test whether its content is None, others whether the key exists, and others need an empty text.
    """
    calling = {index for index, message in enumerate(messages) if called_tools(message)}
    silent = {index for index in calling if messages[index].get("content") is None}

    def with_contents(messages: list[Message]) -> Iterator[list[Message]]:
        yield messages
        changes: tuple[Callable[[Message], Message], ...] = (
            lambda message: message | {"content": None},
            lambda message: {key: value for key, value in message.items() if key != "content"},
            lambda message: message | {"content": ""},
        )
        for change in changes:
            changed = [change(message) if index in silent else message for index, message in enumerate(messages)]
            if silent and changed != messages:
                yield changed

    yield with_contents(messages)
    for convert in (_as_object, _as_json) if calling else ():
        changed = [
            _with_arguments(message, convert) if index in calling else message for index, message in enumerate(messages)
        ]
        if changed != messages:
            yield with_contents(changed)


def called_tools(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that a message calls."""
    return [function["name"] for function in _called_functions(message) if isinstance(function.get("name"), str)]


def _called_functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return [function for function in functions if isinstance(function, dict)]


def _python_arguments(messages: Sequence[Message]) -> set[str]:
    """Return the arguments of all tool calls in Python's syntax, if it differs from JSON.

    A template that needs arguments as JSON texts, and gets objects, writes them like this.
    """
    values = [function.get("arguments") for message in messages for function in _called_functions(message)]
    return {str(value) for value in values if value and isinstance(value, dict) and str(value) != _as_json(value)}


def _as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return the message with converted arguments of its tool calls; unchanged if an argument is not JSON."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call

    try:
        return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
    except ValueError:
        return message


def _with_parts(message: Message) -> Message:
    """Return the message with a list of one text part in place of a text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_description(tool: Any) -> Any:
    """Return a tool with an empty description if it has none: some templates (gpt-oss) require the key."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _with_content_as_reasoning(message: Message) -> Message:
    """Return a message with tool calls whose content is the end of its reasoning: gpt-oss refuses both in a message."""
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if not called_tools(message) or not all(isinstance(text, str) and text for text in (content, reasoning)):
        return message
    text = f"{reasoning}\n\n{content}"
    return {**message, "content": "", "reasoning_content": text, "thinking": text}


# --- Jinja ------------------------------------------------------------------------------------------------------------


class RenderTracker(threading.local):
    """Record of the spans of messages and marked parts in the text that this thread is rendering.

    A template yields its text in pieces, so calls from within the template know the number of characters before them.
    Macros and `{% set %}` blocks do not write text yet: loops within them are not recorded.
    """

    deadline: float  # by `time.thread_time`

    def render(self, template: Any, variables: dict[str, Any]) -> Rendered:
        """Render a Jinja template. The spans in `generated` are empty if the template has no such mark."""
        self.length = 0
        self.indices = {id(message): index for index, message in enumerate(variables["messages"])}
        self.generated, self.messages = list[tuple[int, int]](), list[tuple[int, int, int]]()
        self.loops = list[tuple[int, int] | None]()  # by depth: message of the current iteration, and its start
        pieces = list[str]()
        for piece in template.generate(variables):
            pieces.append(piece)
            self.length += len(piece)
            if self.length > MAX_CHARACTERS:
                raise ValueError(f"the text has more than {MAX_CHARACTERS:,} characters")
        return Rendered("".join(pieces), self.generated, self.messages)

    def mark_generated(self, caller: Callable[[], str]) -> str:
        """Write a part within `{% generation %}`."""
        text = caller()
        self.generated.append((self.length, self.length + len(text)))
        return text

    def enter_loop(self) -> str:
        """Start a loop."""
        self.loops.append(None)
        return ""

    def start_iteration(self, *items: Any) -> str:
        """Start an iteration of the innermost loop, with these values of the loop's variables."""
        if time.thread_time() > self.deadline:
            raise TimeoutError(f"its loops take more than {MAX_SECONDS:g} s of processor time")
        self.leave_loop()
        indices = [self.indices[id(item)] for item in items if id(item) in self.indices]
        self.loops.append((indices[0], self.length) if indices else None)
        return ""

    def leave_loop(self) -> str:
        """End the current iteration, and the innermost loop."""
        current = self.loops.pop()
        if current is not None and self.length > current[1]:
            self.messages.append((*current, self.length))
        return ""


_tracker = RenderTracker()


class CompiledTemplate:
    """Compiled chat template. Several threads can render with it at the same time.

    - `template`: the Jinja template, which calls the tracker.
    - `marks_generated`: whether the template has `{% generation %}`.
    """

    def __init__(self, template: Any, marks_generated: bool):
        self.template, self.marks_generated = template, marks_generated
        self._parts_only = dict[bool, bool]()  # by whether there are tools

    def render(self, variables: dict[str, Any]) -> Rendered:
        """Render a conversation."""
        rendered = _tracker.render(self.template, variables)
        return rendered if self.marks_generated else rendered._replace(generated=None)

    def writes_only_parts(self, variables: dict[str, Any]) -> bool:
        """Return whether the template writes lists of text parts, but leaves out content that is a text.

        Some templates of vision-language models do.
        """
        has_tools = bool(variables.get("tools"))
        if has_tools not in self._parts_only:
            text, parts = (self._probe(variables, content) for content in (PROBE, [{"type": "text", "text": PROBE}]))
            quoted = any(quote + PROBE + quote in parts for quote in "'\"")  # the list is written in Python or JSON
            self._parts_only[has_tools] = PROBE not in text and PROBE in parts and not quoted
        return self._parts_only[has_tools]

    def _probe(self, variables: dict[str, Any], content: Any) -> str:
        try:
            return self.render({**variables, "messages": [{"role": "user", "content": content}]}).text
        except Exception:  # a template can raise anything
            return ""


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template, with calls of the tracker around each loop and at the start of each iteration."""
    import jinja2.nodes as nodes

    environment = _environment()
    extension = environment.extensions[f"{__name__}._Tracking"]

    def call(name: str, *arguments: Any) -> Any:
        return nodes.Output([extension.call_method(name, list(arguments))]).set_lineno(1)

    def with_calls(node: Any) -> list[Any]:
        if not isinstance(node, nodes.For):
            return [node]
        targets = [node.target, *node.target.find_all(nodes.Name)]
        names = [nodes.Name(target.name, "load") for target in targets if isinstance(target, nodes.Name)]
        node.body.insert(0, call("start_iteration", *names))
        return [call("enter_loop"), node, call("leave_loop")]

    def visit(node: Any) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, list) and any(isinstance(member, nodes.For) for member in value):
                setattr(node, field, [new for member in value for new in with_calls(member)])
        for child in node.iter_child_nodes():
            visit(child)

    program = environment.parse(source)
    methods = program.find_all(nodes.ExtensionAttribute)
    marks_generated = any(method.name == "mark_generated" for method in methods)
    visit(program)
    program.set_environment(environment)
    return CompiledTemplate(environment.from_string(program), marks_generated)


@functools.cache
def _environment() -> Any:
    """Create Jinja's environment, with the settings, filters and functions of transformers' chat templates."""
    import jinja2.ext
    import jinja2.nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class _Tracking(jinja2.ext.Extension):
        """Extension that calls the tracker. `{% generation %} … {% endgeneration %}` marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        mark_generated, enter_loop = _tracker.mark_generated, _tracker.enter_loop
        start_iteration, leave_loop = _tracker.start_iteration, _tracker.leave_loop

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark_generated"), [], [], body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def raise_exception(message: Any) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # unlike Jinja's own filter, without escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Tracking, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment
