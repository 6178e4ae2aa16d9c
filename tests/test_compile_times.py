"""Bounds on the compile time of the first programs that users run, with JAX's default settings and no cache.

Times are CPU seconds of the compiling process. The bounds are several times the compile time on a slow machine. They
detect programs whose compile time explodes with a new version of JAX or XLA, but not small changes.
"""

import importlib
import json
import subprocess
import sys

import pytest

import eqx_decoders as ed
from eqx_decoders.families.registry import library_families
from tests.commands import ENVIRONMENT, ROOT


pytestmark = pytest.mark.slow

MAX_SECONDS = 120

INIT = """
import json, sys, time
import equinox as eqx, jax
import eqx_decoders as ed
from eqx_decoders.model.decoder import Decoder

for name in sys.argv[1:]:
    config = ed.get_config(name)
    execution = ed.abstract(config).execution
    build = lambda key: eqx.filter(Decoder.build(config, key=key, execution=execution), eqx.is_array)
    start = time.process_time()
    jax.jit(build).lower(jax.random.key(0)).compile()
    print(json.dumps([name, time.process_time() - start]), flush=True)
"""

FIRST_PROGRAMS = """
import json, sys, time
import jax, numpy as np
import eqx_decoders as ed

name = sys.argv[1]
config, key = ed.get_config(name), jax.random.key(0)
times, start = {}, time.process_time()

def measured(step, result):
    global start
    jax.block_until_ready(jax.tree.leaves(result))
    times[step] = time.process_time() - start
    start = time.process_time()
    return result

model = measured("init", ed.init(config, key=key))
tokens, media = np.full((2, 40), 65), None
if config.media is not None:
    tokens[:, 2:18] = config.media.image_token
    media = ed.Media.create(config, tokens, pixel_values=np.zeros((2, 3, 32, 32), np.float32))
    measured("encoder", model.encode(media))
ids = ed.generate(model, tokens, media=media, max_new_tokens=1, sampler=ed.Greedy())
measured("first generated token", ids)
trainer = ed.Trainer.create(ed.OptimizerConfig(learning_rate=1e-3), model, steps=10)
state = measured("optimizer state", trainer.init(model, key=key))
measured("first training step", trainer.step(state, ed.Batch(tokens=tokens, media=media)))
print(json.dumps(times))
"""


def run(program: str, *names: str) -> list[str]:
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("XLA_FLAGS", "JAX_"))}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def smallest_models() -> list[str]:
    """Return the smallest model of each family by number of parameters."""
    models = [importlib.import_module(module).MODELS for _, module in library_families().values()]
    smallest = {min(names, key=lambda name: ed.count_parameters(ed.get_config(name))) for names in models if names}
    return sorted({*smallest, "tiny-vision"})


@pytest.mark.parametrize("part", range(10))
def test_init_of_the_smallest_model_of_each_family(part):
    names = smallest_models()[part::10]
    times = dict(json.loads(line) for line in run(INIT, *names))
    assert times.keys() == set(names)
    print(times)
    assert {name: seconds for name, seconds in times.items() if seconds > MAX_SECONDS} == {}


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-vision"])
def test_first_programs_of_a_user(name):
    """Initialization, image encoder, generation, optimizer state and training step."""
    times = json.loads(run(FIRST_PROGRAMS, name)[-1])
    print(times)
    assert {step: seconds for step, seconds in times.items() if seconds > MAX_SECONDS} == {}


def test_chains_of_key_splits_compile_fast():
    """A chain of 12 splits, as in a user's nested layers."""
    program = """
import time, jax
def draw(key):
    for _ in range(12):
        key, other = jax.random.split(key)
    return jax.random.normal(other, (64, 64))
start = time.process_time()
jax.jit(draw).lower(jax.random.key(0)).compile()
print(time.process_time() - start)
"""
    assert float(run(program)[-1]) < 30
