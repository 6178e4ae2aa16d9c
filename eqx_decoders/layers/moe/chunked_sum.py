"""Sum over pieces whose number is known at run time: one exists at a time, in forward and backward passes."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, PyTree

from eqx_decoders.numerics.quantized_weight import is_quantized


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_pieces(
    piece: Callable[[Array, PyTree, PyTree], Array], number: Int32[Array, ""], inputs: PyTree, indices: PyTree
) -> Array:
    """Compute `sum over i < number of piece(i, inputs, indices)`; `number` is known at run time alone.

    Gradients reach `inputs`, arrays of floating-point numbers. The backward pass computes each piece again and adds
    the pieces' gradients up, in the dtypes of the inputs.
    """
    shape = jax.eval_shape(piece, jnp.int32(0), inputs, indices)
    step = lambda index, total: total + piece(index, inputs, indices)  # noqa: E731
    return lax.fori_loop(0, number, step, jnp.zeros(shape.shape, shape.dtype))


def split_trained(module: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """Split a module into arrays that have a gradient, those of quantized weights, which have none, and the rest."""
    trained = jax.tree.map(lambda part: eqx.is_array(part) and not is_quantized(part), module, is_leaf=is_quantized)
    arrays, rest = eqx.partition(module, trained)
    return arrays, *eqx.partition(rest, eqx.is_array)


def _forward(piece, number, inputs, indices):
    return sum_of_pieces(piece, number, inputs, indices), (number, inputs, indices)


def _backward(piece, saved, gradient):
    number, inputs, indices = saved

    def step(index, total):
        _, back = jax.vjp(lambda inputs: piece(index, inputs, indices), inputs)
        return jax.tree.map(jnp.add, total, back(gradient)[0])

    return None, lax.fori_loop(0, number, step, jax.tree.map(jnp.zeros_like, inputs)), None


sum_of_pieces.defvjp(_forward, _backward)
