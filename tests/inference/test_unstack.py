"""Layers in arrays of their own generate what a scan over them does, take no memory, and copy nothing."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.context import Promises
from eqx_decoders.inference import generation as generate_module, unstack
from eqx_decoders.inference.unstack import default_cache_format, inference_cache, unstack_in_place, unstack_layers
from eqx_decoders.layers.cache.kv_cache import CachedKV
from eqx_decoders.layers.mask import Causal
from eqx_decoders.model.init import with_mtp
from eqx_decoders.sharding.backend import backend_of
from tests.commands import ROOT
from tests.compare import assert_array_equal, assert_close
from tests.layers.common import attend_past
from tests.models import filled, rich_decoder, some_tokens


@pytest.fixture
def cut_all(monkeypatch):
    monkeypatch.setattr(unstack, "MIN_BYTES", 0)


@pytest.fixture(scope="module")
def model():
    return filled(with_mtp(rich_decoder(4), 1))


@pytest.mark.slow
def test_views_take_no_memory_and_let_go_of_it(cut_all):
    """A donated array is written in place again once the views are gone, and is not overwritten below them."""
    leaf = jnp.zeros((3, 64, 16)).block_until_ready()
    norm = ed.init(rich_decoder(6), key=jax.random.key(0)).scanned_layers[0].unit[0]
    segment = ed.ScannedLayers(unit=(eqx.tree_at(lambda block: block.mixer.out, norm, leaf),), repeats=3)
    at, size = leaf.unsafe_buffer_pointer(), 64 * 16 * 4
    parts = unstack._view_layers(segment)
    found = [part.unit[0].mixer.out for part in parts]
    assert [view.unsafe_buffer_pointer() for view in found] == [at, at + size, at + 2 * size]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    moved = add(leaf).block_until_ready()
    assert moved.unsafe_buffer_pointer() != at and all(float(view.max()) == 0 for view in found)
    del segment, parts, found
    at = moved.unsafe_buffer_pointer()
    assert add(moved).block_until_ready().unsafe_buffer_pointer() == at


def test_what_is_small_split_or_traced_stays(model, monkeypatch):
    assert unstack_layers(model) is model  # too small
    monkeypatch.setattr(unstack, "MIN_BYTES", 0)
    assert unstack_layers(model.replace(scan=False)).scanned_layers is model.scanned_layers
    placed = model.without_mtp().place(ed.Layout.create(data=2, devices=jax.devices()[:2]))
    assert unstack_layers(placed) is placed
    seen = []
    jax.eval_shape(lambda m: seen.append(len(unstack_layers(m).scanned_layers)), eqx.filter(model, eqx.is_array))
    assert seen == [len(model.scanned_layers)]
    cut = unstack_layers(model)
    assert [segment.repeats for segment in cut.scanned_layers] == [1] * 2 and unstack_layers(cut) is cut
    assert unstack_in_place(model) is model  # views are for each call
    monkeypatch.setattr(unstack, "MAX_LAYERS", 3)
    assert unstack_layers(model) is model


@pytest.mark.slow(fast=("default",))
@pytest.mark.parametrize("sizes", [{}, dict(tensor=2)])
def test_layers_of_gpus_are_not_scanned_and_unstacked_once(model, cut_all, monkeypatch, sizes):
    """Stacked arrays are sliced without a scan, or cut and deleted; the same tokens come out, on a mesh, too."""
    layout = ed.Layout.create(**sizes, devices=jax.devices()[: 2 if sizes else 1])
    model, tokens = jax.tree.map(jnp.copy, model.without_mtp()).place(layout), some_tokens(2, 9)
    want, stacked = model(tokens).logits, model.scanned_layers[0].unit[0].mixer.out
    with monkeypatch.context() as patch:
        patch.setattr(ed.Layout, "backend", backend_of("gpu"))
        sliced = unstack_layers(model)
        assert sliced.scanned_layers is model.scanned_layers and not sliced.execution.scan
        shapes = []
        jax.eval_shape(lambda m: shapes.append(unstack_layers(m).execution.scan), eqx.filter(model, eqx.is_array))
        assert shapes == [False] and not stacked.is_deleted()
        apart = unstack_in_place(model)
        assert stacked.is_deleted() and [segment.repeats for segment in apart.scanned_layers] == [1] * 2
        assert unstack_in_place(apart) is apart is unstack_layers(apart)
        cache = inference_cache(apart, 2, 16, "float32")
    assert apart.scanned_layers[1].unit[0].mixer.out.sharding == stacked.sharding and len(cache.layer_caches) == 2
    assert_close(apart(tokens).logits, want, units=64)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [0, 1])
def test_generates_the_same_tokens(model, drafts, cut_all, monkeypatch):
    prompt, lengths = some_tokens(3, 7), np.asarray([7, 2, 5])
    options = dict(max_new_tokens=6, prompt_lengths=lengths, num_draft_tokens=drafts)
    got, seen = (
        np.asarray(ed.generate(model, prompt, **options)),
        np.stack(list(ed.stream(model, prompt, **options)), 1),
    )
    monkeypatch.setattr(unstack, "MIN_BYTES", 2**60)
    want = np.asarray(ed.generate(model, prompt, **options))
    assert_array_equal(got, want)
    assert_array_equal(seen, want)


@pytest.mark.slow
def test_sixteen_bits_are_stored_as_float32_on_cpu(model, cut_all):
    """And read as such: the logits of a step are those of the whole text, in 16 bits."""
    half = model.without_mtp().replace(precision=ed.Precision(compute=jnp.bfloat16))
    assert default_cache_format(half.execution).dtype == "float32" == default_cache_format(model.execution).dtype
    tokens = some_tokens(2, 9)

    @eqx.filter_jit
    def step(model, tokens):
        cache = inference_cache(model, 2, 16, default_cache_format(model.execution))
        _, cache, _ = model.run(tokens[:, :-1], cache=cache, promises=Promises(cache_is_empty=True))
        hidden, cache, _ = model.run(tokens[:, -1:], cache=cache)
        return model.logits(hidden), cache

    logits, cache = step(unstack_layers(half), tokens)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {"float32", "int32"}
    assert logits.dtype == jnp.float32 and len(cache.layer_caches) == 2
    assert_close(logits[:, 0], half(tokens).logits[:, -1], units=16, dtype="bfloat16")


def test_a_wide_past_is_read_as_it_is():
    """By a few 16-bit queries: results are those of float32 ones, rounded; by many, in 16 bits."""
    random, shape = np.random.default_rng(0), (2, 2, 40, 8)
    past = CachedKV(
        *(jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(2)), jnp.tile(jnp.arange(40), (2, 1))
    )
    for length, exact in ((1, True), (3, True), (32, False)):
        query = jnp.asarray(random.normal(size=(2, length, 4, 8)), jnp.bfloat16)
        options = dict(execution=ed.Execution(), mask=Causal(), query_positions=jnp.full((2, length), 30, jnp.int32))
        run = jax.jit(lambda *given, options=options: [attend_past(one, past, **options) for one in given])
        (out, lse), (wide, wide_lse) = run(query, query.astype(jnp.float32))
        assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
        assert_close((out, lse), (wide, wide_lse), units=2, dtype="bfloat16")
        assert bool((out == wide.astype(jnp.bfloat16)).all()) == exact


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 3), ("bfloat16", 1), ("bfloat16", 3)])
def test_no_step_copies_a_cache(model, dtype, rows, cut_all):
    """In the loop over tokens no array of a cache's size is copied, cast or turned around."""
    half = ed.Precision(params=dtype, compute=dtype)
    model = unstack_layers(ed.init(model.without_mtp().config, key=jax.random.key(0), precision=half))
    request = generate_module._Request.create("generate", model, np.ones((rows, 40), np.int32), max_new_tokens=8)
    arrays, static = eqx.partition((model, request), eqx.is_array_like)
    run = jax.jit(lambda arrays: generate_module._final_state(*eqx.combine(arrays, static)).tokens)
    text = run.lower(arrays).compile().as_text()
    loops = re.findall(r"body=%?([\w.]+)", text)
    bodies = [re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S) for name in loops]
    body = max((match.group() for match in bodies if match), key=len)  # of the loop over tokens: others are parts of it
    sizes = {rows * 2 * slots * 8 for slots in (5, request.cache_length)}
    made = re.findall(r"%?([\w.-]+) = \w+\[([\d,]+)\]", body)
    found = [
        name
        for name, shape in made
        if re.search("copy|convert|transpose", name)
        and "update-slice" not in name  # in place
        and np.prod([*map(int, shape.split(","))]) in sizes
    ]
    assert "dot(" in body or "ynn" in body
    assert not found, found


def test_numbers_of_four_bits_reach_compiled_programs(monkeypatch):
    """A program compiled ahead, as the engine's are, takes the weights of each layer."""
    monkeypatch.setattr(unstack, "MIN_BYTES", 0)
    model = unstack_layers(ed.quantize(ed.load_hf(ROOT / "tests" / "fixtures" / "llama_rope"), "int4", group_size=4))
    assert len(model.scanned_layers) > 1
    arrays, static = eqx.partition(model, eqx.is_array)
    tokens = jnp.zeros((1, 4), jnp.int32)
    run = jax.jit(lambda arrays, tokens: eqx.combine(arrays, static)(tokens).logits)
    assert run.lower(arrays, tokens).compile()(arrays, tokens).shape[:2] == (1, 4)
