"""Shared by the tests of layers: random layers and inputs from NumPy, and a context to call layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqx_decoders as ed
from eqx_decoders.layers.attention import attend
from eqx_decoders.layers.attention.kernels.call import AttentionOptions, group_arguments
from eqx_decoders.layers.cache.kv_cache import Queries


BF16 = ed.Precision(compute=jnp.bfloat16)


def drawn(build, seed: int = 0):
    """Return `build(key)` with random arrays from NumPy: no zero bias, no scale of one."""
    generator = np.random.default_rng(seed)
    tree = eqx.filter_eval_shape(build, jax.random.key(0))
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return eqx.combine(
        jax.tree.map(lambda a: jnp.asarray(generator.normal(0.1, 0.5, a.shape), a.dtype), arrays), static
    )


def normal(*shape, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def context(positions, segments=None, **execution) -> ed.ForwardContext:
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    return ed.ForwardContext(jnp.asarray(positions, jnp.int32), segments, execution=ed.Execution(**execution))


@eqx.filter_jit
def apply(layer, x, ctx, past=None):
    return layer(x, ctx, past)


def run_attention(query, key, value, *, execution, key_axis="length", contiguous=False, **keywords):
    """Call `attend.run_attention` with the keywords of `kernels.registry.attend`."""
    inputs, options = group_arguments(query, key, value, **keywords)
    return attend.run_attention(inputs, options, execution, key_axis=key_axis, contiguous=contiguous)


def attend_past(query, past, *, query_positions, mask, execution, query_spans=None, soft_cap=None):
    """Call `Past.attend` with keywords."""
    options = AttentionOptions(mask=mask, soft_cap=soft_cap)
    return past.attend(Queries(query, query_positions, query_spans), options, execution)
