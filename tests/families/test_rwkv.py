"""The two layers of RWKV-4 against loops."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import context, drawn, normal
from tests.oracles import sigmoid, wide


SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 3, 3, 0]])
POSITIONS = np.array([[0, 1, -1, 2, 0, 1, 2, 3, 4], [3, 4, 0, 1, 2, 3, 7, 8, -1]])


def part(leaf) -> Any:
    return wide(leaf)


def documents(x):
    """Yield the rows and tokens of each document, without padding, and the previous input of each token."""
    for b, number in ((row, number) for row in range(len(x)) for number in np.unique(SEGMENTS[row])):
        places = np.flatnonzero((SEGMENTS[b] == number) & (POSITIONS[b] >= 0))
        tokens = x[b, places]
        yield b, places, tokens, np.concatenate([np.zeros_like(tokens[:1]), tokens[:-1]])


def token_shift(tokens, earlier, mix):
    return tokens * part(mix) + earlier * (1 - part(mix))


def means_by_hand(layer, x):
    """Compute sums over all earlier tokens."""
    out = np.zeros_like(x)
    for b, places, tokens, earlier in documents(x):
        gate, key, value = (
            token_shift(tokens, earlier, mix) @ part(weight)
            for weight, mix in (
                (layer.gate, layer.gate_mix),
                (layer.key, layer.key_mix),
                (layer.value, layer.value_mix),
            )
        )
        for t in range(len(places)):
            age = t - 1 - np.arange(t)[:, None]
            weights = np.exp(np.concatenate([key[:t] - age * np.exp(part(layer.decay)), [key[t] + part(layer.bonus)]]))
            mean = (weights * value[: t + 1]).sum(0) / weights.sum(0)
            out[b, places[t]] = (sigmoid(gate[t]) * mean) @ part(layer.out)
    return out


def channels_by_hand(layer, x):
    out = np.zeros_like(x)
    for b, places, tokens, earlier in documents(x):
        hidden = np.maximum(token_shift(tokens, earlier, layer.key_mix) @ part(layer.key), 0) ** 2
        gate = sigmoid(token_shift(tokens, earlier, layer.gate_mix) @ part(layer.gate))
        out[b, places] = gate * (hidden @ part(layer.value))
    return out


@pytest.mark.slow(fast=("TimeMixConfig(embed_dim=6 channels=5)-means_by_hand",))
@pytest.mark.parametrize(
    ("config", "by_hand"),
    [
        (TimeMixConfig(embed_dim=6, channels=5), means_by_hand),
        (ChannelMixConfig(embed_dim=6, mlp_dim=5), channels_by_hand),
    ],
)
def test_layers_match_a_loop(config, by_hand):
    """Packed rows with padding in between."""
    layer, x = drawn(lambda key: config.build(6, key=key)), normal(2, 9, 6)
    got, _ = eqx.filter_jit(layer)(jnp.asarray(x), context(POSITIONS, SEGMENTS))
    real = POSITIONS >= 0
    assert_close(np.asarray(got)[real], by_hand(layer, wide(x))[real], units=64)


@pytest.mark.parametrize("config", [TimeMixConfig(embed_dim=8, channels=4), ChannelMixConfig(embed_dim=8, mlp_dim=4)])
def test_layers_must_have_the_embedding_size_of_the_decoder(config):
    with refused(ed.ConfigError, "MixConfig.embed_dim=8", "6"):
        drawn(lambda key: config.build(6, key=key))
