"""Process in which a chat template is rendered: run as a script by `io.text.chat_template`, on Linux and macOS.

Jinja's sandbox keeps an untrusted template from Python's internals, but not from endless loops or strings of 10 GB:
the operating system limits processor time and memory. Should the sandbox have a hole, no file, socket or process can
be opened. Standard input holds a JSON object with `source`, `tasks` (the variables of each rendering), `literal`
(names of special tokens that are letters in messages), `seconds` (of processor time for each) and `total_seconds`; the
one argument, a list, says where jinja2 is found. The output is a line with one JSON object for each that this process
renders, as soon as it is done: `{"error": sentence}`, or, behind lines with the pieces of its text as JSON strings,

- `generated`: [start, stop] of the characters within `{% generation %}`; null where the template has no such mark;
- `messages`: [number of the message, start, stop] of the text that each iteration of a loop over messages wrote;
- `literal`: [start, stop] of names of special tokens that come from messages; left out where there is none.
"""

import bisect
import contextlib
import datetime
import json
import re
import signal
import sys
from typing import Any


MEMORY = 1 << 30  # bytes of address space, of which Python takes some 100 MB
CHARACTERS = 10_000_000  # of a rendered text, and of all together beyond which this process begins no other
PIECE = 1 << 16  # characters in one line: the reader does other things in between
PROBE = "@text@"  # content of a message that shows which form of content a template writes


def main() -> None:
    sys.path += json.loads(sys.argv[1])
    tracker = RenderTracker()
    environment = make_environment(tracker)
    task = json.load(sys.stdin.buffer)
    confine(task["total_seconds"])
    template, length, letters = None, 0, EscapedNames(task["literal"])
    needs_parts = False
    for variables in task["tasks"]:
        if length > CHARACTERS:
            break
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # when it runs out, SIGPROF ends the process
        try:
            if template is None:
                template = environment.from_string(traced(environment, task["source"]))
                needs_parts = "text" in task["source"] and only_writes_parts(tracker, template, variables)
            variables, marks = letters.marked(variables)
            if needs_parts:
                variables = variables | {"messages": [*map(with_parts, variables["messages"])]}
            answer = letters.restored(render(tracker, template, variables), marks)
            length += len(answer["text"])
        except Exception as error:  # a template can raise anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        text = answer.pop("text", "")
        for one in [*(text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)), answer]:
            sys.stdout.write(json.dumps(one) + "\n")
        sys.stdout.flush()


class SpecialNames:
    """Names of special tokens to find in texts: the longest one that begins at a character, as in tokenizers."""

    def __init__(self, names):
        self.names = frozenset(names)
        self.sizes = sorted({len(name) for name in self.names}, reverse=True)
        self.begins = frozenset(name[:size] for name in self.names for size in range(1, len(name)))
        self.first = re.compile("[" + "".join(sorted({re.escape(name[0]) for name in self.names})) + "]")

    def spans(self, text, *, partial=False):
        """Yield [start, stop) of each name; with `partial` also of an end that may be the begin of a name."""
        position = 0
        while match := self.first.search(text, position):
            start = match.start()
            pieces = (text[start : start + size] for size in self.sizes)
            stop = start + len(next((piece for piece in pieces if piece in self.names), ""))
            if stop == start and partial and len(text) - start < self.sizes[0] and text[start:] in self.begins:
                stop = len(text)
            if stop > start:
                yield start, stop
            position = max(start + 1, stop)


class EscapedNames:
    """Escape of names of special tokens in messages, which stay letters: a template gets a mark for each of them.

    The end of a text that may be the begin of a name is marked, too, since the template may continue it.
    """

    fields = "messages", "tools", "documents"

    def __init__(self, names):
        self.names = SpecialNames(names) if names else None

    def marked(self, variables):
        """Return the variables of a rendering with marks, and the name for each mark."""
        fields = {name: variables[name] for name in self.fields if variables.get(name)}
        names = self.names
        if names is None or not any(any(names.spans(text, partial=True)) for text in texts_of(fields)):
            return variables, {}
        letters, marks = set("".join(texts_of(fields))), {}
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in letters)

        def mark(text):
            pieces, done = [], 0
            for start, stop in names.spans(text, partial=True):
                name = text[start:stop]
                if name not in marks:
                    marks[name] = next(free)
                pieces += text[done:start], marks[name]
                done = stop
            return "".join(pieces) + text[done:]

        return variables | changed(fields, mark), {mark: name for name, mark in marks.items()}

    def restored(self, rendered, marks):
        """Replace the marks in a rendered text by their names, and add the spans of these."""
        if not marks:
            return rendered
        names = {**marks, **{json.dumps(mark)[1:-1]: name for mark, name in marks.items()}}  # in JSON of ASCII
        pieces, literal, ends, shifts, done, size = [], [], [-1], [0], 0, 0
        for match in re.finditer("|".join(map(re.escape, names)), rendered["text"]):
            pieces += rendered["text"][done : match.start()], names[match[0]]
            size, done = size + match.start() - done + len(pieces[-1]), match.end()
            literal.append((size - len(pieces[-1]), size))
            ends.append(done)
            shifts.append(size - done)

        def moved(index):
            return index + shifts[bisect.bisect_right(ends, index) - 1]

        rendered["text"] = "".join(pieces) + rendered["text"][done:]
        for name in ("generated", "messages"):
            if rendered[name] is not None:
                rendered[name] = [(*span[:-2], moved(span[-2]), moved(span[-1])) for span in rendered[name]]
        return rendered | ({"literal": literal} if literal else {})


def texts_of(value):
    """Yield all texts in lists and objects but the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from texts_of(member)
    elif isinstance(value, dict):
        for key, member in value.items():
            if key != "role":
                yield from texts_of(member)


def changed(value: Any, change) -> Any:
    """Apply `change` to all texts in lists and objects but the roles of messages."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed(member, change) for member in value]
    if isinstance(value, dict):
        return {key: member if key == "role" else changed(member, change) for key, member in value.items()}
    return value


def render(tracker, template, variables):
    """Return the best rendering of a conversation, usually of the first of `forms`, as in transformers.

    The best one has all the calls of tools, no arguments as Python writes them, and no word None where a message has
    no content.
    """
    names = [name for message in variables["messages"] for name in called(message)]
    best, error = None, None
    for contents in forms(variables["messages"]):
        for messages in contents:
            try:
                rendered = tracker.render(template, {**variables, "messages": messages})
            except Exception as raised:  # a template can raise anything
                error = error or raised
                continue
            text = rendered["text"]
            in_python = sum(text.count(arguments) for arguments in python_arguments(messages))
            rank = sum(text.count(name) for name in names), -in_python, -text.count("None")
            if best is None or rank > best[0]:
                best = rank, rendered
        if best is not None and error is None and best[0][1] == 0:
            break
    if best is not None:
        return best[1]
    simple = {**variables, "messages": [without_text_before_calls(each) for each in variables["messages"]]}
    if isinstance(variables.get("tools"), list):
        simple["tools"] = [with_description(tool) for tool in variables["tools"]]
    if simple != variables:
        return render(tracker, template, simple)
    raise error or ValueError("it has no form")


def with_description(tool):
    """Return a tool with an empty description if it has none: some templates (gpt-oss) require the key."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def without_text_before_calls(message):
    """Return a message that calls tools with its text as the end of its reasoning: gpt-oss refuses both."""
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if not called(message) or not all(isinstance(text, str) and text for text in (content, reasoning)):
        return message
    text = f"{reasoning}\n\n{content}"
    return {**message, "content": "", "reasoning_content": text, "thinking": text}


def only_writes_parts(tracker, template, variables):
    """Return whether a template writes content that is a list of text parts, but leaves out content that is a text.

    Some templates of vision-language models do.
    """
    texts = []
    for content in (PROBE, [{"type": "text", "text": PROBE}]):
        messages = [{"role": "user", "content": content}]
        try:
            texts.append(tracker.render(template, {**variables, "messages": messages})["text"])
        except Exception:  # a template can raise anything
            texts.append("")
    text, parts = texts
    quoted = any(quote + PROBE + quote in parts for quote in "'\"")  # the list was written in Python or JSON
    return PROBE not in text and PROBE in parts and not quoted


def with_parts(message):
    """Return the message with a list of one text part in place of a text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def forms(messages):
    """Yield the forms in which templates take calls of tools, first those with arguments as in the messages.

    Some templates take arguments as objects, others as texts of JSON. For a message that calls tools without a text,
    some test whether its content is None, others whether it has one, or they take an empty text.
    """
    calling = [number for number, message in enumerate(messages) if called(message)]
    silent = [number for number in calling if messages[number].get("content") is None]

    def contents(messages):
        yield messages
        for make in (lambda one: one | {"content": None}, without_content, lambda one: one | {"content": ""}):
            changed = [make(one) if number in silent else one for number, one in enumerate(messages)]
            if silent and changed != messages:
                yield changed

    yield contents(messages)
    for arguments in (as_objects, as_texts) if calling else ():
        changed = [with_arguments(one, arguments) if number in calling else one for number, one in enumerate(messages)]
        if changed != messages:
            yield contents(changed)


def called(message):
    """Return the names of the tools that a message calls."""
    calls = message.get("tool_calls")
    functions = [one.get("function", one) for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    return [one["name"] for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]


def python_arguments(messages):
    """Return the arguments of all calls as Python's `str` writes objects, instead of JSON.

    A template that needs arguments as JSON texts, and gets objects, writes them like this.
    """
    calls = [
        call for message in messages if called(message) for call in message["tool_calls"] if isinstance(call, dict)
    ]
    functions = [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]
    arguments = [function.get("arguments") for function in functions]
    return {str(value) for value in arguments if value and isinstance(value, dict) and str(value) != as_texts(value)}


def without_content(message):
    return {key: value for key, value in message.items() if key != "content"}


def as_objects(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def as_texts(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_arguments(message, make):
    """Return the message with the arguments of its calls in another form, if they are JSON."""

    def changed(call):
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": make(call["arguments"])} if "arguments" in call else call

    try:
        return {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
    except ValueError:  # no JSON
        return message


class RenderTracker:
    """Tracker of the spans of messages and marked parts in a text while it is rendered.

    A template yields its text in pieces, so that calls from inside of it know the number of characters before. Macros
    and `{% set %}` blocks write no text yet: loops inside of them are not tracked.
    """

    def render(self, template, variables):
        self.pieces, self.length = [], 0
        self.numbers = {id(message): number for number, message in enumerate(variables["messages"])}
        self.generated, self.messages, self.loops = [], [], []
        for piece in template.generate(variables):
            self.pieces.append(piece)
            self.length += len(piece)
            if self.length > CHARACTERS:
                raise ValueError(f"it has more than {CHARACTERS:,} characters")
        generated = self.generated if self.marks else None
        return {"text": "".join(self.pieces), "generated": generated, "messages": self.messages}

    marks = False  # whether the template has `{% generation %}`

    def generate(self, caller):
        text = caller()
        self.generated.append((self.length, self.length + len(text)))
        return text

    def enter(self):
        self.loops.append(None)
        return ""

    def turn(self, *items):
        """Begin an iteration of the innermost loop, over `items`."""
        self.leave()
        numbers = [self.numbers[id(item)] for item in items if id(item) in self.numbers]
        self.loops.append((numbers[0], self.length) if numbers else None)
        return ""

    def leave(self):
        last = self.loops.pop()
        if last is not None and self.length > last[1]:
            self.messages.append((*last, self.length))
        return ""


def traced(environment, source):
    """Return the program of a template with calls of the tracker around each loop and at each of its iterations."""
    import jinja2.nodes as nodes

    tracing = next(one for one in environment.extensions.values() if one.identifier.endswith("Tracing"))

    def call(name, *arguments):
        return nodes.Output([tracing.call_method(name, list(arguments))]).set_lineno(1)

    def visit(node):
        for field, value in node.iter_fields():
            if isinstance(value, list) and any(isinstance(one, nodes.For) for one in value):
                setattr(node, field, [new for one in value for new in around(one)])
        for child in node.iter_child_nodes():
            visit(child)

    def around(node):
        if not isinstance(node, nodes.For):
            return [node]
        targets = [node.target, *node.target.find_all(nodes.Name)]
        names = [nodes.Name(one.name, "load") for one in targets if isinstance(one, nodes.Name)]
        node.body.insert(0, call("turn", *names))
        return [call("enter"), node, call("leave")]

    program = environment.parse(source)
    visit(program)
    program.set_environment(environment)
    return program


def make_environment(tracker):
    """Make Jinja's environment with the settings, filters and functions of transformers' chat templates."""
    import pprint  # noqa: F401 - which Jinja imports while it renders, when no file can be opened any more
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.ext
    import jinja2.nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Tracing(jinja2.ext.Extension):
        """Extension that calls the tracker. `{% generation %} … {% endgeneration %}` marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        enter, leave, turn = tracker.enter, tracker.leave, tracker.turn

        def parse(self, parser):
            line, tracker.marks = next(parser.stream).lineno, True
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("generate"), [], [], body, lineno=line)

        def generate(self, caller):
            return tracker.generate(caller)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # without escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Tracing, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    with contextlib.suppress(jinja2.TemplateError):  # so that Jinja and Python load their codecs and error handling
        environment.from_string("{{ 'a\\n' }}{{ raise_exception(1) }}").render()
    return environment


def confine(seconds: int) -> None:
    """Limit the resources of this process. A limit that the system lacks (macOS: memory) is left out."""
    import resource  # which Windows lacks

    limits = {"AS": MEMORY, "CPU": seconds, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            last = limit + (name == "CPU")  # a second after SIGXCPU comes SIGKILL
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, last))


if __name__ == "__main__":
    main()
