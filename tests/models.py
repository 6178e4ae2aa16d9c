"""Small decoders with drawn weights, and batches for them."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.xielu import XIELU
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.init import abstract
from eqx_decoders.sharding.layout import Layout


VOCAB, EMBED, HEAD_DIM = 32, 16, 8

SIGMOID = dict(score="sigmoid", order="score_first", renormalize=True, scaling_factor=2.5)
ROUTERS = [
    RouterConfig(),
    RouterConfig(bias=True),
    RouterConfig(order="score_first"),
    RouterConfig(order="score_first", renormalize=True, per_expert_scale=True),
    RouterConfig(order="score_first", num_groups=2, groups_per_token=1, scaling_factor=4.0),
    RouterConfig(selection_bias=True, num_groups=2, groups_per_token=1, group_score="top2_sum", **SIGMOID),
    RouterConfig(score="sigmoid", input_scaling=True),
    RouterConfig(sparse_mixer=0.3),
    RouterConfig(score="sqrt_softplus", order="score_first", renormalize=True, selection_bias=True),
]


def rich_decoder(layers: int = 4, **changes) -> DecoderConfig:
    """A fixed decoder with a pattern, for laws that are about everything but the layers."""
    norm = RMSNormConfig()
    local = BlockConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, mask=SlidingWindow(5), soft_cap=5.0),
        mlp=MLPConfig(mlp_dim=24),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
        post_mlp_norm=norm,
    )
    full = BlockConfig(
        mixer=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, fused_qkv=True, sinks=True, qkv_bias=True, qk_norm=QKNorm()
        ),
        mlp=MLPConfig(mlp_dim=24, fused=True, bias=True, activation="gelu_tanh"),
        pre_mixer_norm=norm,
        pre_mlp_norm=norm,
    )
    config = DecoderConfig(vocab_size=VOCAB, embed_dim=EMBED, blocks=((local, full) * layers)[:layers], final_norm=norm)
    return dataclasses.replace(config, **changes)


def filled(config: DecoderConfig, seed: int = 0, **execution) -> Decoder:
    """A decoder with every weight drawn by NumPy: nothing to compile, and no zero bias, sink or unit scale that could
    hide a mistake."""
    generator = np.random.default_rng(seed)

    def draw(leaf):
        # five dimensions has only a map of heads and features together, which contracts the first two
        fan = leaf.shape[1] * leaf.shape[2] if leaf.ndim == 5 else leaf.shape[-2] if leaf.ndim > 2 else 4
        return jnp.asarray(generator.normal(0.2 if leaf.ndim < 2 else 0.0, fan**-0.5, leaf.shape), leaf.dtype)

    shapes, static = eqx.partition(abstract(config), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    model = eqx.combine(jax.tree.map(draw, shapes), static).replace(**execution)
    # at zero xIELU jumps by what it takes for a number just below
    is_xielu = lambda part: isinstance(part, XIELU)  # noqa: E731
    close = lambda part: eqx.tree_at(lambda one: one.eps, part, part.eps * 1e-6) if is_xielu(part) else part  # noqa: E731
    return jax.tree.map(close, model, is_leaf=is_xielu)


def some_tokens(rows: int, length: int, seed: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (rows, length)), jnp.int32)


def layout_of(*, flatten: bool) -> Layout | None:
    """A layout with which `einsum` flattens products on CPUs; None, with which it does not."""
    return Layout() if flatten else None


def draw(seed: int, shape: Sequence[int], dtype: DTypeLike = "float32") -> jax.Array:
    """Numbers of a normal distribution, drawn by NumPy: nothing is compiled."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def packed(rows: int = 4, length: int = 13) -> tuple[jax.Array, jax.Array]:
    """Tokens and segment ids: several documents per row, of one token too, and padding at the end."""
    cuts = [(5, 1, 4), (13,), (1, 1, 9), (3, 10), (6, 6, 1), (2, 2, 2, 2), (12,), (1,)]
    tokens = some_tokens(rows, length)
    segments = np.zeros((rows, length), np.int32)
    for row in range(rows):
        ids = np.repeat(np.arange(len(cuts[row % 8])) + 1, cuts[row % 8])[:length]
        segments[row, : len(ids)] = ids
    return tokens, jnp.asarray(segments)


def loss(model, tokens, segments, key):
    """A loss that weighs every logit differently, and the logits."""
    out = model(tokens, segment_ids=segments, key=key)
    weights = jnp.sin(jnp.arange(out.logits.size, dtype=jnp.float32)).reshape(out.logits.shape)
    return jnp.mean(weights * out.logits), out.logits


@eqx.filter_jit
def run(model, tokens, segments, key=None):
    (_, logits), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(model, tokens, segments, key)
    return logits, gradient


@eqx.filter_jit
def extend(model, tokens, cache, positions=None):
    out = model(tokens, positions=positions, cache=cache)
    return out.logits, out.cache
