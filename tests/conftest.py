"""Strict JAX: eight CPU devices, no silent rank or dtype promotion, exact products."""

import os


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is LLVM's, on programs that run once or twice. XLA's own passes are not touched.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest

from tests.programs import drop_compiled_programs


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture
def getkey():
    """A function that returns a new key at each call, the same ones in every run."""
    state = [jax.random.key(5678)]

    def next_key():
        state[0], key = jax.random.split(state[0])
        return key

    return next_key


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Only so many compiled programs are held from one file of tests to the next."""
    yield
    drop_compiled_programs()
