"""The process in which a chat template is rendered: run as a script by `io.chat`, on Linux and macOS.

Jinja's sandbox keeps an untrusted template from Python's internals, but not from endless loops or strings of 10 GB:
the operating system limits processor time and memory. Should the sandbox have a hole, no file, socket or process can
be opened. Standard input holds a JSON object with `source`, `tasks` (the variables of each rendering), `seconds` (of
processor time for each) and `total_seconds`; the one argument, a list, says where jinja2 is found. The output is a
line with one JSON object for each that this process renders, as soon as it is done: `{"error": sentence}`, or `text`
with

- `generated`: [start, stop] of the characters within `{% generation %}`; null where the template has no such mark;
- `messages`: [number of the message, start, stop] of what each turn of a loop over messages wrote.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys


MEMORY = 1 << 30  # bytes of address space, of which Python takes some 100 MB
CHARACTERS = 10_000_000  # of a rendered text, and of all together beyond which this process begins no other


def main() -> None:
    sys.path += json.loads(sys.argv[1])
    tracker = Tracker()
    environment = make_environment(tracker)
    task = json.load(sys.stdin.buffer)
    confine(task["total_seconds"])
    template, length = None, 0
    for variables in task["tasks"]:
        if length > CHARACTERS:
            break
        signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # when it runs out, SIGPROF ends the process
        try:
            template = template or environment.from_string(traced(environment, task["source"]))
            answer = tracker.render(template, variables)
            length += tracker.length
        except Exception as error:  # a template can raise anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Tracker:
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
    limits = {"AS": MEMORY, "CPU": seconds, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            last = limit + (name == "CPU")  # a second after SIGXCPU comes SIGKILL
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, last))


if __name__ == "__main__":
    main()
