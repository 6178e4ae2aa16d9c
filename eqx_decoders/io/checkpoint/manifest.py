"""Manifest of a step: shapes, dtypes and fingerprints of its arrays, the settings and the state of the data."""

import hashlib
import importlib.metadata
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.sharding.explicit import in_auto_mode, mesh_of
from eqx_decoders.sharding.offload import to_device


FORMAT_VERSION = 1


@jax.jit
def fingerprint(array: Shaped[Array, "*shape"]) -> UInt32[Array, ""]:
    """Return Σ bits(x_i) (2i + 1) mod 2³², i the row-major index of an element: the same on every mesh.

    Any single flipped bit b changes it, by ±2ᵇ times an odd number, never 0 modulo 2³².
    """
    return in_auto_mode(mesh_of(array), _bit_sum, lambda _: PartitionSpec())(array)


def _bit_sum(array: Array) -> UInt32[Array, ""]:
    array = to_device(array)  # from the host, if it is there
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    elif array.dtype.itemsize > 4:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)  # two words at a new last axis
    else:
        width = jax.dtypes.itemsize_bits(array.dtype)
        bits = jax.lax.bitcast_convert_type(array, f"uint{width}").astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, _ in enumerate(bits.shape):  # no reshape: it would gather a sharded array
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    """Return the fingerprint of each array. In a run of several processes all must call it for the same arrays."""
    # Each is read before the next begins: processes of CPUs hang where two programs wait for each other at a time.
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
    same = body["data_state"] == data_state
    check(same, "data_state must be plain JSON: lists and string keys only.", CheckpointError)
    return {**body, "sha256": digest(body)}


def digest(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its digest."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _json(what: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be plain JSON: {error}.") from error
