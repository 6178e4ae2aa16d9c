"""Pallas Triton kernel for NVIDIA GPUs that carries the state of a recurrence from chunk to chunk.

    X_n = C_n + a_n * (A_n S_n),    S_{n+1} = D_n * S_n + B_n^T (b_n * X_n) + E_n

S_n [key_dim, value_dim] is the state before chunk n. A and B are [chunk, key_dim], a and b are scalars per token, and D
is a scalar per row of the state. This is the only sequential part of a chunkwise recurrence: a scan in XLA would launch
several kernels per chunk. Everything else is computed in XLA, in parallel over chunks. A program keeps some columns of
one head's state in registers, and loops over the chunks. Gradients are computed by the same kernel: chunks in reverse
order, A and B exchanged, and the gradients of the states as E.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.common import tile_product
from eqx_decoders.sharding.chips import has_kernels


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import

_COLUMN_TILES = 16, 32  # columns of a state per program
_MIN_KEY_DIM, _MAX_KEY_DIM = 16, 256
_MAX_ELEMENTS = 2**31  # of one array, because offsets are 32-bit integers
_NUM_WARPS, _NUM_STAGES = 4, 2


def fits(
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    chunk: int,
    compute_capability: tuple[int, int] | None,
) -> bool:
    """Return whether the kernel supports these shapes on GPUs of a compute capability.

    Tiles must be powers of two, so `key_dim` must be a power of two, and `value_dim` a multiple of 16.
    """
    batch, length, heads, value_dim = value.shape
    key_dim = key.shape[3]
    is_power_of_two = key_dim & (key_dim - 1) == 0
    fits_tiles = is_power_of_two and _MIN_KEY_DIM <= key_dim <= _MAX_KEY_DIM and value_dim % _COLUMN_TILES[0] == 0
    chunks = -(-length // chunk)
    largest = batch * heads * chunks * max(key_dim * value_dim, chunk * max(key_dim, value_dim))
    return has_kernels(compute_capability) and fits_tiles and largest < _MAX_ELEMENTS


class CarryTerms(NamedTuple):
    """Terms C, A, B, b and D of the equations in the module docstring, for all chunks; None: the term is absent.

    The axis `groups` contains the value heads that share a key head. `left` differs between these heads; `right` is
    shared, and `scale` is its factor b.
    """

    added: Float32[Array, "chunks batch key_heads chunk groups value_dim"]
    left: Float32[Array, "chunks batch key_heads chunk groups key_dim"] | None
    right: Float32[Array, "chunks batch key_heads chunk key_dim"]
    scale: Float32[Array, "chunks batch key_heads chunk groups"] | None
    keep: Float32[Array, "chunks batch key_heads key_dim groups"]


class _CarryOperands(NamedTuple):
    """Operands of the kernel; None: the term is absent."""

    added: Any  # C
    keep: Any  # D
    start: Any  # state before the first chunk
    left: Any = None  # A
    left_scale: Any = None  # a
    right: Any = None  # B
    right_scale: Any = None  # b
    state_added: Any = None  # E


def _kernel(names: tuple[str, ...], reverse: bool, *refs: Any) -> None:
    operands = _CarryOperands(**dict(zip(names, refs, strict=False)))
    states, results, end = refs[-3:]
    chunks = operands.added.shape[0]

    def step(index: Any, state: Array) -> Array:
        chunk = chunks - 1 - index if reverse else index

        def scaled(x: Array, scale: Any) -> Array:
            return x if scale is None else x * plgpu.load(scale.at[chunk])[:, None]

        plgpu.store(states.at[chunk], state)
        x = plgpu.load(operands.added.at[chunk])
        if operands.left is not None:
            x = x + scaled(tile_product(plgpu.load(operands.left.at[chunk]), state, 1, 0), operands.left_scale)
        plgpu.store(results.at[chunk], x)
        state = state * plgpu.load(operands.keep.at[chunk])[:, None]
        if operands.state_added is not None:
            state = state + plgpu.load(operands.state_added.at[chunk])
        if operands.right is not None:
            state = state + tile_product(plgpu.load(operands.right.at[chunk]), scaled(x, operands.right_scale), 0, 0)
        return state

    plgpu.store(end.at[...], jax.lax.fori_loop(0, chunks, step, plgpu.load(operands.start.at[...])))


def _run(operands: _CarryOperands, reverse: bool, interpret: bool) -> tuple[Array, Array, Array]:
    """Run the kernel: return the state at the start of each step, X, and the state after the last step.

    Steps process chunks in order, or with `reverse` from the last to the first. Results are indexed by chunk.
    """
    chunks, batch, key_heads, _, groups, value_dim = operands.added.shape
    key_dim = operands.keep.shape[3]
    # the default is used only with `interpret`, which supports any shape
    columns = max((size for size in _COLUMN_TILES if value_dim % size == 0), default=value_dim)

    def spec(name: str, array: Any) -> Any:
        """Return the tile of a program: the arrays of one head for all chunks, and `columns` value features."""
        if name == "start":  # batch key_heads key_dim groups value_dim
            return pl.BlockSpec(
                (None, None, key_dim, None, columns), lambda b, h, v: (b, h // groups, 0, h % groups, v)
            )
        rows = array.shape[3]
        if name in ("added", "state_added"):
            tile, last = (rows, None, columns), lambda h, v: (0, h % groups, v)
        elif name in ("keep", "left_scale", "right_scale"):
            tile, last = (rows, None), lambda h, v: (0, h % groups)
        elif array.ndim == 6:  # a separate matrix for each value head
            tile, last = (rows, None, key_dim), lambda h, v: (0, h % groups, 0)
        else:
            tile, last = (rows, key_dim), lambda h, v: (0, 0)
        return pl.BlockSpec((chunks, None, None, *tile), lambda b, h, v: (0, b, h // groups, *last(h, v)))

    arrays = {name: array for name, array in operands._asdict().items() if array is not None}
    states = jax.ShapeDtypeStruct((chunks, *operands.start.shape), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, tuple(arrays), reverse),
        grid=(batch, key_heads * groups, value_dim // columns),
        in_specs=[spec(name, array) for name, array in arrays.items()],
        out_specs=[spec("state_added", states), spec("added", operands.added), spec("start", operands.start)],
        out_shape=[states, jax.ShapeDtypeStruct(operands.added.shape, jnp.float32), operands.start],
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=_NUM_STAGES),
        interpret=interpret,
        name="carry_states",
    )(*arrays.values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def carry(
    terms: CarryTerms, start: Float32[Array, "batch key_heads key_dim groups value_dim"], interpret: bool = False
) -> tuple[
    Float32[Array, "chunks batch key_heads key_dim groups value_dim"],
    Float32[Array, "chunks batch key_heads chunk groups value_dim"],
    Float32[Array, "batch key_heads key_dim groups value_dim"],
]:
    """Return the state before each chunk, X, and the state after the last chunk.

    `start` is the state before the first chunk.
    """
    operands = _CarryOperands(added=terms.added, keep=terms.keep, start=start, left=terms.left, right=terms.right)
    return _run(operands._replace(right_scale=terms.scale), False, interpret)


def _forward(terms: CarryTerms, start: Array, interpret: bool) -> tuple[tuple[Array, Array, Array], tuple]:
    outputs: Any = carry(terms, start, interpret)
    states, results, end = outputs
    return (states, results, end), (terms, states, results)


def _backward(interpret: bool, residuals: tuple, bars: tuple[Array, Array, Array]) -> tuple[CarryTerms, Array]:
    """Compute gradients by the same kernel.

    With S' the gradient of the state after a chunk, X' = dX + b (B S') is the gradient of X. From it follow
    dA = X' S^T, dB = (b X) S'^T, and dD as the row sums of S * S'.
    """
    (_, left, right, scale, keep), states, results = residuals
    states_bar, results_bar, end_bar = bars
    operands = _CarryOperands(
        added=results_bar, keep=keep, start=end_bar, left=right, left_scale=scale, right=left, state_added=states_bar
    )
    after, added_bar, start_bar = _run(operands, True, interpret)
    right_bar = product(results, after, "irv,krv->irk")
    scale_bar = None
    if scale is not None:
        scale_bar = (right_bar * right[..., None, :]).sum(-1)
        right_bar = right_bar * scale[..., None]
    left_bar = None if left is None else product(added_bar, states, "irv,krv->irk")
    terms_bar = CarryTerms(added_bar, left_bar, right_bar.sum(4), scale_bar, (states * after).sum(-1))
    return terms_bar, start_bar


def product(left: Array, right: Array, pattern: str) -> Array:
    """Compute an einsum over trailing dimensions in float32; the pattern omits the leading batch dimensions."""
    left_axes, right_axes, out_axes = pattern.replace("->", ",").split(",")
    return jnp.einsum(f"...{left_axes},...{right_axes}->...{out_axes}", left, right, preferred_element_type=jnp.float32)


carry.defvjp(_forward, _backward)
