"""Process that decodes untrusted files. `serving.frontend.media_files` runs this file as a script.

Decoders are large C libraries, and a small file may keep a decoder busy for minutes. This process can be killed, has
limits of memory and CPU time, and its failure affects no other process. It cannot open files or sockets.

The only argument is a JSON object:

- `path`: `sys.path` of the server.
- `directory`: the model's directory.
- `limits`: fields of `MediaLimits`.
- `seconds`: maximum CPU time of a task.
- `memory`: maximum memory in bytes.
- `max_bytes`, `max_tokens`: maximum bytes of the arrays of a task, and maximum tokens of its files.

The first line of the output is `{}`, or `{"error": message}`. A task is a line of standard input, `[[kind, size, name],
...]`, followed by each file in base64. The reply is a line, followed by the bytes of all arrays:

- `{"error": message}`, with `"last": true` if the process exits after this reply;
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


_NICENESS = 5  # the engine has priority
_DECODERS = ("PIL", "av", "soundfile", "soxr")
# Modules that decoders and NumPy import only when a file needs them
_LAZY_MODULES = ("numpy.fft", "numpy.linalg", "encodings.utf_16", "encodings.utf_32", "encodings.cp1252")
_UNUSED_SUFFIXES = ("__main__", "report", "datasets", "Tk", "_tk", "Qt", "Grab", "Show")


def main() -> None:
    with contextlib.suppress(AttributeError, OSError):
        os.nice(_NICENESS)
    config = json.loads(sys.argv[1])
    sys.path[:] = config["path"]
    source = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # decoders may print to stdout, which must contain replies only
        try:
            reader = create_reader(config)
        except Exception as error:
            send(replies, {"error": f"{type(error).__name__}: {error}"})
            return
        limit_resources(config["memory"])
        send(replies, {})
        while line := source.readline():
            files = [(kind, source.read(size), name) for kind, size, name in json.loads(line)]
            signal.setitimer(signal.ITIMER_PROF, config["seconds"])  # SIGPROF ends the process when the time is over
            reply, arrays = read(reader, files, config["max_bytes"], config["max_tokens"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            files.clear()
            send(replies, reply)
            for array in arrays:
                replies.write(array)
            replies.flush()
            if "last" in reply:
                return
            del reply, arrays


def create_reader(config):
    """Return the `FileReader` of the model. Imports all modules now, because no file can be opened later."""
    from eqx_decoders.io.processors.processor import FileReader
    from eqx_decoders.media_files.limits import MediaLimits

    reader = FileReader.load_reader(config["directory"], limits=MediaLimits(**config["limits"]))
    for module in (*_LAZY_MODULES, *itertools.chain.from_iterable(map(modules_of, _DECODERS))):
        with contextlib.suppress(Exception):  # a module with a missing dependency, which no file needs
            importlib.import_module(module)
    if "PIL.Image" in sys.modules:
        sys.modules["PIL.Image"].init()
    return reader


def modules_of(package):
    """Yield the names of all modules of a package. A missing package has none: decoding a file reports it."""
    with contextlib.suppress(ImportError):
        root = importlib.import_module(package)
        yield package
        for module in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."):
            if not module.name.endswith(_UNUSED_SUFFIXES):
                yield module.name


def limit_resources(memory: int) -> None:
    """Limit the resources of this process. Limits that the operating system does not have are skipped."""
    with contextlib.suppress(ImportError):
        import resource

        for name, limit in {"DATA": memory, "FSIZE": 0, "NOFILE": 0, "CORE": 0}.items():
            with contextlib.suppress(AttributeError, ValueError, OSError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def send(replies, value) -> None:
    replies.write(json.dumps(value).encode() + b"\n")
    replies.flush()


def read(reader, files, max_bytes, max_tokens):
    """Return the reply to a task, and the bytes of all arrays."""
    from eqx_decoders.errors import EqxDecodersError

    try:
        by_kind: dict[str, list[bytes]] = {}
        for kind, text, name in files:
            by_kind.setdefault(kind, []).append(decode_base64(text, name))
        files.clear()
        results = reader.read(by_kind, max_tokens=max_tokens, max_bytes=max_bytes)
        rows = []
        arrays = []
        for kind, files_of_kind in results.items():
            for file in files_of_kind:
                rows.append([kind, file.text, [[name, str(x.dtype), x.shape] for name, x in file.arrays.items()]])
                arrays += [bytes_of(x) for x in file.arrays.values()]
        return {"read": rows}, arrays
    except EqxDecodersError as error:
        reply: dict[str, object] = {"error": str(error)}
        if isinstance(error.__cause__, MemoryError):  # memory may not suffice for the next task
            reply["last"] = True
        return reply, []
    except MemoryError:
        return {"error": "The files need more memory than is available. Send smaller files.", "last": True}, []


def decode_base64(text: bytes, where: str) -> bytes:
    """Decode base64. Raises DataError for invalid or empty base64."""
    from eqx_decoders.errors import DataError

    try:
        content = base64.b64decode(text.translate(None, b" \t\r\n\f\v"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{where} is not valid base64: {error}.") from error
    if not content:
        raise DataError(f"{where} is empty (0 bytes).")
    return content


def bytes_of(array):
    """Return the bytes of an array, without a copy if it is contiguous."""
    import numpy as np

    return np.ascontiguousarray(array).data.cast("B") if array.size else b""


if __name__ == "__main__":
    main()
