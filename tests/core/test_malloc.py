"""Configuration of malloc on CPU."""

import subprocess
import sys

import jax
import pytest

from eqx_decoders.core import malloc


# Page faults of ten calls of a program with 64 MB of temporaries, after enough calls for malloc to settle.
FAULTS = """
import resource, sys
from eqx_decoders.core.malloc import keep_memory
if "keep" in sys.argv:
    assert keep_memory()
import jax, jax.numpy as jnp
program = jax.jit(lambda x: (x * jnp.ones((2**12, 2**12))) @ jnp.ones(2**12))
for i in range(40 if "keep" in sys.argv else 1):
    program(float(i)).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(10):
    program(float(i)).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="for glibc")
def test_temporaries_are_not_mapped_at_every_call(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def faults(*args: str) -> int:
        return int(subprocess.check_output([sys.executable, "-c", FAULTS, *args], text=True))

    kept, not_kept = faults("keep"), faults()
    pages = 10 * 2**26 // 4096
    assert kept < pages / 2 and not_kept > pages / 2


def test_does_nothing_if_there_is_an_accelerator(monkeypatch):
    """It takes effect if JAX is configured to use the CPU."""
    calls = []

    class Library:
        def __init__(self, name):
            self.mallopt = lambda number, value: calls.append((number, value)) or 1

    monkeypatch.setattr(malloc.ctypes, "CDLL", Library)
    monkeypatch.setattr(malloc.glob, "glob", lambda pattern: [pattern] if "accel" in pattern else [])
    platforms = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", None)
        assert not malloc.keep_memory() and not calls
        jax.config.update("jax_platforms", "cpu")
        assert malloc.keep_memory() and len(calls) == 3 and (-1, -1) in calls  # nothing is given back
    finally:
        jax.config.update("jax_platforms", platforms)
