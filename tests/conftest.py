"""Strict JAX on eight CPU devices, one cache of compiled programs for all processes, and a budget for every test."""

import functools
import gc
import hashlib
import importlib
import os
import pathlib
import platform
import secrets
import shutil
import tempfile
import threading
import time
import types

import jaxlib.version


# `AS_USERS_RUN=1` leaves JAX as users have it: compiled with LLVM's optimisations, default products and promotion.
AS_USERS_RUN = os.environ.get("AS_USERS_RUN") == "1"
ROOT = pathlib.Path(__file__).parents[1]


def cache_directory() -> pathlib.Path:
    """Where compiled programs are kept between runs; a directory for each kind of processor, whose code they are."""
    processor = pathlib.Path("/proc/cpuinfo")
    flags = (
        [line for line in processor.read_text().splitlines() if line.startswith("flags")] if processor.exists() else []
    )
    kind = hashlib.blake2b(f"{platform.machine()} {flags[:1]}".encode(), digest_size=6).hexdigest()
    return ROOT / ".pytest_cache" / f"programs-{kind}"


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # tests run in two processes; none has a TPU
# Threads of XLA. With as many as there are devices, collectives may wait for ever for one that another task holds.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_directory()))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("FRESH_SEED", str(secrets.randbelow(1_000_000)))  # of `make test-slow`; the same in all workers
# Tokens of tests: in a folder of each run of pytest, which the process that made it deletes.
OWN_CACHE = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="eqx_decoders_cache_")
os.environ["EQX_DECODERS_CACHE"] = OWN_CACHE or os.environ["EQX_DECODERS_CACHE"]
if not AS_USERS_RUN:
    # Most of a test's time is the compiler's, on programs that run once or twice. XLA's own passes are not touched, but
    # older versions' way to write the code of fusions takes half of the time, and a module in several pieces a tenth.
    old = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    old = old if jaxlib.version.__version_info__ < (0, 11) else []
    os.environ.setdefault("XLA_FLAGS", " ".join(["--xla_backend_optimization_level=0", *old]))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from _pytest import runner  # noqa: E402

from tests.bytecode import write_share  # noqa: E402
from tests.compare import refuse_vacuous_comparisons  # noqa: E402
from tests.programs import drop_compiled_programs, place_constants  # noqa: E402


refuse_vacuous_comparisons()


def check_when_called() -> None:
    """Make the checker of a function's types at its first call that is checked, once for all functions like it.

    `jaxtyping` makes it where the function is defined: for all that a file imports, and for a function within another
    one at each call of that, even while checks are disabled. Writing and compiling them took a fifth of the time.
    """
    inner = importlib.import_module("jaxtyping._decorator")
    decorate, make, signatures = inner.jaxtyped, inner._make_fn_with_signature, jaxtyping.config
    remembered = functools.cache(make)  # it depends on nothing but the function's name and signature

    def make_once(*signature, **options):
        try:
            return remembered(*signature, **options)
        except TypeError:  # a default that has no hash
            return make(*signature, **options)

    def checked(part, **options):
        if not isinstance(part, types.FunctionType):
            return decorate(part, **options)
        if not part.__annotations__ or hasattr(part, "checked_when_called"):
            return part
        checker = None

        @functools.wraps(part)
        def call(*args, **kwargs):
            nonlocal checker
            __tracebackhide__ = True
            if signatures.jaxtyping_disable:
                return part(*args, **kwargs)
            checker = checker or decorate(part, **options)
            return checker(*args, **kwargs)

        call.checked_when_called = True
        return call

    def jaxtyped(*parts, **options):
        return checked(*parts, **options) if parts else functools.partial(checked, **options)

    inner._make_fn_with_signature = make_once
    inner._apply_typechecker = functools.cache(inner._apply_typechecker)
    jaxtyping.jaxtyped = inner.jaxtyped = jaxtyped


check_when_called()

if not AS_USERS_RUN:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_default_matmul_precision", "highest")
    # A context of MLIR for each program takes 4 ms, a third of a small one, and memory: a thread has one for all.
    lowering = importlib.import_module("jax._src.interpreters.mlir")
    make_context, contexts = lowering.make_ir_context, threading.local()

    def context_of_thread():
        if not hasattr(contexts, "one"):
            contexts.one = make_context()
        return contexts.one

    lowering.make_ir_context = context_of_thread
    place_constants()

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("fixed")


def call_with_room(call):
    """Call a function whose calls have a megabyte for their frames.

    Python 3.11 and later keep frames in blocks of 16 KB. A call that does not fit gets a new block from the system,
    given back as it returns: a loop at the edge of a block spent half of the system's time on that. This function says
    that it needs more than half of a megabyte, and the calls in it take what is left of the block that it gets.
    """
    return call()


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=70_000)

gc.set_threshold(200_000, 50, 100)  # tracing makes many objects that live long: looking for cycles took 5 % of the time

# Seconds of processor time, of the test and of the processes that it starts.
BUDGET = {"fast": 60.0, "medium": 120.0, "slow": 900.0}
MOST_CACHED = 2_000_000_000  # bytes
# Directories of tests about settings, files and programs, of whose time checking signatures takes a third: that is done
# for their slow tests. The layers that they call are checked by all others.
UNCHECKED = ("cli", "data", "families", "io", "planning", "serving")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _drop_large_cache(pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))


def pytest_unconfigure() -> None:
    gc.freeze()  # pytest looks for cycles five times as it ends, among millions of objects
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


def _drop_large_cache(folder: pathlib.Path) -> None:
    files = list(folder.glob("*")) if folder.is_dir() else []
    if sum(file.stat().st_size for file in files) > MOST_CACHED:
        for file in files:
            file.unlink(missing_ok=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        write_share(session.config, ROOT, "eqx_decoders")


def _is_quick(config: pytest.Config) -> bool:
    """Whether no slow test is asked for."""
    return "not slow" in config.option.markexpr.split(" and ")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    """What quick tests compute while their files are read is computed again, with checks, where they call it."""
    jaxtyping.config.update("jaxtyping_disable", _is_quick(session.config))
    try:
        return (yield)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
        gc.freeze()  # modules and items stay until the end: no cycles are looked for among them


def _size(item: pytest.Item) -> str:
    return next((name for name in ("slow", "medium") if item.get_closest_marker(name)), "fast")


def _keep_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the mark `medium` from cases that it names, or whose parameters are all among the first of their lists."""
    unseen: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("medium")
        if mark is None or not mark.kwargs:
            continue
        fast, case = mark.kwargs["fast"], item.callspec
        if isinstance(fast, tuple):
            unseen.setdefault(item.nodeid.partition("[")[0], set(fast)).discard(case.id)
        if case.id in fast if isinstance(fast, tuple) else max(case.indices.values()) < fast:
            item.own_markers.remove(mark)
    missing = {test: sorted(names) for test, names in unseen.items() if names}
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"medium(fast=…) names cases that are not there: {missing}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some cases of tests of medium length are fast; random examples of slow tests are new ones in each run."""
    _keep_fast(config, items)
    for item in items:
        if item.get_closest_marker("slow") and hasattr(item.obj, "hypothesis"):
            hypothesis.seed(int(os.environ["FRESH_SEED"]))(item.obj)
            count = item.obj._hypothesis_internal_use_settings.max_examples
            item.user_properties.append(("compared examples of hypothesis", count))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    return call_with_room(lambda: runner.pytest_runtest_protocol(item, nextitem))


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Fail a test that needs far more than what a suite can afford."""
    begun, clock = _processor_seconds(), time.monotonic()
    result = yield
    spent, budget = _processor_seconds() - begun, BUDGET[_size(item)]
    if spent > budget:
        pytest.fail(f"{spent:.0f} s of processor time ({time.monotonic() - clock:.0f} s), more than {budget:.0f} s.")
    return result


def pytest_report_header() -> str:
    return f"random examples of slow tests: FRESH_SEED={os.environ['FRESH_SEED']}; set it to repeat them"


def pytest_terminal_summary(terminalreporter) -> None:
    """How many examples were compared, and how to draw them again."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("compared"):
                counts[name] = counts.get(name, 0) + value
    for name, count in counts.items():
        terminalreporter.write_line(f"{name}: {count} (FRESH_SEED={os.environ['FRESH_SEED']})")


@pytest.fixture
def getkey():
    """A function that returns a new key at each call, the same ones in every run."""
    state = [jax.random.key(5678)]

    def next_key():
        state[0], key = jax.random.split(state[0])
        return key

    return next_key


@pytest.fixture(autouse=True, scope="module")
def checked_signatures(request):
    """Types and shapes of what functions are given and return, in all that `--jaxtyping-packages` names."""
    unchecked = request.path.relative_to(ROOT).parts[1] in UNCHECKED
    jaxtyping.config.update("jaxtyping_disable", _is_quick(request.config) and unchecked)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Only so many compiled programs are held from one file of tests to the next."""
    yield
    drop_compiled_programs()
