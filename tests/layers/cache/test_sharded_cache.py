"""Caches whose slots are sharded over `context`: chunked prefill and decoding for every type of attention."""

import re

import jax
import jax.numpy as jnp
import pytest

import eqx_decoders as ed
from tests.laws import check_ragged_pieces
from tests.layers.cached_mixers import MIXERS, decoder
from tests.models import filled


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("piece", [4, 5])
def test_pieces_and_tokens_equal_one_call(kind, piece):
    """Pieces that the mesh does or does not divide, rows at different positions, wrapped rolling windows."""
    layout = ed.Layout.create(context=4, data=2)
    cache = ed.abstract_cache(decoder(kind), 4, 16, layout=layout)
    split = [leaf for leaf in jax.tree.leaves(cache) if "context" in str(leaf.sharding.spec)]
    assert len(split) >= 2, cache
    check_ragged_pieces(filled(decoder(kind)), layout, piece, slots=16)


@pytest.mark.slow
def test_sharded_cache_equals_one_device():
    model = filled(decoder("keys"))
    prompt = [[5, 6, 7, 8, 9, 10, 11], [3, 1, 2]]
    want = ed.generate(model, prompt, max_new_tokens=9)
    for sizes in (dict(context=8), dict(context=2, tensor=2, data=2)):
        got = ed.generate(model.place(ed.Layout.create(**sizes)), prompt, max_new_tokens=9)
        assert got.tolist() == want.tolist()


def test_decoding_step_does_not_gather_slots():
    """For reads and writes: no result of a collective has the size of a device's slots, or of all slots."""
    layout = ed.Layout.create(context=4, tensor=2)
    config = decoder("keys")
    model, cache = ed.abstract(config, layout=layout), ed.abstract_cache(config, 2, 4 * 208, layout=layout)
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32, sharding=layout.activation_sharding("batch length", (2, 1)))

    def step(model, cache, tokens):
        out = model(tokens, cache=cache)
        return out.logits, out.cache

    program = jax.jit(step).lower(model, cache, tokens).compile()
    moved = re.findall(r" = (.*?) (?:all-|reduce-scatter|collective-permute)[\w-]*\(", program.as_text())
    assert moved and not any(size in each for each in moved for size in ("208", "832")), moved
    kept = [leaf for leaf in jax.tree.leaves(program.output_shardings[1]) if "context" in str(leaf.spec)]
    assert len(kept) >= 2, program.output_shardings
