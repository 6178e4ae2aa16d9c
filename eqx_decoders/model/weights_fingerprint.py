"""Fingerprint of a model's weights, by which answers and scores that they gave are found again."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.sharding.explicit import typed


@jax.jit
@typed
def weights_fingerprint(model: Decoder) -> UInt32[Array, ""]:
    """Return a hash of all bits of a model's weights, the same on every mesh."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(named_leaves(eqx.filter(model, eqx.is_array)).values()):
        bits, place = _bits(leaf), jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):  # no flat view: that would gather what a mesh has split
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        mixed = (bits ^ (bits >> 15)) * ((place * jnp.uint32(2654435761) + jnp.uint32(2 * number + 1)) | 1)
        total += jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)
    return total


def _bits(x: Array) -> UInt32[Array, "*shape"]:
    """Return the bits of numbers as integers; of numbers with 4 bits, integers as different as they are."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.int32).astype(jnp.uint32)
    x = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 8 else x
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
