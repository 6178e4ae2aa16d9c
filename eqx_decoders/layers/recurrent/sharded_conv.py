"""Causal convolutions of sequences that a mesh shards: a device receives only the last inputs of earlier shards."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.layers.cache.recurrent_state import last_inputs
from eqx_decoders.layers.documents import document_indices
from eqx_decoders.layers.recurrent.causal_conv import causal_convolution
from eqx_decoders.sharding.axes import names_of


def convolve_on_mesh(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    conv_state: Float[Array, "batch conv_inputs channels"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    dilation: int = 1,
    *,
    execution: Execution,
) -> Float[Array, "batch length channels"]:
    """Run `causal_convolution` on the mesh of `execution`."""
    layout = execution.layout
    batch_axes, length_axes, channel_axes = map(names_of, layout.activation_spec("batch length channels", x.shape))
    if layout.single or not length_axes:
        return causal_convolution(x, kernel, bias, conv_state, positions, segment_ids, dilation)
    size = (kernel.shape[1] - 1) * dilation

    def run(x, kernel, bias, conv_state, positions, documents):
        before = jnp.zeros((len(x), size, x.shape[2]), x.dtype) if conv_state is None else conv_state.astype(x.dtype)
        before = _inputs_before_shard(before, x, positions, documents, length_axes)
        return causal_convolution(x, kernel, bias, before, positions, documents, dilation)

    batch_axes = layout.with_unit_axes(batch_axes)
    tokens = PartitionSpec(batch_axes, length_axes, channel_axes)
    weights = PartitionSpec(channel_axes)
    state = PartitionSpec(batch_axes, None, channel_axes)
    position_spec = PartitionSpec(batch_axes, length_axes)
    specs = (tokens, weights, weights, state, position_spec, position_spec)
    documents = document_indices(positions >= 0, segment_ids)
    return layout.shard_map(run, specs, tokens)(x, kernel, bias, conv_state, positions, documents)


def _inputs_before_shard(
    conv_state: Array, x: Array, positions: Array, documents: Array, axes: tuple[str, ...]
) -> Array:
    """Return the last inputs before a device's shard, oldest first; inputs of other documents are zero.

    Only inputs of the document of the shard's first token count. `conv_state` holds the inputs before the sequence,
    which belong to its first document.
    """
    real = positions >= 0
    index = jnp.where(real, jnp.arange(real.shape[1])[None], -1)
    last = jnp.flip(lax.top_k(index, min(conv_state.shape[1], real.shape[1]))[0], axis=1)
    index = jnp.maximum(last, 0)
    inputs = jnp.take_along_axis(x, index[:, :, None], axis=1)
    input_document = jnp.where(last >= 0, jnp.take_along_axis(documents, index, axis=1), -1)
    inputs, input_document = (lax.all_gather(y, axes, axis=1, tiled=True) for y in (inputs, input_document))
    earlier = jnp.arange(input_document.shape[1])[None] // last.shape[1] < lax.axis_index(axes)
    taken = jnp.where(earlier & (input_document >= 0), 0, -1)  # as positions: -1 is skipped by `last_inputs`
    zeros = jnp.zeros((*conv_state.shape[:2], 1), input_document.dtype)
    input_document = last_inputs(zeros, input_document[:, :, None], taken)
    first = jnp.min(jnp.where(real, documents, jnp.iinfo(documents.dtype).max), axis=1)
    return jnp.where(input_document == first[:, None, None], last_inputs(conv_state, inputs, taken), 0)
