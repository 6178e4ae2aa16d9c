"""Views of some rows of a cache equal the corresponding rows of the complete cache."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.errors import ConfigError
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from tests.compare import assert_allclose
from tests.errors import refused
from tests.layers.cached_mixers import MIXERS, decoder
from tests.models import filled


ROWS = 5
STATES = GatedDeltaNetConfig(num_key_heads=2, num_heads=4, key_dim=6, value_dim=5, taps=3)


def with_pages(cache):
    pages = jnp.arange(ROWS * 4, dtype=jnp.int32).reshape(ROWS, 4)
    return cache.with_tables(pages)


def test_view_of_rows_cannot_be_committed():
    model = filled(decoder("keys"))
    cache = ed.init_cache(model.config, 2, 4, dtype="float32")
    with refused(ConfigError, "Cache.commit_rows"):
        model(np.zeros((1, 1), np.int32), cache=cache.at_rows(jnp.asarray([1])))


KINDS = (*MIXERS, "states", "pages")


@pytest.mark.slow
@pytest.mark.parametrize("some", [[3, 0], [2]])
@pytest.mark.parametrize("kind", KINDS)
def test_view_equals_the_rows_of_the_cache(kind, some, monkeypatch):
    """Rows are read up to the positions of the queries: here slots 2, 4, 8 or 16."""
    monkeypatch.setattr("eqx_decoders.layers.cache.kv_cache.MIN_READ_LENGTH", 2)
    config = decoder(kind if kind in MIXERS else "keys")
    if kind == "states":
        config = dataclasses.replace(config, blocks=(dataclasses.replace(config.blocks[0], mixer=STATES),) * 2)
    model = filled(config)
    cache = ed.init_cache(config, ROWS, 16, dtype="float32", pages=PageConfig(page_size=4) if kind == "pages" else None)
    cache = with_pages(cache) if kind == "pages" else cache
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, 8)).astype(np.int32)
    positions = np.where(np.arange(6)[None] < np.asarray([6, 1, 4, 5, 2])[:, None], np.arange(6)[None], -1)

    @eqx.filter_jit
    def of_all(model, cache, ids, mine):
        hidden, proposal, _ = model.forward_uncommitted(ids, cache=cache)
        return hidden, cache.commit(proposal.entries, jnp.where(mine, proposal.positions, -1), proposal.rope_offset)

    @eqx.filter_jit
    def of_some(model, cache, ids, rows):
        hidden, proposal, _ = model.forward_uncommitted(ids, cache=cache.at_rows(rows))
        return hidden, cache.commit_rows(rows, proposal.entries, proposal.positions, proposal.rope_offset)

    cache = eqx.filter_jit(lambda model, *prompts: model.run(*prompts, cache=cache)[1])(model, ids[:, :6], positions)
    mine = np.isin(np.arange(ROWS), some)
    hidden, whole = of_all(model, cache, ids[:, 6:], mine[:, None])
    part, written = of_some(model, cache, ids[some, 6:], jnp.asarray(some))
    assert_allclose(part, hidden[jnp.asarray(some)], atol=1e-5)
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=1e-5), written, whole)
    assert (np.asarray(written.length) == np.asarray([6, 1, 4, 5, 2]) + 2 * mine).all()
