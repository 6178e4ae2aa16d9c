"""The process in which a chat template is rendered: run as a script by `io.chat`.

A template is a program from a stranger. Jinja's sandbox keeps it away from Python's internals, but not from loops
without end or strings of 10 GB, so the operating system bounds processor time and memory here. It also takes away new
files, sockets and processes, in case the sandbox has a hole. Standard input holds a JSON object with `source`,
`requests` (the variables of each rendering), `seconds` (of processor time that each may take) and `path` (where jinja2
is); the answer is `{"texts": [...]}` or `{"error": sentence}`.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys


MEMORY = 1 << 30  # of address space, of which Python takes some 100 MB
CHARACTERS = 10_000_000  # of one rendered text


def main() -> None:
    task = json.load(sys.stdin.buffer)
    sys.path += task["path"]
    environment = make_environment()
    confine()
    try:
        with limited(task["seconds"]):
            template = environment.from_string(task["source"])
        texts = []
        for variables in task["requests"]:
            with limited(task["seconds"]):
                texts.append(render(template, variables))
        answer = {"texts": texts}
    except Exception as error:  # whatever a stranger's program can raise
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))


@contextlib.contextmanager
def limited(seconds: float):
    """When the processor time is over, a signal ends the process, whatever it is doing."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def render(template, variables: dict) -> str:
    pieces, room = [], CHARACTERS
    for piece in template.generate(variables):
        pieces.append(piece)
        room -= len(piece)
        if room < 0:
            raise ValueError(f"it writes more than {CHARACTERS:,} characters")
    return "".join(pieces)


def make_environment():
    """Jinja as chat templates expect it: that of transformers, which fixes what they can rely on."""
    import pprint  # noqa: F401 - which Jinja imports while it renders, when no file can be opened any more
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %} … {% endgeneration %}` marks what the assistant wrote; the text is the same without."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter writes <, > and & as escapes
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern):
        return datetime.datetime.now().strftime(pattern)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    with contextlib.suppress(jinja2.TemplateError):  # have Jinja and Python load their codecs and error handling
        environment.from_string("{{ 'a\\n' }}{{ raise_exception(1) }}").render()
    return environment


def confine() -> None:
    """Bound what this process may take; a system that lacks one of the bounds keeps the others."""
    bounds = {"AS": MEMORY, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}
    for name, bound in bounds.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (bound, bound))


if __name__ == "__main__":
    main()
