"""Mutation tests: change one place of the library, run the tests that reach it, and print what no test noticed.

    python tests/tools/mutants.py --count 80 --seed 1                       # a random draw over all of `TARGETS`
    python tests/tools/mutants.py --file layers/rope.py --line 40 --count 0  # every mutant of one line

Mutants are made from the syntax tree and written into copies of the repository, never into the repository itself.
Which tests reach a line is found once: coverage.py watches each file of tests in a process of its own. JAX traces a
function once and reuses the compiled program, so a line belongs to the whole file of tests that traced it. The map is
kept in `.pytest_cache/` and renewed for each file of tests that changed. In sources that changed since, a mutant counts
as reached by all tests that reach its file; `--map` makes the whole map anew. Slow tests are run with `--slow` alone.
`--tests tests/layers tests/model` takes only these tests, in less time: what they catch is a lower bound.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import coverage
import pytest


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "eqx_decoders"
TIMEOUT = -1
TARGETS = [
    "layers/**/*.py", "blocks/*.py", "model/decoder.py", "training/step/step.py", "training/step/loss.py",
    "training/head/cross_entropy.py", "training/optimizer/optimizer.py", "io/checkpoint/*.py", "inference/*.py",
]  # fmt: skip

COMPARISONS = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn], ast.NotIn: [ast.In],
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
NAMES = [
    ("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"), ("sum", "mean"),
    ("cumsum", "cumprod"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("floor", "ceil"), ("log", "log1p"),
    ("exp", "expm1"), ("sin", "cos"),
]  # fmt: skip
RENAMED = {a: b for pair in NAMES for a, b in (pair, pair[::-1])}
# calls that stand around a value of the same shape, which a mutant takes away
AROUND = {"stop_gradient", "astype", "dropout", "maximum", "minimum", "sigmoid", "tanh", "floor", "sqrt", "clip", "abs"}
# keyword arguments that assert something or are about speed: without them the result is the same
HINTS = {"strict", "maxsize", "unroll", "prevent_cse"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The text that replaces `begin` to `end` (bytes) of a file; `lines`: the statement, for the map of tests."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    lines: tuple[int, ...]

    def apply(self, source: bytes) -> bytes:
        return source[: self.begin] + self.text.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Every mutant of a file. Annotations, docstrings, strings and what imports or exports are left as they are."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, []
        self.starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
        self.statement: tuple[int, ...] = ()
        self.visit(ast.parse(source))

    def add(self, node: ast.expr | ast.stmt | ast.keyword, text: str, more: str = "") -> None:
        """Put `text` where the node is; `more` is a pattern of what goes with it."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        end += re.match(more.encode(), self.source[end:]).end()
        self.found.append(Mutant(self.file, node.lineno, begin, end, text, self.statement))

    def replace(self, node: ast.expr, other: ast.expr) -> None:
        self.add(node, f"({ast.unparse(other)})")

    def change(self, node: ast.expr, **fields) -> None:
        self.replace(node, type(node)(**(dict(ast.iter_fields(node)) | fields)))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.arg)) or _is_type_alias(node):
            return
        outer = self.statement
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
            self.statement = tuple(range(first, max(last, node.lineno) + 1))
        super().visit(node)
        self.statement = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        # what `field(static=True)` says is for those who trace the class: no value
        if node.value is not None and not (isinstance(node.value, ast.Call) and _called(node.value) == "field"):
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        if names == {"__all__"}:
            return
        if names & {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}:
            self.add(node, "pass")  # the name had a value before
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        if type(node.op) in OPERATORS:
            operator = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
            self.add(node, ast.unparse(operator))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.add(node, "pass")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """For the type checker."""

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "pass")

    visit_Continue = visit_Break

    def forced(self, test: ast.expr) -> None:
        for value in (True, False):
            self.replace(test, ast.Constant(value))

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.forced(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_While(self, node: ast.While) -> None:
        self.replace(node.test, ast.Constant(False))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.forced(test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is_none(node.value):
            self.replace(node.value, ast.Constant(None))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, operator in enumerate(node.ops):
            for other in COMPARISONS[type(operator)]:
                self.change(node, ops=[*node.ops[:place], other(), *node.ops[place + 1 :]])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS:
            self.change(node, op=OPERATORS[type(node.op)]())
        if isinstance(node.op, SWAPPED):
            self.change(node, left=node.right, right=node.left)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.change(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for place in range(len(node.values)):
            self.change(node, values=[*node.values[:place], *node.values[place + 1 :]])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.replace(node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1))
            self.replace(node, ast.Constant(node.value - 1))
        elif isinstance(node.value, float):
            self.add(node, str(node.value * 2 or 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = _called(node)
        if name in RENAMED and isinstance(node.func, ast.Attribute):
            self.change(node, func=ast.Attribute(node.func.value, RENAMED[name]))
        elif name in RENAMED:
            self.change(node, func=ast.Name(RENAMED[name]))
        if name in AROUND:
            method = isinstance(node.func, ast.Attribute) and name in ("astype", "clip") and len(node.args) < 2
            self.replace(node, node.func.value if method else node.args[0])
        first = 1 if name == "where" else 0  # where(c, b, a) is the likely slip
        if len(node.args) > first + 1 and not any(isinstance(part, ast.Starred) for part in node.args):
            swapped = [*node.args[:first], node.args[first + 1], node.args[first], *node.args[first + 2 :]]
            self.change(node, args=swapped)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in HINTS]
        for keyword in node.keywords:
            self.add(keyword, "", more=r"(,\s*)?")
        self.generic_visit(node)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_type_alias(node: ast.AST) -> bool:
    """`A = B | C`, `A = Literal[...]`: no value that a test could see."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, (ast.BinOp, ast.Subscript)):
        return False
    return all(isinstance(part, (ast.Name, ast.Load, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple, ast.Constant))
               for part in ast.walk(node.value)) and node.col_offset == 0  # fmt: skip


def targets() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for glob in TARGETS for path in (ROOT / PACKAGE).glob(glob))


def draw(count: int, seed: int, file: str | None, line: int | None) -> list[Mutant]:
    """Random lines without repetition, and one random mutant of each; `count=0`: every mutant of every line."""
    files = [name for name in targets() if file is None or name.endswith(file)]
    if not files:
        sys.exit(f"--file {file} is none of {', '.join(targets())}.")
    mutants = [mutant for name in files for mutant in Finder(name, (ROOT / name).read_bytes()).found]
    mutants = [mutant for mutant in mutants if line is None or mutant.line == line]
    if count == 0:
        return mutants
    by_line = collections.defaultdict(list)
    for mutant in mutants:
        by_line[mutant.file, mutant.line].append(mutant)
    generator, lines = random.Random(seed), list(by_line.values())
    generator.shuffle(lines)
    return [generator.choice(line) for line in lines[:count]]


class Tracer:
    """A pytest plugin that notes which lines of the package run at import, and in each test with its fixtures."""

    def __init__(self, root: Path):
        self.root, self.tests, self.failed = root, {}, []
        self.coverage = coverage.Coverage(None, config_file=False, include=[f"{root}/{PACKAGE}/*"])
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            self.tests[item.nodeid] = dict(lines={}, seconds=time.perf_counter() - begin)
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def write(self, path: str) -> None:
        self.coverage.stop()
        found, imported = self.coverage.get_data(), {}
        for file in found.measured_files():
            source = str(Path(file).relative_to(self.root))
            for line, tests in found.contexts_by_lineno(file).items():
                for name in tests:
                    lines = self.tests[name]["lines"] if name else imported
                    lines[source] = lines.get(source, 0) | 1 << line  # a set of lines as bits
        Path(path).write_text(json.dumps(dict(tests=self.tests, imported=imported, failed=sorted(set(self.failed)))))


class Order:
    """A pytest plugin that runs these tests in this order."""

    def __init__(self, tests: list[str]):
        self.place = {name: place for place, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


@functools.cache
def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Map:
    """Which tests reach which lines, and how long they take; kept from run to run."""

    def __init__(self, slow: bool, folders: Sequence[str]):
        self.slow = slow
        self.folders = tuple(folder.rstrip("/") for folder in folders)
        self.directory = ROOT / ".pytest_cache" / f"mutants-{'all' if slow else 'not-slow'}"
        traces = self.directory.glob("*.json")
        self.files = {path.stem.replace(",", "/"): json.loads(path.read_text()) for path in traces}
        self.unreliable: set[str] = set()  # tests that failed without a mutant, too

    def renew(self, everything: bool, workers: int) -> None:
        present = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
        self.files = {file: self.files[file] for file in present if file in self.files}
        wanted = [file for file in present if self.has(file)]
        stale = [file for file in wanted if everything or file not in self.files or not self.knows(file, file)]
        if not stale:
            return
        print(f"Tracing {len(stale)} of {len(wanted)} files of tests …", flush=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        with copies(workers) as roots:
            for file, traced in zip(stale, each(stale, roots, self.trace), strict=True):
                self.files[file] = traced
                (self.directory / f"{file.replace('/', ',')}.json").write_text(json.dumps(traced))

    def has(self, file: str) -> bool:
        """Whether a file of tests is among those that may catch mutants."""
        return any(file == folder or file.startswith(f"{folder}/") for folder in self.folders)

    def knows(self, tests: str, file: str) -> bool:
        """Whether a file is still what it was when these tests were traced."""
        return self.files[tests]["digests"].get(file) == digest(ROOT / file)

    def trace(self, file: str, root: Path) -> dict:
        out = root / "trace.json"
        run_pytest(root, dict(trace=str(out), file=file, slow=self.slow), None)
        traced = json.loads(out.read_text())
        reached = {file, *traced["imported"]}.union(*(test["lines"] for test in traced["tests"].values()))
        return traced | dict(digests={name: digest(root / name) for name in reached})

    def reaching(self, mutant: Mutant) -> list[str]:
        """The tests that a mutant may fail: quick ones that run the line, slower ones, then the others of their files.

        In each part the file that mirrors the module comes first, then its folder, and then the quickest.
        """
        source = Path(mutant.file).relative_to(PACKAGE)
        mirror = "tests" / source.with_name(f"test_{source.name}")
        parts, failed = [collections.defaultdict(list) for _ in range(3)], set(self.failed())
        for file, traced in self.files.items():
            if not self.has(file):
                continue
            lines = sum(1 << line for line in mutant.lines) if self.knows(file, mutant.file) else None
            runs = {name for name, test in traced["tests"].items() if _meet(test["lines"], mutant.file, lines)}
            if runs or _meet(traced["imported"], mutant.file, lines):
                for name, test in traced["tests"].items():
                    parts[2 if name not in runs else int(test["seconds"] > 0.1)][file].append(name)
        ordered = []
        for part in parts:
            for file in sorted(part, key=lambda file: (*_distance(Path(file), mirror), self.seconds(part[file]))):
                ordered += sorted(part[file], key=lambda name: self.seconds([name]))
        return [name for name in ordered if name not in failed]

    def seconds(self, names: list[str]) -> float:
        return sum(self.files[name.split("::")[0]]["tests"][name]["seconds"] for name in names)

    def failed(self) -> list[str]:
        return [name for traced in self.files.values() for name in traced["failed"]]


def _distance(file: Path, mirror: Path) -> tuple[bool, bool]:
    """Return what sorts the file that mirrors a module first, and its folder next."""
    return file != mirror, file.parent != mirror.parent


def _meet(reached: dict[str, int], source: str, lines: int | None) -> bool:
    """Whether any of these lines, as bits, is reached; None: any line of the source."""
    return source in reached and (lines is None or lines & reached[source] != 0)


def run_pytest(root: Path, job: dict, timeout: float | None) -> tuple[int, str]:
    """pytest in a new process with one of the plugins: its exit code and what it printed."""
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "xla")),
    }
    path = root / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, str(root / "tests" / "tools" / "mutants.py"), "--job", str(path)]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return TIMEOUT, ""
    return done.returncode, done.stdout + done.stderr


def do_job(path: str) -> int:
    """What the new process does."""
    job = json.loads(Path(path).read_text())
    options = ["-m", "slow or not slow" if job["slow"] else "not slow", "-p", "no:xdist", "-p", "no:cacheprovider"]
    if "trace" in job:
        tracer = Tracer(ROOT)
        code = pytest.main([*options, job["file"]], plugins=[tracer])
        tracer.write(job["trace"])
        return code
    files = sorted({name.split("::")[0] for name in job["tests"]})
    return pytest.main([*options, "-x", "--tb=line", *files], plugins=[Order(job["tests"])])


@contextlib.contextmanager
def copies(count: int) -> Iterator[list[Path]]:
    """Copies of the tracked and new files of the repository."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        roots = [Path(directory) / str(index) for index in range(count)]
        for root, file in itertools.product(roots, listed):
            if (ROOT / file).is_file():
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, root / file)
        yield roots


def each(items: list, roots: list[Path], task: Callable) -> Iterator:
    """`task(item, root)` of every item in their order, as many at a time as there are roots, each in one of its own."""
    free = collections.deque(roots)

    def one(item):
        root = free.popleft()
        try:
            return task(item, root)
        finally:
            free.append(root)

    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        yield from pool.map(one, items)


def write(path: Path, source: bytes, clock: Iterator[int]) -> None:
    """With a time of its own: bytecode of another mutant of the same size must not pass for this one's."""
    path.write_bytes(source)
    stamp = next(clock)
    os.utime(path, (stamp, stamp))


def judge(mutant: Mutant, root: Path, tests: Map, clock: Iterator[int], limit: float) -> str:
    """`"caught by …"`, or `"survived …"`."""
    names = tests.reaching(mutant)
    if not names:
        return "survived: no test reaches it"
    spent = itertools.accumulate(tests.seconds([name]) for name in names)
    kept = [name for name, seconds in zip(names, spent, strict=True) if name == names[0] or seconds <= limit]
    first = [name for name in kept if name.split("::")[0] == kept[0].split("::")[0]]
    others = [name for name in kept if name not in first]
    source = (ROOT / mutant.file).read_bytes()
    # the likeliest file alone: most mutants end there, and collecting all files takes its time
    for part, likely in ((first, True), (others, False)):
        while part := [name for name in part if name not in tests.unreliable]:
            write(root / mutant.file, mutant.apply(source), clock)
            code, output = run_pytest(root, dict(tests=part, slow=tests.slow), 120 + 6 * tests.seconds(part))
            write(root / mutant.file, source, clock)
            if code == TIMEOUT:
                return "caught by a timeout"
            if code == 0:
                break
            failed = [name for name in part if re.search(rf"^(FAILED|ERROR) {re.escape(name)}", output, re.MULTILINE)]
            # a failure elsewhere proves nothing if the same tests fail without the mutant, as on a busy machine
            if likely or not failed or run_pytest(root, dict(tests=failed, slow=tests.slow), None)[0] == 0:
                return f"caught by {failed[0] if failed else 'a crash: ' + output.strip()[-200:]}"
            tests.unreliable.update(failed)
    left = "" if len(kept) == len(names) else f" ({len(names) - len(kept)} more are beyond --limit)"
    return f"survived {len(kept)} tests{left}"


def changed(mutant: Mutant) -> str:
    """The lines before and after."""
    before = (ROOT / mutant.file).read_bytes()
    after = mutant.apply(before).decode().splitlines()
    before = before.decode().splitlines()
    first = next(i for i, pair in enumerate(itertools.zip_longest(before, after)) if pair[0] != pair[1])
    tail = next(i for i, pair in enumerate(zip(reversed(before), reversed(after), strict=False)) if pair[0] != pair[1])
    old, new = before[first : len(before) - tail], after[first : len(after) - tail]
    return "\n".join([*(f"    - {line.strip()}" for line in old), *(f"    + {line.strip()}" for line in new)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=80, help="how many; 0 for all")
    parser.add_argument("--seed", type=int, help="of the draw; a new one by default")
    parser.add_argument("--file", help="only in this file, such as layers/rope.py")
    parser.add_argument("--line", type=int, help="only in this line of it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="only tests of these folders and files")
    parser.add_argument("--slow", action="store_true", help="the slow tests, too")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of tests per mutant")
    parser.add_argument("--map", action="store_true", help="find again which tests reach which lines, and stop")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        sys.exit(do_job(options.job))
    tests = Map(options.slow, options.tests)
    tests.renew(options.map, options.workers)
    if tests.failed():
        print("These tests fail without any mutant and are left out:", *tests.failed(), sep="\n  ")
    if options.map:
        return
    seed = random.randrange(10**6) if options.seed is None else options.seed
    mutants = draw(options.count, seed, options.file, options.line)
    print(f"{len(mutants)} mutants, --count {options.count} --seed {seed}", flush=True)
    clock, survivors = itertools.count(int(time.time()) - 10**6), []
    with copies(options.workers) as roots:
        verdicts = each(mutants, roots, lambda mutant, root: judge(mutant, root, tests, clock, options.limit))
        for number, (mutant, verdict) in enumerate(zip(mutants, verdicts, strict=True), 1):
            print(f"{number}. {mutant.file}:{mutant.line} {verdict}\n{changed(mutant)}", flush=True)
            if verdict.startswith("survived"):
                survivors.append(mutant)
    print("\nSurvivors:")
    for mutant in survivors:
        print(f"{mutant.file}:{mutant.line}\n{changed(mutant)}")
    print(f"{len(mutants) - len(survivors)} caught / {len(survivors)} survived / {len(mutants)} drawn (seed {seed})")


if __name__ == "__main__":
    main()
