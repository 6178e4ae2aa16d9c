"""Fingerprint of a model's weights: the key under which completions and scores of these weights are cached."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.explicit import run_with_auto_axes


@jax.jit
@run_with_auto_axes
def weights_fingerprint(model: Decoder) -> UInt32[Array, ""]:
    """Return a 32-bit hash of all bits of a model's weights. It does not depend on the mesh."""
    total = jnp.zeros((), jnp.uint32)
    for index, leaf in enumerate(named_leaves(eqx.filter(model, eqx.is_array)).values()):
        bits = _bits(leaf)
        # index of each element in the flattened array; flattening itself would all-gather a sharded array
        position = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        mixed = (bits ^ (bits >> 15)) * ((position * jnp.uint32(2654435761) + jnp.uint32(2 * index + 1)) | 1)
        total += jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    return total


def _bits(x: Array) -> UInt32[Array, "*shape"]:
    """Return the bits of an array as uint32: a hash for 64-bit dtypes.

    Floats of less than 8 bits are upcast to float32 first.
    """
    if x.dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return halves[..., 0] ^ (halves[..., 1] * jnp.uint32(2246822519))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32).astype(jnp.uint32)
    x = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 8 else x
    bits_dtype = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, bits_dtype).astype(jnp.uint32)
