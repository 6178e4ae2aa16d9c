"""Sum over a number of chunks known only at run time; the forward and backward passes store one chunk at a time."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from eqx_decoders.numerics.quantized_weight import is_quantized


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_chunks(
    chunk: Callable[[Array, PyTree, PyTree], Array], num_chunks: Int32[Array, ""], inputs: PyTree, indices: PyTree
) -> Array:
    """Return the sum of `chunk(i, inputs, indices)` over `i < num_chunks`, where `num_chunks` may be traced.

    Gradients reach `inputs`, which must be floating-point arrays; `indices` have no gradient. The backward pass
    recomputes each chunk and accumulates gradients in the dtypes of `inputs`. `chunk` must not close over
    traced arrays.
    """
    shape = jax.eval_shape(chunk, jnp.int32(0), inputs, indices)
    step = lambda index, total: total + chunk(index, inputs, indices)  # noqa: E731
    return lax.fori_loop(0, num_chunks, step, jnp.zeros(shape.shape, shape.dtype))


def partition_trained(module: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Split a module into arrays with a gradient, arrays of quantized weights (no gradient), and static leaves."""
    is_trained = jax.tree.map(lambda leaf: eqx.is_array(leaf) and not is_quantized(leaf), module, is_leaf=is_quantized)
    trained, others = eqx.partition(module, is_trained)
    frozen, static = eqx.partition(others, eqx.is_array)
    return trained, frozen, static


def _forward(chunk, num_chunks, inputs, indices):
    return sum_chunks(chunk, num_chunks, inputs, indices), (num_chunks, inputs, indices)


def _backward(chunk, residuals, gradient):
    num_chunks, inputs, indices = residuals

    def step(index, total):
        _, vjp = jax.vjp(lambda inputs: chunk(index, inputs, indices), inputs)
        return jax.tree.map(jnp.add, total, vjp(gradient)[0])

    return None, lax.fori_loop(0, num_chunks, step, jax.tree.map(jnp.zeros_like, inputs)), None


sum_chunks.defvjp(_forward, _backward)
