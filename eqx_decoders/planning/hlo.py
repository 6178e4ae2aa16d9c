"""Parser for the text of compiled XLA programs: operations, how often each operation runs, and sizes of results."""

import functools
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import NamedTuple

import eqx_decoders.errors as errors_module


_LIBRARY = str(Path(errors_module.__file__).parent)
# modules that all layers call; operations are attributed to their callers instead
_COMMON_MODULES = (
    "einsum",
    "matmul",
    "low_rank",
    "clipped_weight",
    "quantized_weight",
    "layout",
    "context",
    "remat",
    "axes",
)
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([0-9,<= ]*)\]")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_END = re.compile(r'^\}(?:, \w+="[^"]*")*\s*$')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SEVERAL = re.compile(r"\bcalled_computations=\{([^}]*)\}")
_EITHER = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
# operations whose computation applies to pairs of elements and is not a program
_REDUCERS = ("all-reduce", "reduce-scatter", "reduce", "reduce-window", "sort", "scatter", "map", "select-and-scatter")
_FUSED = "fusion-update"  # continues an asynchronous collective and contains a product
_PRODUCTS = ("dot", "ragged-dot", "scaled-dot", "convolution")
# kernels of Pallas, Triton, and NVIDIA's libraries
_KERNEL = re.compile(r'\bcustom_call_target="[^"]*(?:tpu_custom_call|mosaic|triton|cublas|cudnn|cutlass)')


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
    """One operation, `%name = shape kind(rest`.

    `rest`: operands and attributes. `root`: whether it is the result of its computation.
    """

    name: str
    shape: str
    kind: str
    rest: str
    root: bool

    @property
    def base(self) -> str:
        """Return the kind without the suffix `-start` of asynchronous operations."""
        return self.kind.removesuffix("-start")

    @property
    def cause(self) -> str:
        """Return the path of the traced operation (`op_name`), or an empty string."""
        match = _OP_NAME.search(self.rest)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands."""
        return re.findall(r"%?([\w.\-]+)(?:#\d+)?(?=,|$)", re.sub(r"/\*.*?\*/", "", self.rest[: _closing(self.rest)]))


class ComputationRun(NamedTuple):
    """An operation and how often it runs.

    **Arguments:**

    - `times`: number of runs in the program.
    - `depth`: number of loops around it.
    - `caller`: operation that calls its computation. None: the entry computation.
    - `computation`: name of its computation.
    - `unknown`: whether a loop around it has an unknown trip count. Such loops count once.
    - `overlapped`: whether it or an operation around it is asynchronous, with a product between its start and its end.
    """

    op: Op
    times: int
    depth: int
    caller: Op | None
    computation: str
    unknown: bool
    overlapped: bool


class Program(NamedTuple):
    """Parsed program.

    **Arguments:**

    - `computations`: operations of each computation, in schedule order.
    - `entry`: name of the entry computation.
    - `functions`: function of this library for each stack frame id.
    - `multiplying`: names of the computations that run a matrix product or kernel.
    """

    computations: dict[str, list[Op]]
    entry: str
    functions: dict[int, str]
    multiplying: frozenset[str]

    def runs(self) -> Iterator[ComputationRun]:
        """Yield every operation that runs. For a conditional, the branch with the most communication counts."""
        yield from self._runs(self.entry, 1, 0, None, False, False, ())

    def _runs(
        self,
        name: str,
        times: int,
        depth: int,
        caller: Op | None,
        unknown: bool,
        overlapped: bool,
        above: tuple[str, ...],
    ) -> Iterator[ComputationRun]:
        if name in above:
            return
        ops = self.computations.get(name, [])
        for place, op in enumerate(ops):
            beside = overlapped or any(_multiplies(other, self.multiplying) for other in until_done(ops, place))
            yield ComputationRun(op, times, depth, caller, name, unknown, beside)
            if op.kind.endswith(("-done", "-update")):
                continue  # its computation was yielded with the start
            inside = functools.partial(self._runs, caller=op, overlapped=beside, above=(*above, name))
            branches = _branches(op)
            if branches:
                choices = [list(inside(branch, times, depth, unknown=unknown)) for branch in branches]
                yield from max(choices, key=_weight)
            elif op.kind == "while":
                trips = self.trips(op)
                for inner in called(op):
                    yield from inside(inner, times * (trips or 1), depth + 1, unknown=unknown or trips is None)
            elif op.base not in _REDUCERS:
                for inner in called(op):
                    yield from inside(inner, times, depth, unknown=unknown)

    def trips(self, loop: Op) -> int | None:
        """Return the trip count of a loop, from XLA's annotation or the bound in its condition. None: unknown."""
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
        """Return the function of this library that created an operation, or an empty string."""
        frame = re.search(r"\bstack_frame_id=(\d+)", op.rest)
        return self.functions.get(int(frame[1]), "") if frame else ""

    def loops(self) -> list[ComputationRun]:
        """Return the outermost loops."""
        return [run for run in self.runs() if run.op.kind == "while" and run.depth == 0]

    def stacked(self, loop: Op) -> dict[str, int]:
        """Return the shapes of the arrays that a loop writes slice by slice, and how many there are of each shape.

        These are the members of the carry that the body changes and whose first dimension is the trip count. For a scan
        over layers in the forward pass, they are the activations saved for the backward pass.
        """
        trips, body = self.trips(loop), re.search(r"\bbody=%?([\w.\-]+)", loop.rest)
        ops = self.computations.get(body[1], []) if body else []
        root = next((op for op in ops if op.root), None)
        if trips is None or root is None or root.kind != "tuple":
            return {}
        taken = {op.name: op for op in ops if op.kind == "get-tuple-element"}
        counts: dict[str, int] = {}
        for place, (name, shape) in enumerate(zip(root.operands, members(root.shape), strict=True)):
            same = name in taken and f"index={place}" in re.split(r"[,\s]+", taken[name].rest)
            sizes = _sizes(shape)
            if not same and len(sizes) > 1 and sizes[0] == trips:
                plain = shape.split("{")[0]
                counts[plain] = counts.get(plain, 0) + 1
        return counts


def until_done(ops: list[Op], place: int) -> Iterator[Op]:
    """Yield the operations between an asynchronous start and its done operation. Empty for other operations.

    The scheduled operations in between do not depend on its result.
    """
    begin = ops[place]
    if not (begin.kind.endswith("-start") or begin.kind == "send"):
        return
    names = {begin.name}
    for op in ops[place + 1 :]:
        if op.kind.endswith(("-done", "-update")) and names & set(op.operands):
            if op.kind.endswith("-done"):
                return
            names.add(op.name)
        yield op


def _multiplies(op: Op, multiplying: Container[str]) -> bool:
    """Return whether an operation is or contains a product or kernel. For asynchronous pairs, only the start counts."""
    if op.kind.endswith(("-done", "-update")) and op.kind != _FUSED:
        return False
    if op.kind in _PRODUCTS or (op.base == "custom-call" and _KERNEL.search(op.rest)):
        return True
    return any(name in multiplying for name in (*called(op), *_branches(op)))


def _multiplying(computations: dict[str, list[Op]]) -> frozenset[str]:
    """Return the computations that run a product.

    A program lists a computation after the computations that it calls.
    """
    found: set[str] = set()
    for name, ops in computations.items():
        if any(_multiplies(op, found) for op in ops):
            found.add(name)
    return frozenset(found)


def parse(text: str) -> Program:
    """Parse the text that `jax.stages.Compiled.as_text()` returns."""
    computations: dict[str, list[Op]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = _HEAD.match(line) if line[:1] not in ("", " ") else None
        if head is not None:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
        elif _END.match(line):  # attributes of a kernel may be text of several lines
            current = None
        elif current is not None:
            match = _LINE.match(line)
            if match:
                kind = _fused_kind(match[2], line) if match[4] == "fusion" else match[4]
                op = Op(match[2], match[3], kind, line[match.end() :], match[1] is not None)
                computations[current].append(op)
    return Program(computations, entry, functions(text), _multiplying(computations))


def _fused_kind(name: str, line: str) -> str:
    """Return the kind of a fusion.

    XLA:TPU fuses asynchronous collectives with products into three fusions: start, update (with the product) and done.
    Each has the collective in its computation.
    """
    part = re.match(r"async-collective-(start|done)\b", name)
    return f"fusion-{part[1]}" if part else _FUSED if "calls=%async_collective_fusion" in line else "fusion"


@functools.lru_cache(maxsize=4096)
def shape_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays in a tuple: 28 for `"(f32[2,3]{1,0}, u8[4])"`."""
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
    """Return the member shapes of a tuple, such as two for `"(f32[2]{0}, (s32[], u8[4]))"`; or the shape itself."""
    text = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not text.startswith("("):
        return [text]
    parts, depth, begin = [], 0, 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [member for member in parts if member]


def _sizes(shape: str) -> list[int]:
    match = _SHAPE.search(shape)
    return [int(size) for size in match[2].split(",") if size] if match else []


def _closing(rest: str) -> int:
    """Return the index of the parenthesis that closes the one before `rest`."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(rest)


def called(op: Op) -> list[str]:
    """Return the names of the computations that an operation calls."""
    several = _SEVERAL.search(op.rest)
    return _CALLED.findall(op.rest) + (re.findall(r"%?([\w.\-]+)", several[1]) if several else [])


def _branches(op: Op) -> list[str]:
    listed = _BRANCHES.search(op.rest)
    names = re.findall(r"%?([\w.\-]+)", listed[1]) if listed else _EITHER.findall(op.rest)
    return names if op.kind == "conditional" else []


def _weight(runs: list[ComputationRun]) -> tuple[int, int]:
    """Return the sort key of a branch: the bytes that it communicates, then its length."""
    moved = sum(run.times * shape_bytes(run.op.shape) for run in runs if run.op.base in KINDS)
    return moved, len(runs)


def functions(text: str) -> dict[int, str]:
    """Return the innermost function of this library for each stack frame id, such as `"mlp: MLP.__call__"`."""
    tables = _tables(text)
    files, names = ({i: row.strip('"') for i, row in tables[name].items()} for name in ("FileNames", "FunctionNames"))
    locations = {i: _row_fields(row) for i, row in tables["FileLocations"].items()}
    frames = {i: _row_fields(row) for i, row in tables["StackFrames"].items()}
    # some versions of XLA write the id of the parent, others the id plus one, so that "no parent" is 1
    offset = any(frame.get("parent_frame_id") == i for i, frame in frames.items())

    def owner(number: int) -> str:
        seen: set[int] = set()
        while number in frames and number not in seen:
            seen.add(number)
            location = locations.get(frames[number].get("file_location_id", 0), {})
            file = files.get(location.get("file_name_id", 0), "")
            if file.startswith(_LIBRARY) and Path(file).stem not in _COMMON_MODULES:
                function = names.get(location.get("function_name_id", 0), "").replace(".<locals>", "")
                return f"{Path(file).stem}: {function}"
            number = frames[number].get("parent_frame_id", 0) - offset
        return ""

    return {number: owner(number) for number in frames}


def _tables(text: str) -> dict[str, dict[int, str]]:
    tables: dict[str, dict[int, str]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    for name, table in tables.items():
        begin = text.find(f"\n{name}\n")
        for line in text[begin + len(name) + 2 :].split("\n") if begin >= 0 else ():
            row = _TABLE_ROW.match(line)
            if row is None:
                break
            table[int(row[1])] = row[2]
    return tables


def _row_fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", row)}
