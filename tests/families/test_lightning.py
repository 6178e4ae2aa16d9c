"""Lightning attention, against loops."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.layers.norm import RMSNormConfig
from tests.compare import assert_allclose, assert_close
from tests.layers.common import context, drawn, normal
from tests.oracles import sigmoid, wide


CONFIG = LightningAttentionConfig(num_heads=4, head_dim=3, norm=RMSNormConfig(eps=0.1), rate_layers=3)


def by_hand(layer, x, positions, segments):
    """Compute token by token, with one state per document and without padding."""
    query, key, value, gate = (
        np.tensordot(x, wide(weight), 1) for weight in (layer.query, layer.key, layer.value, layer.gate)
    )
    query, key, value = (y * sigmoid(y) for y in (query, key, value))
    out = np.zeros((*x.shape[:2], layer.out.shape[2]))
    for b in range(len(x)):
        document, state = None, 0.0
        for t in np.flatnonzero(positions[b] >= 0):
            if segments[b, t] != document:
                document, state = segments[b, t], 0.0
            fade = np.exp(-np.maximum(wide(layer.rates), 0.0))[:, None, None]
            state = fade * state + key[b, t][:, :, None] * value[b, t][:, None]
            answer = np.einsum("hk,hkv->hv", query[b, t], state)
            answer = answer / np.sqrt(np.mean(answer**2) + 0.1) * wide(layer.norm.scale).reshape(answer.shape)
            out[b, t] = np.einsum("hv,hve->e", answer * sigmoid(gate[b, t]), wide(layer.out))
    return out


def test_layer_matches_a_loop():
    """Packed rows with padding between documents."""
    layer, x = drawn(lambda key: CONFIG.build(5, key=key)), normal(2, 9, 5)
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0]])
    positions = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 0, 1, -1]])
    got, _ = eqx.filter_jit(layer)(jnp.asarray(x), context(positions, segments))
    real = positions >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x), positions, segments)[real], units=64)


@pytest.mark.slow
def test_decay_rates_of_new_models_decrease_with_depth():
    """For stacked and unstacked layers."""
    linear = ed.BlockConfig(mixer=CONFIG, mlp=None)
    other = ed.BlockConfig(mixer=None, mlp=ed.layers.MLPConfig(mlp_dim=4))
    config = ed.DecoderConfig(vocab_size=8, embed_dim=4, blocks=(linear, other, linear, linear), final_norm=None)
    model = ed.init(config, key=jax.random.key(0))
    blocks = [block for segment in model.scanned_layers for block in segment.unstacked()]
    first = 2.0 ** np.array([-2.0, -4.0, -6.0, -8.0])
    for layer in (0, 2, 3):
        want = first * max(1 - layer / (2 + 1e-5) + 1e-5, 1e-5)  # layer 3 is beyond the three layers of the schedule
        assert_allclose(blocks[layer].mixer.rates, want, rtol=1e-5, atol=1e-9)


def test_layers_beyond_the_rate_schedule_have_a_decay():
    rates = LightningAttentionConfig(num_heads=2, head_dim=4).rates(3)
    assert np.all(np.asarray(rates) > 0)
