"""Projections between the embedding table and the stream if their sizes differ, against NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.norm import LayerNormConfig
from tests.compare import assert_close
from tests.errors import refused
from tests.models import EMBED, filled, rich_decoder, some_tokens
from tests.oracles import wide


NARROW = dict(
    tied=True,
    embedding_rank=8,
    embedding_scale=3.0,
    head_transform=HeadTransformConfig(features=8, bias=True, norm=LayerNormConfig()),
)


@pytest.mark.slow
def test_narrow_table_has_input_and_output_projections():
    """The stream is `scale * (row @ kernel)`. The tied head reads `norm(gelu(x @ kernel + bias))`."""
    model, tokens = filled(rich_decoder(1, **NARROW)), some_tokens(2, 5)
    rows = wide(model.embedding.table)[np.asarray(tokens)]
    assert_close(model.embed_tokens(tokens), 3.0 * rows @ wide(model.embedding.projection.kernel))
    hidden = np.random.default_rng(0).normal(size=(2, 5, EMBED)).astype(np.float32)
    x = wide(hidden) / np.sqrt(np.mean(wide(hidden) ** 2, axis=-1, keepdims=True) + 1e-6) * wide(model.final_norm.scale)
    transform = model.head_transform
    y = x @ wide(transform.kernel) + wide(transform.bias)
    y = 0.5 * y * (1 + np.vectorize(math.erf)(y / 2**0.5))
    y = (y - y.mean(axis=-1, keepdims=True)) / np.sqrt(y.var(axis=-1, keepdims=True) + 1e-5)
    y = y * wide(transform.norm.scale) + wide(transform.norm.bias)
    assert_close(model.logits(jnp.asarray(hidden)), y @ wide(model.embedding.table).T, units=512)


@pytest.mark.slow
def test_new_projections_have_about_unit_gain():
    model = ed.init(rich_decoder(1, **NARROW), key=jax.random.key(0))
    assert np.std(model.embedding.projection.kernel) == pytest.approx(8**-0.5, rel=0.2)
    assert np.std(model.head_transform.kernel) == pytest.approx(EMBED**-0.5, rel=0.2)
    assert not np.any(model.head_transform.bias)


def test_tied_head_must_have_the_size_of_the_table():
    with refused(ed.ConfigError, "tied=True", "16", "8", "head_transform.features"):
        rich_decoder(1, **NARROW | dict(head_transform=None))
    untied = dataclasses.replace(rich_decoder(1), embedding_rank=8)
    assert ed.abstract(untied).head.kernel.shape[0] == EMBED
