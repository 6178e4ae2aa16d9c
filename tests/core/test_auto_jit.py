"""An eager call compiles one program per shape; inside `jax.jit` it is part of the outer program."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_decoders as ed
from eqx_decoders.core import auto_jit
from eqx_decoders.core.auto_jit import bounded_jit, concrete, is_staged, jit_if_eager
from eqx_decoders.training.lora import add_lora
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.commands import ROOT
from tests.compare import assert_array_equal, assert_close
from tests.models import filled, rich_decoder, some_tokens
from tests.programs import compilations


FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(scope="module")
def model():
    return filled(rich_decoder())


CALLS = {
    "logits": lambda model, tokens: model(tokens).logits,
    "loss": lambda model, tokens: ed.next_token_loss(model, ed.Batch(tokens=tokens))[0],
    "gradient": lambda model, tokens: (
        eqx.filter_grad(ed.next_token_loss, has_aux=True)(model, ed.Batch(tokens=tokens))[0].embedding.table
    ),
}


@pytest.mark.slow(fast=("logits",))
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_compiles_nothing_and_equals_jit(model, name):
    call, length = CALLS[name], 5 + list(CALLS).index(name)
    tokens, others = np.asarray(some_tokens(2, length, 1)), np.asarray(some_tokens(2, length, 2))
    with compilations() as first:
        call(model, others)
    with compilations() as second:
        alone = call(model, tokens)
    assert len(first) <= (4 if name != "gradient" else 12) and not second
    assert_close(alone, eqx.filter_jit(call)(model, tokens))


@pytest.mark.parametrize("used, min_programs, recompiled", [(0.6, 1, 0), (0.7, 1, 2), (0.7, 2, 0)])
def test_programs_are_evicted_when_memory_maps_run_out(used, min_programs, recompiled, monkeypatch):
    """XLA aborts a process without a memory map for the next program."""
    monkeypatch.setattr(auto_jit, "_jitted_functions", [])
    monkeypatch.setattr(auto_jit, "_num_programs", 0)
    monkeypatch.setattr(auto_jit, "MIN_PROGRAMS", min_programs)
    double, triple = bounded_jit(lambda x: 2 * x), bounded_jit(lambda x: 3 * x)
    calls = [functools.partial(function, np.ones(3, np.float32)) for function in (double, triple)]
    want = [np.asarray(call()) for call in calls]
    monkeypatch.setattr(auto_jit, "_used_maps", lambda: used)
    with compilations() as programs:
        for call, value in zip(calls, want, strict=True):
            assert_array_equal(call(), value)
    assert len(programs) == recompiled


def test_memory_maps_are_counted(monkeypatch, tmp_path):
    maps, max_maps = tmp_path / "maps", tmp_path / "max_maps"
    monkeypatch.setattr(auto_jit, "MAPS", maps)
    monkeypatch.setattr(auto_jit, "MAX_MAPS", max_maps)
    assert auto_jit._used_maps() == 0.0  # as on other systems
    maps.write_text("a map\n" * 30)
    max_maps.write_text("40\n")
    assert auto_jit._used_maps() == 0.75


def test_is_staged_inside_jit_only():
    seen = []
    note = lambda x: seen.append(is_staged()) or x  # noqa: E731
    note(1.0)
    jax.grad(note)(1.0)
    jax.vmap(note)(jnp.ones(2))
    jax.jit(note)(1.0)
    jax.jit(jax.grad(note))(1.0)
    jax.lax.map(note, jnp.ones(2))
    jax.eval_shape(lambda x: note(x), 1.0)
    assert seen == [False, False, False, True, True, True, True]


def test_a_function_is_compiled_only_outside_of_jit():
    names = []
    double = jit_if_eager(lambda x: names.append(type(x).__name__) or 2 * x)
    assert double(jnp.ones(3)).tolist() == [2, 2, 2] and double(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(names) == 1  # traced once
    outer = jax.make_jaxpr(double)(jnp.ones(3))
    assert "jit" not in str(outer) and len(names) == 2
    with jax.disable_jit():
        assert double(jnp.ones(3)).tolist() == [2, 2, 2]


def test_values_are_known_unless_they_are_traced():
    assert concrete(None) is None
    assert_array_equal(concrete(jnp.arange(3)), [0, 1, 2])
    assert_array_equal(concrete(np.arange(3)), [0, 1, 2])
    assert jax.jit(lambda x: concrete(x) is None)(jnp.arange(3))


@pytest.mark.slow
def test_gradients_by_the_input_are_one_line(model):
    tokens = some_tokens(2, 6)
    embeds = model.embed_tokens(tokens)
    assert_close(model(embeds=embeds).logits, model(tokens).logits)
    gradient = jax.grad(lambda embeds: model(embeds=embeds).logits[0, 3, 7])(embeds)
    assert gradient.shape == embeds.shape and jnp.all(gradient[1] == 0) and jnp.all(gradient[0, 4:] == 0)
    assert float(jnp.abs(gradient[0, :4]).min()) > 0
    step = 1e-3 * gradient
    ends = (model(embeds=embeds + sign * step).logits[0, 3, 7] for sign in (1, -1))
    assert float(next(ends) - next(ends)) == pytest.approx(2e-3 * float(jnp.sum(gradient**2)), rel=0.02)


def from_init():
    return ed.init(rich_decoder(), key=jax.random.key(0))


def from_a_checkpoint():
    return ed.load_hf(FIXTURES / "llama_rope")


def with_adapters():
    return add_lora(from_a_checkpoint(), LoRAConfig(rank=2), key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [from_init, from_a_checkpoint, with_adapters])
def test_the_step_of_a_custom_training_loop_is_compiled_once(make):
    """Outputs of a step have the shardings of its inputs: weights and the state of an optax optimizer."""
    with compilations() as first:
        model = make()
    assert len(first) <= 3
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all")
    def step(model, state, tokens):
        gradient, _ = eqx.filter_grad(ed.next_token_loss, has_aux=True)(model, ed.Batch(tokens=tokens))
        with jax.numpy_dtype_promotion("standard"):  # which optax expects
            updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state

    tokens, counts = np.arange(14).reshape(2, 7) % 16, []
    for _ in range(3):
        with compilations() as made:
            model, state = step(model, state, tokens)
        counts.append(len(made))
    assert counts == [1, 0, 0]
