"""Outside of `jax.jit` a call is one program, once for each shape; inside it is part of the program around it."""

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
from eqx_decoders.training.lora_config import LoRAConfig
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
def test_a_call_compiles_a_few_programs_once_and_is_what_it_is_within_jit(model, name):
    call, length = CALLS[name], 5 + list(CALLS).index(name)
    tokens, others = np.asarray(some_tokens(2, length, 1)), np.asarray(some_tokens(2, length, 2))
    with compilations() as first:
        call(model, others)
    with compilations() as second:
        alone = call(model, tokens)
    assert len(first) <= (4 if name != "gradient" else 12) and not second
    assert_close(alone, eqx.filter_jit(call)(model, tokens))


@pytest.mark.parametrize("taken, few, again", [(0.6, 1, 0), (0.7, 1, 2), (0.7, 2, 0)])
def test_programs_are_dropped_where_there_is_no_room_for_others(taken, few, again, monkeypatch):
    """XLA ends a process without a map of memory for the next program: then calls before it are compiled again."""
    monkeypatch.setattr(auto_jit, "_bounded", [])
    monkeypatch.setattr(auto_jit, "_seen", 0)
    monkeypatch.setattr(auto_jit, "FEW", few)
    double, triple = bounded_jit(lambda x: 2 * x), bounded_jit(lambda x: 3 * x)
    calls = [functools.partial(each, np.ones(3, np.float32)) for each in (double, triple)]
    want = [np.asarray(call()) for call in calls]
    monkeypatch.setattr(auto_jit, "_taken_maps", lambda: taken)
    with compilations() as programs:
        for call, value in zip(calls, want, strict=True):
            assert_array_equal(call(), value)
    assert len(programs) == again


def test_maps_of_memory_are_counted(monkeypatch, tmp_path):
    maps, most = tmp_path / "maps", tmp_path / "most"
    monkeypatch.setattr(auto_jit, "MAPS", maps)
    monkeypatch.setattr(auto_jit, "MOST_MAPS", most)
    assert auto_jit._taken_maps() == 0.0  # as on other systems
    maps.write_text("a map\n" * 30)
    most.write_text("40\n")
    assert auto_jit._taken_maps() == 0.75


def test_where_a_program_is_recorded():
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


def test_a_function_is_compiled_only_where_nothing_around_it_is():
    names = []
    double = jit_if_eager(lambda x: names.append(type(x).__name__) or 2 * x)
    assert double(jnp.ones(3)).tolist() == [2, 2, 2] and double(jnp.ones(3)).tolist() == [2, 2, 2]
    assert len(names) == 1  # traced once
    outer = jax.make_jaxpr(double)(jnp.ones(3))
    assert "jit" not in str(outer) and len(names) == 2
    with jax.disable_jit():
        assert double(jnp.ones(3)).tolist() == [2, 2, 2]


def test_numbers_are_known_unless_they_are_traced():
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
def test_the_step_of_a_loop_of_ones_own_is_compiled_once(make):
    """What comes out of a step is placed as what went in: weights and what optax makes for them."""
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
