"""Reading the text of a compiled XLA program: its operations, how often each is run, and how many bytes they make."""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from eqx_decoders.planning.source_frames import functions


_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([0-9,<= ]*)\]")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SEVERAL = re.compile(r"\bcalled_computations=\{([^}]*)\}")
_EITHER = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
# what these apply to every pair of numbers is no program of its own
_REDUCERS = ("all-reduce", "reduce-scatter", "reduce", "reduce-window", "sort", "scatter", "map", "select-and-scatter")


# collectives
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Op(NamedTuple):
    """One operation: `%name = shape kind(rest`, the rest being operands and attributes. root: what is returned."""

    name: str
    shape: str
    kind: str
    rest: str
    root: bool

    @property
    def base(self) -> str:
        """Its kind, of a pair of asynchronous ones too."""
        return self.kind.removesuffix("-start")

    @property
    def cause(self) -> str:
        """The path of what was traced to it; empty where XLA doesn't say."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%?([\w.\-]+)(?=,|$)", re.sub(r"/\*.*?\*/", "", self.rest[: _closing(self.rest)]))


class ComputationRun(NamedTuple):
    """An operation as it is run: how often, inside how many loops, and on behalf of which call.

    caller: the operation whose computation it belongs to; None in the entry. unknown: whether a loop around it runs a
    number of times that the program does not say: then it counts once.
    """

    op: Op
    times: int
    depth: int
    caller: Op | None
    computation: str
    unknown: bool


class Program(NamedTuple):
    """Operations of every computation, by its name, in order, and the name of the one that is run.

    functions: by the number of a stack frame, which function of this library it is of.
    """

    computations: dict[str, list[Op]]
    entry: str
    functions: dict[int, str]

    def runs(self) -> Iterator[ComputationRun]:
        """Every operation that is run. Of the branches of a condition, of which one runs, the heaviest counts."""
        yield from self._runs(self.entry, 1, 0, None, False, ())

    def _runs(
        self, name: str, times: int, depth: int, caller: Op | None, unknown: bool, above: tuple[str, ...]
    ) -> Iterator[ComputationRun]:
        if name in above:
            return
        for op in self.computations.get(name, ()):
            yield ComputationRun(op, times, depth, caller, name, unknown)
            if op.kind.endswith(("-done", "-update")):
                continue  # what its start has run
            inside = functools.partial(self._runs, caller=op, above=(*above, name))
            branches = _branches(op)
            if branches:
                choices = [list(inside(branch, times, depth, unknown=unknown)) for branch in branches]
                yield from max(choices, key=_weight)
            elif op.kind == "while":
                trips = self.trips(op)
                for called in _called(op):
                    yield from inside(called, times * (trips or 1), depth + 1, unknown=unknown or trips is None)
            elif op.base not in _REDUCERS:
                for called in _called(op):
                    yield from inside(called, times, depth, unknown=unknown)

    def trips(self, loop: Op) -> int | None:
        """How often a loop runs: as XLA notes it, or the bound in its condition; None where data decide."""
        known = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.rest)
        if known:
            return int(known[1])
        condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.rest)
        ops = self.computations.get(condition[1], []) if condition else []
        constants = {
            op.name: int(op.rest.split(")")[0]) for op in ops if op.kind == "constant" and op.rest[:1].isdigit()
        }
        roots = [op for op in ops if op.root]
        bounds = [constants[name] for op in roots for name in op.operands if name in constants]
        return bounds[0] if len(bounds) == 1 else None

    def function(self, op: Op) -> str:
        """Which function of this library an operation is from; empty where the program doesn't say."""
        frame = re.search(r"\bstack_frame_id=(\d+)", op.rest)
        return self.functions.get(int(frame[1]), "") if frame else ""

    def loops(self) -> list[ComputationRun]:
        """The loops that are in no other."""
        return [run for run in self.runs() if run.op.kind == "while" and run.depth == 0]

    def stacked(self, loop: Op) -> dict[str, int]:
        """What a loop writes piece by piece, one at each trip: the shapes of these arrays and how many there are.

        They are the members of what it carries that have its trips in front and that its body changes. Of a scan over
        layers in the forward pass this is what is kept for the backward pass.
        """
        trips, body = self.trips(loop), re.search(r"\bbody=%?([\w.\-]+)", loop.rest)
        ops = self.computations.get(body[1], []) if body else []
        root = next((op for op in ops if op.root), None)
        if trips is None or root is None or root.kind != "tuple":
            return {}
        taken = {op.name: op for op in ops if op.kind == "get-tuple-element"}
        found: dict[str, int] = {}
        for place, (name, shape) in enumerate(zip(root.operands, members(root.shape), strict=True)):
            same = name in taken and f"index={place}" in re.split(r"[,\s]+", taken[name].rest)
            sizes = _sizes(shape)
            if not same and len(sizes) > 1 and sizes[0] == trips:
                plain = shape.split("{")[0]
                found[plain] = found.get(plain, 0) + 1
        return found


def parse(text: str) -> Program:
    """The program in the text that `jax.stages.Compiled.as_text()` returns."""
    computations: dict[str, list[Op]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif line[:1] not in ("", " "):
            head = _HEAD.match(line)
            current = None if head is None else head[2]
            if head is not None:
                computations[head[2]] = []
                entry = head[2] if head[1] else entry
        elif current is not None:
            found = _LINE.match(line)
            if found:
                op = Op(found[2], found[3], found[4], line[found.end() :], found[1] is not None)
                computations[current].append(op)
    return Program(computations, entry, functions(text))


@functools.lru_cache(maxsize=4096)
def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays in a tuple: `"(f32[2,3]{1,0}, u8[4])"` are 28."""
    total = 0
    for kind, sizes in _SHAPE.findall(shape):
        bits = _BITS.get(kind)
        if bits is None:
            digits = re.search(r"\d+", kind)
            bits = int(digits[0]) if digits else 0
        count = 1
        for size in sizes.split(","):
            count *= int(size.strip().removeprefix("<=")) if size.strip() else 1
        total += -(-count * bits // 8)
    return total


def members(shape: str) -> list[str]:
    """The members of a tuple's shape: `"(f32[2]{0:T(8,128)}, (s32[], u8[4]))"` are two; another shape's is itself."""
    text = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not text.startswith("("):
        return [text]
    found, depth, begin = [], 0, 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            found.append(text[begin:place].strip())
            begin = place + 1
    return [member for member in found if member]


def _sizes(shape: str) -> list[int]:
    found = _SHAPE.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def _closing(rest: str) -> int:
    """Where the parenthesis ends that stands before `rest`."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(rest)


def _called(op: Op) -> list[str]:
    several = _SEVERAL.search(op.rest)
    return _CALLED.findall(op.rest) + (re.findall(r"%?([\w.\-]+)", several[1]) if several else [])


def _branches(op: Op) -> list[str]:
    listed = _BRANCHES.search(op.rest)
    names = re.findall(r"%?([\w.\-]+)", listed[1]) if listed else _EITHER.findall(op.rest)
    return names if op.kind == "conditional" else []


def _weight(runs: list[ComputationRun]) -> tuple[int, int]:
    """Of branches the one that communicates most counts, then the longest."""
    moved = sum(run.times * shape_bytes(run.op.shape) for run in runs if run.op.base in KINDS)
    return moved, len(runs)
