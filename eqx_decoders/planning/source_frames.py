"""Which of this library's functions an operation is from, by the stack frames that XLA notes in a program's text."""

import re
from pathlib import Path

import eqx_decoders.errors as here


_LIBRARY = str(Path(here.__file__).parent)
_EVERYWHERE = ("numerics", "layout", "context", "remat", "axes")  # where every layer's operations pass through
_ROW = re.compile(r"^(\d+) (.*)$")


def functions(text: str) -> dict[int, str]:
    """By the number of a frame, `"mlp: MLP.__call__"`: the innermost function of this library that is on its stack."""
    tables = _tables(text)
    files, names = ({i: row.strip('"') for i, row in tables[name].items()} for name in ("FileNames", "FunctionNames"))
    locations = {i: _fields(row) for i, row in tables["FileLocations"].items()}
    frames = {i: _fields(row) for i, row in tables["StackFrames"].items()}
    # some versions write the number of the parent, others the next one, so that none is 1
    later = any(frame.get("parent_frame_id") == i for i, frame in frames.items())

    def owner(number: int) -> str:
        seen: set[int] = set()
        while number in frames and number not in seen:
            seen.add(number)
            location = locations.get(frames[number].get("file_location_id", 0), {})
            file = files.get(location.get("file_name_id", 0), "")
            if file.startswith(_LIBRARY) and Path(file).stem not in _EVERYWHERE:
                function = names.get(location.get("function_name_id", 0), "").replace(".<locals>", "")
                return f"{Path(file).stem}: {function}"
            number = frames[number].get("parent_frame_id", 0) - later
        return ""

    return {number: owner(number) for number in frames}


def _tables(text: str) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    for name, table in found.items():
        begin = text.find(f"\n{name}\n")
        for line in text[begin + len(name) + 2 :].split("\n") if begin >= 0 else ():
            row = _ROW.match(line)
            if row is None:
                break
            table[int(row[1])] = row[2]
    return found


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
