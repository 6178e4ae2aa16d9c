"""The process in which a chat template is rendered: run as a script by `io.chat`, on Linux and macOS.

Jinja's sandbox keeps an untrusted template from Python's internals, but not from endless loops or strings of 10 GB:
the operating system limits processor time and memory. Should the sandbox have a hole, no file, socket or process can
be opened. Standard input holds a JSON object with `source`, `variables`, `seconds` (of processor time) and `path`
(where jinja2 is found); the output is `{"text": ...}` or `{"error": sentence}`.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys


MEMORY = 1 << 30  # bytes of address space, of which Python takes some 100 MB
CHARACTERS = 10_000_000  # of a rendered text


def main() -> None:
    task = json.load(sys.stdin.buffer)
    sys.path += task["path"]
    environment = make_environment()
    confine()
    signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # when it runs out, SIGPROF ends the process
    try:
        text = environment.from_string(task["source"]).render(task["variables"])
        answer = {"text": text} if len(text) <= CHARACTERS else {"error": f"it has more than {CHARACTERS:,} characters"}
    except Exception as error:  # a template can raise anything
        answer = {"error": f"{type(error).__name__}: {error}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(json.dumps(answer))


def make_environment():
    """Jinja with the settings, filters and functions that transformers gives to chat templates."""
    import pprint  # noqa: F401 - which Jinja imports while it renders, when no file can be opened any more
    import textwrap  # noqa: F401

    import jinja2.constants
    import jinja2.ext
    import jinja2.nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %} … {% endgeneration %}` marks what the assistant wrote; the text is the same without."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's interface

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # without escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    with contextlib.suppress(jinja2.TemplateError):  # so that Jinja and Python load their codecs and error handling
        environment.from_string("{{ 'a\\n' }}{{ raise_exception(1) }}").render()
    return environment


def confine() -> None:
    """Limit what this process may take. A limit that the system lacks (macOS: memory) is left out."""
    for name, limit in {"AS": MEMORY, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


if __name__ == "__main__":
    main()
