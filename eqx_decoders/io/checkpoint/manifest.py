"""Manifest of a step: shapes, dtypes and fingerprints of its arrays, configuration, and data iterator's state."""

import hashlib
import importlib.metadata
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from eqx_decoders.errors import CheckpointError
from eqx_decoders.sharding.explicit import in_auto_mode, mesh_of
from eqx_decoders.sharding.offload import to_device


FORMAT_VERSION = 1


@jax.jit
def fingerprint(array: Shaped[Array, "*shape"]) -> UInt32[Array, ""]:
    """Return `Σ bits(x_i) (2i + 1) mod 2³²`, with the row-major index `i` of an element.

    The result is the same on every mesh. A flipped bit `b` of any element changes it by ±2ᵇ times an odd number, which
    is never 0 modulo 2³².
    """
    return in_auto_mode(mesh_of(array), _bit_sum, lambda _: PartitionSpec())(array)


def _bit_sum(array: Array) -> UInt32[Array, ""]:
    array = to_device(array)  # the array may be offloaded to the host
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    elif array.dtype.itemsize > 4:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)  # adds a last axis of two words
    else:
        width = jax.dtypes.itemsize_bits(array.dtype)
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, _ in enumerate(bits.shape):  # a reshape would gather a sharded array
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    """Return the fingerprint of each array. In a run of several processes, all must call it for the same arrays."""
    # The programs run one after another, because programs of several CPU processes hang if two run at the same time.
    return {name: int(fingerprint(leaf)) for name, leaf in arrays.items()}


def make_manifest(step: int, arrays: dict[str, Any], data_state: dict, config: dict | str) -> dict[str, Any]:
    """Make the manifest of a step, with its digest. Raises CheckpointError for values that are not plain JSON."""
    sums = fingerprints(arrays)
    body = {
        "format_version": FORMAT_VERSION,
        "library_version": importlib.metadata.version("eqx_decoders"),
        "step": step,
        "config": _json("config", config),
        "data_state": _json("data_state", data_state),
        "arrays": {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "fingerprint": sums[name]}
            for name, leaf in arrays.items()
        },
    }
    if body["data_state"] != data_state:
        raise CheckpointError(
            "data_state must be unchanged when it is written as JSON and read again: use lists instead of tuples, and "
            "strings as keys."
        )
    return {**body, "sha256": digest(body)}


def digest(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest, given without its field `sha256`."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be written as JSON: {error}.") from error
