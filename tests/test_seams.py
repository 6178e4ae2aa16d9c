"""What a call may leave out: rejected tokens, padding inside a row, a run directory of another model."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.kernel import attend
from eqx_decoders.layers.mask import Chunked, SlidingWindow
from eqx_decoders.training.runs import continued
from eqx_decoders.training.settings import TrainConfig, save_settings
from tests.strategies import filled, rich_decoder, some_tokens


def test_a_rejected_token_was_never_there():
    model, tokens = filled(rich_decoder(2)), some_tokens(1, 9)
    run = eqx.filter_jit(model)
    cache = run(tokens[:, :5], cache=ed.init_cache(model.config, 1, 16, dtype=jnp.float32)).cache
    _, proposal, _ = eqx.filter_jit(model.propose)(tokens[:, 5:8], cache=cache)
    kept = cache.commit(proposal.entries, jnp.where(jnp.arange(3)[None] < 1, proposal.positions, -1))
    assert kept.length.tolist() == [6]
    want = run(jnp.concatenate([tokens[:, :6], tokens[:, 8:]], axis=1)).logits[:, -1:]
    np.testing.assert_allclose(run(tokens[:, 8:], cache=kept).logits, want, atol=2e-5)


@pytest.mark.parametrize("mask", [SlidingWindow(50), Chunked(64)], ids=str)
def test_padding_inside_a_document_hides_nothing(mask):
    positions = np.full((1, 600), -1, np.int32)
    positions[0, :40], positions[0, 560:] = np.arange(40), np.arange(40, 80)
    draws = np.random.default_rng(0)
    query, key, value = (jnp.asarray(draws.normal(size=(1, 600, 2, 8)), jnp.float32) for _ in range(3))
    places = dict(mask=mask, query_positions=jnp.asarray(positions), key_positions=jnp.asarray(positions))
    dot, chunked = (attend(query, key, value, aligned=True, kernel=k, **places)[0] for k in ("dot", "chunked"))
    np.testing.assert_allclose(chunked, dot, atol=1e-5)


def test_a_run_directory_goes_on_with_its_own_model_and_tokenizer(tmp_path):
    begun = TrainConfig(seed=3)
    assert continued(begun, tmp_path) == begun  # nothing there yet
    save_settings(begun, tmp_path / "settings.json")
    assert continued(dataclasses.replace(begun, steps=900), tmp_path).steps == 900
    changes = (dict(model="llama3-8b"), dict(tokenizer="bytes"), dict(seed=4), dict(lora_rank=2), dict(init_from="a/b"))
    for change in changes:
        with pytest.raises(ed.ConfigError, match=next(iter(change))):
            continued(dataclasses.replace(begun, **change), tmp_path)
