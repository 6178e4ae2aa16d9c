"""Convolutions of rows that a mesh splits: each device gets only the last inputs of the devices before it."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.layers.cache.recurrent_state import last_inputs
from eqx_decoders.layers.recurrent.causal_conv import causal_convolution, document_numbers
from eqx_decoders.sharding.axes import names_of


def convolve_on_mesh(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    tail: Float[Array, "batch tail channels"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    dilation: int = 1,
    *,
    execution: Execution,
) -> Float[Array, "batch length channels"]:
    """Run `causal_convolution` on the mesh of `execution`."""
    layout = execution.layout
    rows, length, channels = map(names_of, layout.activation_spec("batch length channels", x.shape))
    if layout.single or not length:
        return causal_convolution(x, kernel, bias, tail, positions, segment_ids, dilation)
    size = (kernel.shape[1] - 1) * dilation

    def run(x, kernel, bias, tail, positions, documents):
        before = jnp.zeros((len(x), size, x.shape[2]), x.dtype) if tail is None else tail.astype(x.dtype)
        before = _inputs_before(before, x, positions, documents, length)
        return causal_convolution(x, kernel, bias, before, positions, documents, dilation)

    # named, too, are mesh axes of one device: over what no name splits gradients are summed
    rows = (*rows, *(name for name, count in layout.mesh.shape.items() if count == 1))
    tokens, position_spec = PartitionSpec(rows, length, channels), PartitionSpec(rows, length)
    weights = PartitionSpec(channels)
    specs = (tokens, weights, weights, PartitionSpec(rows, None, channels), position_spec, position_spec)
    documents = document_numbers(positions >= 0, segment_ids)
    return layout.shard_map(run, specs, tokens)(x, kernel, bias, tail, positions, documents)


def _inputs_before(tail: Array, x: Array, positions: Array, documents: Array, axes: tuple[str, ...]) -> Array:
    """Return the last inputs before a device's piece, oldest first; zero for inputs of another document than its first.

    `tail` are the inputs before the row, which belong to its first document.
    """
    real = positions >= 0
    index = jnp.where(real, jnp.arange(real.shape[1])[None], -1)
    last = jnp.flip(lax.top_k(index, min(tail.shape[1], real.shape[1]))[0], axis=1)
    at = jnp.maximum(last, 0)
    inputs = jnp.take_along_axis(x, at[:, :, None], axis=1)
    numbers = jnp.where(last >= 0, jnp.take_along_axis(documents, at, axis=1), -1)
    inputs, numbers = (lax.all_gather(each, axes, axis=1, tiled=True) for each in (inputs, numbers))
    earlier = jnp.arange(numbers.shape[1])[None] // last.shape[1] < lax.axis_index(axes)
    taken = jnp.where(earlier & (numbers >= 0), 0, -1)
    numbers = last_inputs(jnp.zeros((*tail.shape[:2], 1), numbers.dtype), numbers[:, :, None], taken)
    first = jnp.min(jnp.where(real, documents, jnp.iinfo(documents.dtype).max), axis=1)
    return jnp.where(numbers == first[:, None, None], last_inputs(tail, inputs, taken), 0)
