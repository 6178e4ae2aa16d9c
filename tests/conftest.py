"""Settings for all tests: eight CPU devices, a shared cache of compiled programs, and fixed random examples.

JAX, jaxtyping, NumPy and pytest run unmodified; only documented options are set here, each with its reason.
"""

import os
import secrets
import shutil
import tempfile


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU or TPU of the machine would change what the tests compare
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # meshes need devices
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # two worker processes compile for TPUs; none uses a TPU
# Threads of XLA. With no more threads than devices a collective can wait forever for a thread that another one holds.
os.environ.setdefault("NPROC", "32")
# A folder for each run, made by pytest's first process for its workers, which read a program that another one compiled.
OWN_CACHE = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="eqx_decoders_tests_")
if OWN_CACHE is not None:
    os.environ["EQX_DECODERS_CACHE"] = f"{OWN_CACHE}/tokens"  # tokenized data
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{OWN_CACHE}/programs")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # also programs that compile quickly
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Slow tests also draw new cases in each run. A test that fails prints the seed, and FRESH_SEED=… draws them again.
os.environ.setdefault("FRESH_SEED", str(secrets.randbelow(1_000_000)))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402


# Shapes and types are checked in the packages whose functions take arrays, in all items of containers; functions of
# texts and settings, for which the checks would take a third of the tests' time, are left to pyright.
TYPE_CHECKED = (
    *("core", "context", "sharding", "numerics", "layers", "blocks", "encoders", "model", "inference", "training"),
    *("rl", "evaluation", "serving.engine", "serving.scoring_engine", "data.batch", "data.signals"),
)
jaxtyping.install_import_hook(
    [f"eqx_decoders.{name}" for name in TYPE_CHECKED],
    "beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))",
)

from tests.ids import short  # noqa: E402
from tests.programs import drop_compiled_programs  # noqa: E402


jax.config.update("jax_numpy_rank_promotion", "raise")  # a forgotten axis is an error, not a broadcast
jax.config.update("jax_numpy_dtype_promotion", "strict")  # so is a float32 array that meets a bfloat16 one

# no limits of time for an example: the first one compiles
UNTIMED = dict(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.register_profile("fixed", derandomize=True, **UNTIMED)
hypothesis.settings.register_profile("fresh", print_blob=True, **UNTIMED)
hypothesis.settings.load_profile("fixed")


def pytest_unconfigure() -> None:
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`slow(fast=("some id", "another id"))`: the named cases of a parametrized test are not slow."""
    unseen: dict[str, set[str]] = {}
    for item in items:
        mark = next((mark for mark in item.own_markers if mark.name == "slow" and mark.kwargs), None)
        if mark is not None:
            names = unseen.setdefault(item.nodeid.partition("[")[0], set(mark.kwargs["fast"]))
            if item.callspec.id in names:
                item.own_markers.remove(mark)
                if item.get_closest_marker("slow") is None:
                    names.remove(item.callspec.id)
    missing = {test: sorted(names) for test, names in unseen.items() if names}
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow(fast=...) names cases that do not exist or have a mark of their own: {missing}")


def pytest_make_parametrize_id(val) -> str | None:
    """Return the id of a parameter, the same in every process; None: pytest's own id."""
    return short(val)


@pytest.fixture
def getkey():
    """A function that returns a new key at each call, the same ones in every run."""
    state = [jax.random.key(5678)]

    def next_key():
        state[0], key = jax.random.split(state[0])
        return key

    return next_key


@pytest.fixture
def without_type_checks():
    """Signatures are not checked, as in users' programs: for tests of the library's own errors about wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Only so many compiled programs are held from one file of tests to the next."""
    yield
    drop_compiled_programs()
