"""Kernels computed from the kernels of a frozen teacher, against sums in NumPy."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.layers.attention.attention import Attention, AttentionConfig, QKNorm
from eqx_decoders.layers.attention.learned_init import LearnedInitConfig, projection_weights
from eqx_decoders.layers.mask import SlidingWindow
from eqx_decoders.layers.norm import RMSNorm, RMSNormConfig
from eqx_decoders.sharding.axes import FROZEN, axes, frozen, named_leaves
from eqx_decoders.sharding.layout import WEIGHTS
from eqx_decoders.training.flops import flops_per_token, matmul_parameters
from tests.compare import assert_close
from tests.oracles import wide


EMBED = 6
ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
RICH = dataclasses.replace(ATTENTION, qkv_bias=True, out_bias=True, sinks=True, qk_norm=QKNorm(), output_gate=True)
SIZES = dict(teacher_heads=6, teacher_kv_heads=3, teacher_head_dim=4)
CTX = ed.ForwardContext(positions=jnp.broadcast_to(jnp.arange(5), (2, 5)))
X = np.random.default_rng(1).normal(size=(2, 5, EMBED)).astype(np.float32)


def drawn(general: bool, attention: AttentionConfig = ATTENTION):
    """Return a layer with random arrays from NumPy."""
    config = LearnedInitConfig(attention=attention, general=general, **SIZES)
    shapes, static = eqx.partition(
        eqx.filter_eval_shape(lambda key: config.build(EMBED, key=key), jax.random.key(0)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )
    generator = np.random.default_rng(0)
    arrays = jax.tree.map(lambda leaf: jnp.asarray(generator.normal(0.1, 0.4, leaf.shape), leaf.dtype), shapes)
    return eqx.combine(arrays, static)


def into_by_hand(kernel, heads, features):
    """K[b,u,v] = sum over x and y of C[b,x,y] A[x,u] B[y,v]."""
    out = np.zeros((kernel.shape[0], heads.shape[1], features.shape[1]))
    for u, v in np.ndindex(out.shape[1:]):
        for x, y in np.ndindex(kernel.shape[1:]):
            out[:, u, v] += kernel[:, x, y] * heads[x, u] * features[y, v]
    return out


def out_by_hand(kernel, heads, features):
    """K[u,v,b] = sum over x and y of C[x,y,b] A[x,u] B[v,y]: B is transposed."""
    return into_by_hand(kernel.transpose(2, 0, 1), heads, features.T).transpose(1, 2, 0)


def general_by_hand(kernel, whole):
    """K[b,u,v] = sum over x and y of C[b,x,y] W[x,y,u,v]."""
    out = np.zeros((kernel.shape[0], *whole.shape[2:]))
    for x, y in np.ndindex(kernel.shape[1:]):
        out += kernel[:, x, y][:, None, None] * whole[x, y]
    return out


def kernels_by_hand(layer):
    query, key, value, out = (wide(kernel) for kernel in projection_weights(layer.teacher))
    m = jax.tree.map(wide, layer.maps)
    if layer.config.general:
        backwards = general_by_hand(out.transpose(2, 0, 1), m.out).transpose(1, 2, 0)
        return general_by_hand(query, m.query), general_by_hand(key, m.key), general_by_hand(value, m.value), backwards
    return (
        into_by_hand(query, m.query_heads, m.query_features),
        into_by_hand(key, m.key_heads, m.key_features),
        into_by_hand(value, m.value_heads, m.value_features),
        out_by_hand(out, m.out_heads, m.out_features),
    )


@pytest.fixture(scope="module", params=[False, True], ids=["factored", "general"])
def layer(request):
    return drawn(request.param, RICH)


def test_kernels_match_the_sums(layer):
    for got, want in zip(projection_weights(layer.materialized(ed.Layout())), kernels_by_hand(layer), strict=True):
        assert got.dtype == jnp.float32
        assert_close(got, want, units=32)


def test_layer_equals_attention_with_these_kernels(layer):
    """With biases, norms, sinks and a separate gate."""
    x = jnp.asarray(X)
    kernels = tuple(jnp.asarray(kernel, jnp.float32) for kernel in kernels_by_hand(layer))
    own = {field.name: getattr(layer.attention, field.name) for field in dataclasses.fields(layer.attention)}
    assert len(jax.tree.leaves(layer.attention)) == 8
    plain = Attention(**own | dict(zip(("query", "key", "value", "out"), kernels, strict=True)))
    (got, entries), (want, same) = eqx.filter_jit(lambda: (layer(x, CTX), plain(x, CTX)))()
    assert_close(got, np.asarray(want), units=128)
    assert_close(entries.key, np.asarray(same.key), units=128)
    assert layer.config.cache_shape(7) == RICH.cache_shape(7)


@pytest.mark.slow(fast=("general",))
def test_kernels_are_float32_in_bfloat16_models(layer):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer)
    for got, want in zip(projection_weights(half.materialized(ed.Layout())), kernels_by_hand(half), strict=True):
        assert_close(got, want, units=32)


@pytest.mark.slow
def test_only_the_teacher_is_frozen(layer):
    assert frozen(layer) == {f"teacher.{name}" for name in ("query", "key", "value", "out")}

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer):
        return jnp.sum(jnp.sin(layer(jnp.asarray(X), CTX)[0]))

    for name, leaf in named_leaves(gradient(layer)).items():
        assert np.any(leaf) != name.startswith("teacher."), name


def test_everything_below_a_frozen_field_is_frozen():
    class Holder(eqx.Module):
        moving: RMSNorm
        still: dict[str, tuple[RMSNorm, ...]] = eqx.field(metadata=FROZEN)

    norm = RMSNormConfig().build(3)
    held = Holder(moving=norm, still={"a": (norm, norm)})
    assert frozen([held, norm]) == {"0.still.a.0.scale", "0.still.a.1.scale"}
    assert frozen(norm) == frozenset()


def test_teacher_axes_are_sharded_like_heads():
    assert WEIGHTS["teacher_heads"] == WEIGHTS["heads"] and WEIGHTS["teacher_kv_heads"] == WEIGHTS["kv_heads"]
    words = axes(drawn(False))
    assert words["teacher.out"] == ("teacher_heads", "teacher_head_dim", "embed")
    assert words["maps.key_heads"] == ("teacher_kv_heads", "kv_heads")
    assert words["maps.out_features"] == ("head_dim", "teacher_head_dim")
    layout = ed.Layout.create(tensor=2, fsdp=4)
    assert layout.weight_spec("teacher_heads heads") == jax.sharding.PartitionSpec(None, ("tensor",))


@pytest.mark.slow
@pytest.mark.parametrize("general", [False, True])
def test_new_kernels_have_their_teachers_variance(general):
    """For all student sizes. With the fan-in of the wrong axis, the variance would be half as large."""
    attention = AttentionConfig(num_heads=32, num_kv_heads=32, head_dim=32)
    sizes = dict(teacher_heads=16, teacher_kv_heads=16, teacher_head_dim=16)
    layer = LearnedInitConfig(attention=attention, general=general, **sizes).build(64, key=jax.random.key(0))
    fans = (64, 64, 64, 16 * 16)
    for old, new, fan in zip(
        projection_weights(layer.teacher), projection_weights(layer.materialized(ed.Layout())), fans, strict=True
    ):
        assert float(jnp.var(old)) == pytest.approx(1 / fan, rel=0.05)
        assert float(jnp.var(new)) == pytest.approx(1 / fan, rel=0.3)


def test_operations_match_the_attention_of_the_student():
    """Scores and weighted sums count with the student's heads, head_dim and window."""
    config = LearnedInitConfig(attention=dataclasses.replace(ATTENTION, mask=SlidingWindow(7)), **SIZES)
    decoder = ed.DecoderConfig(
        vocab_size=8, embed_dim=EMBED, blocks=(ed.BlockConfig(mixer=config, mlp=None),), final_norm=None
    )
    assert flops_per_token(decoder, 100) == 6 * (matmul_parameters(decoder) + 4 * 7 * (8 + 8))
