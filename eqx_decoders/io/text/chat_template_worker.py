"""The process in which a chat template is rendered: run as a script by `io.text.chat_template`, on Linux and macOS.

Jinja's sandbox keeps an untrusted template from Python's internals, but not from endless loops or strings of 10 GB:
the operating system limits processor time and memory. Should the sandbox have a hole, no file, socket or process can
be opened. Standard input holds a JSON object with `source`, `tasks` (the variables of each rendering), `literal`
(names of special tokens that are letters in messages), `seconds` (of processor time for each) and `total_seconds`; the
one argument, a list, says where jinja2 is found. The output is a line with one JSON object for each that this process
renders, as soon as it is done: `{"error": sentence}`, or, behind lines with the pieces of its text as JSON strings,

- `generated`: [start, stop] of the characters within `{% generation %}`; null where the template has no such mark;
- `messages`: [number of the message, start, stop] of what each turn of a loop over messages wrote;
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
PIECE = 1 << 16  # characters in one line: whoever reads it does something else in between


def main() -> None:
    sys.path += json.loads(sys.argv[1])
    tracker = RenderTracker()
    environment = make_environment(tracker)
    task = json.load(sys.stdin.buffer)
    confine(task["total_seconds"])
    template, length, letters = None, 0, EscapedNames(task["literal"])
    for variables in task["tasks"]:
        if length > CHARACTERS:
            break
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # when it runs out, SIGPROF ends the process
        try:
            template = template or environment.from_string(traced(environment, task["source"]))
            variables, marks = letters.marked(variables)
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
    """Finds names of special tokens in texts: of those that begin at one place the longest, as tokenizers do."""

    def __init__(self, names):
        self.names = frozenset(names)
        self.sizes = sorted({len(name) for name in self.names}, reverse=True)
        self.begins = frozenset(name[:size] for name in self.names for size in range(1, len(name)))
        self.first = re.compile("[" + "".join(sorted({re.escape(name[0]) for name in self.names})) + "]")

    def places(self, text, *, begun=False):
        """[start, stop) of each name; with `begun` that of an end as well that may be the beginning of one."""
        place = 0
        while found := self.first.search(text, place):
            start = found.start()
            pieces = (text[start : start + size] for size in self.sizes)
            stop = start + len(next((piece for piece in pieces if piece in self.names), ""))
            if stop == start and begun and len(text) - start < self.sizes[0] and text[start:] in self.begins:
                stop = len(text)
            if stop > start:
                yield start, stop
            place = max(start + 1, stop)


class EscapedNames:
    """Keeps names of special tokens in messages letters: a template is given a mark in place of each.

    Marked is the end of a text as well that may be the beginning of a name, since something may follow it.
    """

    fields = "messages", "tools", "documents"

    def __init__(self, names):
        self.names = SpecialNames(names) if names else None

    def marked(self, variables):
        """The variables of a rendering with marks, and what each mark stands for."""
        found = {name: variables[name] for name in self.fields if variables.get(name)}
        names = self.names
        if names is None or not any(any(names.places(one, begun=True)) for one in texts_of(found)):
            return variables, {}
        letters, marks = set("".join(texts_of(found))), {}
        free = (chr(place) for place in range(0xE000, 0xF900) if chr(place) not in letters)

        def mark(text):
            pieces, done = [], 0
            for start, stop in names.places(text, begun=True):
                name = text[start:stop]
                if name not in marks:
                    marks[name] = next(free)
                pieces += text[done:start], marks[name]
                done = stop
            return "".join(pieces) + text[done:]

        return variables | changed(found, mark), {mark: name for name, mark in marks.items()}

    def restored(self, found, marks):
        """What a template wrote, with the names in place of the marks, and where they are."""
        if not marks:
            return found
        names = {**marks, **{json.dumps(mark)[1:-1]: name for mark, name in marks.items()}}  # in JSON of ASCII
        pieces, literal, ends, shifts, done, size = [], [], [-1], [0], 0, 0
        for match in re.finditer("|".join(map(re.escape, names)), found["text"]):
            pieces += found["text"][done : match.start()], names[match[0]]
            size, done = size + match.start() - done + len(pieces[-1]), match.end()
            literal.append((size - len(pieces[-1]), size))
            ends.append(done)
            shifts.append(size - done)

        def moved(place):
            return place + shifts[bisect.bisect_right(ends, place) - 1]

        found["text"] = "".join(pieces) + found["text"][done:]
        for name in ("generated", "messages"):
            if found[name] is not None:
                found[name] = [(*one[:-2], moved(one[-2]), moved(one[-1])) for one in found[name]]
        return found | ({"literal": literal} if literal else {})


def texts_of(value):
    """All texts in lists and objects, but for the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key != "role":
                yield from texts_of(one)


def changed(value: Any, change) -> Any:
    """Lists and objects with all their texts changed, but for the roles of messages."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed(one, change) for one in value]
    if isinstance(value, dict):
        return {key: one if key == "role" else changed(one, change) for key, one in value.items()}
    return value


def render(tracker, template, variables):
    """The best rendering of a conversation, the first of `forms` as a rule: that of transformers.

    That is the one with all the calls of tools, and without the word None where a message has no content.
    """
    names = [name for message in variables["messages"] for name in called(message)]
    best, error = None, None
    for contents in forms(variables["messages"]):
        for messages in contents:
            try:
                found = tracker.render(template, {**variables, "messages": messages})
            except Exception as raised:  # a template can raise anything
                error = error or raised
                continue
            rank = sum(found["text"].count(name) for name in names), -found["text"].count("None")
            if best is None or rank > best[0]:
                best = rank, found
        if best is not None and error is None:
            break
    if best is not None:
        return best[1]
    raise error or ValueError("it has no form")


def forms(messages):
    """The forms in which templates take calls of tools, those with arguments as they are given first.

    Some templates take arguments as objects, others as texts of JSON. Of a message that calls tools and says nothing,
    some ask whether its content is None, others whether it has one, or they take an empty text.
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
    """The names of the tools that a message calls."""
    calls = message.get("tool_calls")
    functions = [one.get("function", one) for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    return [one["name"] for one in functions if isinstance(one, dict) and isinstance(one.get("name"), str)]


def without_content(message):
    return {key: value for key, value in message.items() if key != "content"}


def as_objects(arguments):
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def as_texts(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_arguments(message, make):
    """The message with the arguments of its calls in another form, if they are JSON."""

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
    """Where in the text that is being rendered the messages and the marked parts are.

    A template yields its text in pieces; what is called in it thus knows how much was written before. Inside of macros
    and `{% set %}` blocks nothing is written yet: what these loops over is not seen.
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
        """A turn of the innermost loop begins, over `items`."""
        self.leave()
        found = [self.numbers[id(item)] for item in items if id(item) in self.numbers]
        self.loops.append((found[0], self.length) if found else None)
        return ""

    def leave(self):
        last = self.loops.pop()
        if last is not None and self.length > last[1]:
            self.messages.append((*last, self.length))
        return ""


def traced(environment, source):
    """The program of a template, with calls of the tracker around each loop and at the begin of its turns."""
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
    """Jinja with the settings, filters and functions that transformers gives to chat templates."""
    import pprint  # noqa: F401 - which Jinja imports while it renders, when no file can be opened any more
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.ext
    import jinja2.nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Tracing(jinja2.ext.Extension):
        """Calls the tracker. `{% generation %} … {% endgeneration %}` marks what the assistant wrote."""

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
    """Limit what this process may take. A limit that the system lacks (macOS: memory) is left out."""
    import resource  # which Windows lacks

    limits = {"AS": MEMORY, "CPU": seconds, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            last = limit + (name == "CPU")  # a second after SIGXCPU comes SIGKILL
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, last))


if __name__ == "__main__":
    main()
