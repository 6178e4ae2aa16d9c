"""Mixture of attention heads against loops in NumPy and float64, in both forms of computation."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.families.jetmoe import HeadMixtureConfig
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.training.settings.lora import LoRAConfig
from tests.compare import assert_close
from tests.errors import refused
from tests.layers.common import BF16, apply, context, drawn, normal
from tests.models import filled, some_tokens
from tests.oracles import ready_by_hand, route_by_hand, sees, wide


POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, -1]])
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]])


def mixture(**options) -> HeadMixtureConfig:
    sizes = dict(num_heads=6, num_kv_heads=2, head_dim=4, rope=Rope(theta=10.0))
    return HeadMixtureConfig(attention=AttentionConfig(**(sizes | options)), num_experts=5)


def mixture_by_hand(layer, x, positions, segments):
    """For each token: its experts, and attention of the heads of these experts over all visible keys."""
    c, out = layer.config, np.zeros_like(x)
    key, value = (np.einsum("bte,ehd->bthd", x, wide(w)) for w in (layer.key, layer.value))
    key = ready_by_hand(layer, key, layer.key_norm, None, positions)
    for b, t in np.ndindex(x.shape[:2]):
        if positions[b, t] < 0:
            out[b, t] = wide(layer.out_bias) if c.out_bias else 0.0
            continue
        for e, weight in zip(*route_by_hand(layer.router, x[b, t])[:2], strict=True):
            query = np.einsum("e,ehd->hd", x[b, t], wide(layer.query)[e])[None, None]
            query = ready_by_hand(layer, query, layer.query_norm, None, positions[b : b + 1, t : t + 1])[0, 0]
            for h in range(c.num_kv_heads):
                seen = [
                    j
                    for j in range(x.shape[1])
                    if sees(c.mask, positions[b, t], positions[b, j], segments[b, t] == segments[b, j])
                ]
                scores = [query[h] @ key[b, j, h] * c.head_dim**-0.5 for j in seen]
                shares = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(share * value[b, j, h] for share, j in zip(shares, seen, strict=True)) / sum(shares)
                out[b, t] += weight * mixed @ wide(layer.out)[e, h]
        out[b, t] += wide(layer.out_bias) if c.out_bias else 0.0
    return out


@pytest.mark.parametrize(
    "options",
    [dict(out_bias=True), dict(mask=SlidingWindow(3), qk_norm=QKNorm(norm=RMSNormConfig(eps=0.1)), num_heads=2)],
)
@pytest.mark.parametrize("experts", ["dense", "dropless"])
def test_mixture_matches_a_loop(options, experts):
    layer = drawn(lambda key: mixture(**options).build(6, key=key))
    x = normal(2, 7, 6)
    out, entries = apply(layer, jnp.asarray(x), context(POSITIONS, SEGMENTS, attention="dot", experts=experts))
    assert_close(out, mixture_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=128)
    assert entries.key.shape == entries.value.shape == (2, 7, 2, 4)  # capacity for all experts together


@pytest.mark.slow
def test_sorted_and_dense_forms_have_the_same_gradients():
    layer = drawn(lambda key: mixture(out_bias=True).build(6, key=key))
    x, weights = jnp.asarray(normal(2, 7, 6)), jnp.asarray(normal(2, 7, 6, seed=2))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(both, ctx):
        layer, x = both
        return jnp.sum(layer(x, ctx)[0] * weights)

    plain, fast = (gradient((layer, x), context(POSITIONS, SEGMENTS, experts=form)) for form in ("dense", "dropless"))
    assert_close(fast, plain, units=128)


@pytest.mark.parametrize("experts", ["dense", "dropless"])
def test_bfloat16_selects_the_same_heads(experts):
    """Routing is in float32. With inputs that are exact in bfloat16, only the sums are rounded."""
    layer = drawn(lambda key: mixture(out_bias=True).build(6, key=key))
    x = jnp.asarray(normal(2, 7, 6), jnp.bfloat16)
    ctx = context(POSITIONS, SEGMENTS, experts=experts, precision=BF16)
    out, _ = apply(layer, x, ctx)
    assert out.dtype == jnp.bfloat16
    assert_close(out, mixture_by_hand(layer, wide(x), POSITIONS, SEGMENTS), units=16, dtype="bfloat16")


@pytest.mark.parametrize("field, value", [("sinks", True), ("qkv_bias", True), ("fused_qkv", True), ("out_dim", 3)])
def test_unsupported_attention_options_are_refused(field, value):
    with refused(ed.ConfigError, f"attention has {field}="):
        mixture(**{field: value})


def test_norms_over_all_heads_and_too_many_experts_are_refused():
    with refused(ed.ConfigError, "qk_norm.over='heads'", "'head'"):
        mixture(qk_norm=QKNorm(over="heads"))
    with refused(ed.ConfigError, "3 experts", "num_experts=2"):
        dataclasses.replace(mixture(), num_experts=2)


@pytest.mark.slow
def test_quantized_and_low_rank_weights_equal_dense_weights():
    """Weights in 4 and 8 bits, and weights with low-rank pairs. The products are computed expert by expert."""
    config = ed.DecoderConfig(
        vocab_size=16, embed_dim=24, blocks=(ed.BlockConfig(mixer=mixture(), mlp=None),), final_norm=RMSNormConfig()
    )
    model, tokens = filled(config), some_tokens(1, 5) % 16
    few = ed.quantize(model, "int8")
    assert_close(few(tokens).logits, ed.dequantize(few)(tokens).logits, units=64)
    pairs = ed.add_lora(model, LoRAConfig(rank=2, targets=("*.mixer.query", "*.mixer.out")), key=jax.random.key(0))
    pairs = jax.tree.map(lambda leaf: leaf + 0.1, pairs)
    assert_close(pairs(tokens).logits, ed.merge_lora(pairs)(tokens).logits, units=64)
