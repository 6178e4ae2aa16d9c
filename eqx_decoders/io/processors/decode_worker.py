"""Process that decodes untrusted files: run as a script by `serving.frontend.media_files`.

Decoders are large programs in C, and a small file may keep one busy for minutes: this process can be ended, is limited
in memory and processor time, and breaks nothing else when it breaks. It can open no file or socket.

The one argument is a JSON object: `path` (of Python), `directory` (of the model), `limits` (of `MediaLimits`), and the
limits of one task: `seconds` of processor time, `memory` in bytes, `most_bytes` and `most_tokens` of its results. The
first line of the output is `{}`, or `{"error": sentence}`. A task is a line of standard input, `[[kind, size, name],
...]`, followed by each file in base64; its answer is a line, followed by the bytes of all arrays:

- `{"error": sentence}`, with `"last": true` from a process that ends itself;
- `{"read": [[kind, text, [[name, dtype, shape], ...]], ...]}`.
"""

import base64
import binascii
import contextlib
import importlib
import itertools
import json
import os
import pkgutil
import signal
import sys


NICE = 5  # the engine comes first
# Decoders, and modules that they import only when a file needs them.
PACKAGES = ("PIL", "av", "soundfile", "soxr")
LATER = ("numpy.fft", "numpy.linalg", "encodings.utf_16", "encodings.utf_32", "encodings.cp1252")
UNUSED = ("__main__", "report", "datasets", "Tk", "_tk", "Qt", "Grab", "Show")  # ends of names


def main() -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.nice(NICE)
    task = json.loads(sys.argv[1])
    sys.path[:] = task["path"]
    source = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what decoders print is no answer
        try:
            reader = make_reader(task)
        except Exception as error:
            send(answers, {"error": f"{type(error).__name__}: {error}"})
            return
        confine(task["memory"])
        send(answers, {})
        while line := source.readline():
            files = [(kind, source.read(size), name) for kind, size, name in json.loads(line)]
            signal.setitimer(signal.ITIMER_PROF, task["seconds"])  # when it runs out, SIGPROF ends the process
            answer, arrays = read(reader, files, task["most_bytes"], task["most_tokens"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            files.clear()
            send(answers, answer)
            for array in arrays:
                answers.write(array)
            answers.flush()
            if "last" in answer:
                return
            del answer, arrays


def make_reader(task):
    """Return the rules of the model's directory, with all their imports loaded: no file can be opened later."""
    from eqx_decoders.io.processors.processor import FileReader
    from eqx_decoders.media_files.limits import MediaLimits

    reader = FileReader.load_rules(task["directory"], limits=MediaLimits(**task["limits"]))
    for module in (*LATER, *itertools.chain.from_iterable(map(modules_of, PACKAGES))):
        with contextlib.suppress(Exception):  # one that lacks something, which no file needs
            importlib.import_module(module)
    if "PIL.Image" in sys.modules:
        sys.modules["PIL.Image"].init()
    return reader


def modules_of(package):
    """Yield the names of all modules of a package; none where it is missing, which an error reports later."""
    with contextlib.suppress(ImportError):
        root = importlib.import_module(package)
        yield package
        for module in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."):
            if not module.name.endswith(UNUSED):
                yield module.name


def confine(memory: int) -> None:
    """Limit the resources of this process. A limit that the system lacks is left out."""
    with contextlib.suppress(ImportError):
        import resource

        for name, limit in {"DATA": memory, "FSIZE": 0, "NOFILE": 0, "CORE": 0}.items():
            with contextlib.suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def send(answers, value) -> None:
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()


def read(reader, files, most_bytes, most_tokens):
    """Return the answer to a task, and the arrays that follow it."""
    from eqx_decoders.errors import EqxDecodersError

    try:
        by_kind: dict[str, list[bytes]] = {}
        for kind, text, name in files:
            by_kind.setdefault(kind, []).append(decoded(text, name))
        files.clear()
        results = reader.read(by_kind, max_tokens=most_tokens, max_bytes=most_bytes)
        rows, arrays = [], []
        for kind, files_of_kind in results.items():
            for file in files_of_kind:
                rows.append([kind, file.text, [[name, str(x.dtype), x.shape] for name, x in file.arrays.items()]])
                arrays += [bytes_of(x) for x in file.arrays.values()]
        return {"read": rows}, arrays
    except EqxDecodersError as error:
        ended = {"last": True} if isinstance(error.__cause__, MemoryError) else {}  # what is left may not suffice
        return {"error": str(error)} | ended, []
    except MemoryError:
        return {"error": "The files take more memory than there is: make them smaller.", "last": True}, []


def decoded(text: bytes, where: str) -> bytes:
    """Decode base64; raise DataError for other text."""
    from eqx_decoders.errors import DataError

    try:
        content = base64.b64decode(text.translate(None, b" \t\r\n\f\v"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} is no base64: {error}.") from error
    if not content:
        raise DataError(f"{where} has no bytes.")
    return content


def bytes_of(array):
    """Return the bytes of an array, without a copy where it is contiguous."""
    import numpy as np

    return np.ascontiguousarray(array).data.cast("B") if array.size else b""


if __name__ == "__main__":
    main()
