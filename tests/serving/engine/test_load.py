"""Replacing the weights of an engine: new requests, running requests, and the prefix cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.serving.engine.request import Request
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.sharding.axes import named_leaves
from tests.errors import refused
from tests.programs import compilations
from tests.serving.engines import alone, engine_for


PROMPT = tuple(range(3, 40))  # longer than a block of the prefix cache


@pytest.fixture(scope="module")
def engine():
    found = engine_for("llama_rope")
    found.warm_up()
    return found


@pytest.fixture(scope="module")
def other_model(engine):
    return jax.tree.map(lambda leaf: leaf * 0.7 + 0.01 if hasattr(leaf, "dtype") else leaf, engine.model)


@pytest.fixture(scope="module")
def fresh_engine(engine, other_model):
    return Engine(other_model, engine.config)


def request(seed=0, **options):
    options.setdefault("sampling", SamplingParams(temperature=1.0, seed=seed))
    return Request(prompt=PROMPT, max_new_tokens=6, **options)


@pytest.mark.slow
def test_loaded_weights_answer_as_in_a_new_engine(engine, fresh_engine, other_model):
    first, model = alone(engine, request()), engine.model
    expected = alone(fresh_engine, request())
    assert expected != first
    with compilations() as compiled:
        engine.load(other_model)
        assert alone(engine, request()) == expected  # the prefix cache has no hit either
        engine.release()
        with refused(ConfigError, "Engine.release", "Engine.load"):
            alone(engine, request())
        for open_request in engine._slot_manager.sequences.copy().values():
            engine.cancel(open_request.request_id)
        while engine.has_work:
            engine.step()
        engine.load(model, version=7)
        engine.submit(request())
        outputs = []
        while engine.has_work:
            outputs += engine.step()
    assert tuple(token for output in outputs for token in output.tokens) == first
    assert {output.version for output in outputs} == {7}
    assert not compiled


@pytest.mark.slow
def test_load_reuses_arrays_without_copying(engine):
    model = engine.model
    engine.load(model)
    held = named_leaves(engine._runner.weights.loaded.model)
    given = {name: leaf for name, leaf in named_leaves(model).items() if isinstance(leaf, jax.Array)}
    assert given and all(held[name] is leaf for name, leaf in given.items())
    engine.load(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if isinstance(leaf, jax.Array) else leaf, model))
    assert {str(leaf.dtype) for leaf in engine._runner.weights.arrays} == {str(leaf.dtype) for leaf in given.values()}
    engine.load(model)


@pytest.mark.slow
@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_load_keeps_or_recomputes_running_requests(engine, fresh_engine, other_model, running):
    model, greedy = engine.model, request(sampling=SamplingParams())
    whole = alone(engine, greedy)
    with refused(ConfigError, "Engine.load", "1 request", "running=", "'keep'", "'recompute'"):
        engine.submit(greedy)
        engine.load(other_model)
    outputs = []
    while sum(len(output.tokens) for output in outputs) < 2:
        outputs += engine.step()
    engine.load(other_model, running=running)
    waiting = engine.submit(request(seed=5))
    while engine.has_work:
        outputs += engine.step()
    old, new = ([t for o in outputs if (o.request_id == waiting) == late for t in o.tokens] for late in (False, True))
    versions = [output.version for output in outputs if output.request_id != waiting]
    # the third token was in flight and is read before the weights are replaced
    assert tuple(old[:3]) == whole[:3] and versions == [versions[0]] * 3 + [versions[0] + 1] * 3
    assert tuple(new) == alone(fresh_engine, request(seed=5))
    read_anew = alone(fresh_engine, dataclasses.replace(greedy, prompt=(*PROMPT, *whole[:3]), max_new_tokens=3))
    assert (tuple(old[3:]) == read_anew) == (running == "recompute")
    engine.load(model)


def test_release_reads_steps_in_flight(engine):
    model, greedy = engine.model, request(sampling=SamplingParams())
    whole = alone(engine, greedy)
    engine.submit(greedy)
    outputs = []
    while not outputs:
        outputs += engine.step()
    engine.release()
    assert engine.has_work and not any(results.sequences for results in engine._in_flight)
    with refused(ConfigError, "Engine.release", "Engine.load"):
        engine.step()
    engine.load(model, running="keep")
    (second,) = engine._reader.outputs  # the next step returns it
    while engine.has_work:
        outputs += engine.step()
    assert outputs[1] is second and tuple(token for output in outputs for token in output.tokens) == whole
    assert [output.version for output in outputs] == [engine.version - 1] * 2 + [engine.version] * 4


def test_block_hashes_depend_on_the_weights(engine):
    """A running request with old keys and values also adds blocks to the prefix cache."""
    cache = engine._slot_manager.prefix_cache
    before = cache.hash_blocks(PROMPT)
    assert cache.hash_blocks(PROMPT) == before
    engine.load(engine.model)
    assert not set(cache.hash_blocks(PROMPT)) & set(before)


def test_load_refuses_weights_of_another_model(engine):
    model = engine_for("llama_rope").model
    with refused(ConfigError, "Engine.load", "scanned_layers.0"):
        engine.load(dataclasses.replace(model, scanned_layers=model.scanned_layers[:-1]))
