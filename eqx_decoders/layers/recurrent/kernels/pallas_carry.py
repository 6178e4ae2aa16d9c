"""States from chunk to chunk in a Pallas kernel for NVIDIA's GPUs, by Triton: all of a recurrence that is one by one.

    X_n = C_n + a_n * (A_n S_n),    S_{n+1} = D_n * S_n + B_n^T (b_n * X_n) + E_n

A, B are `chunk key_dim`, a and b numbers of tokens, D of rows of the state. A program has some columns of one head's
state in registers and goes through the chunks; XLA, which starts several programs for each chunk, does the rest for
all chunks at once. Gradients run from the last chunk to the first, with A and B in each other's place and the
gradients of the states as E: they are the same kernel, so that no backward pass has to fit the registers of another.
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

_COLUMNS = 16, 32  # of a state, that a program may hold
_KEY_DIMS = 16, 256
_MOST = 2**31  # elements of an array: places are counted in 32 bits
_WARPS, _STAGES = 4, 2


def fits(
    key: Float[Array, "batch length key_heads key_dim"],
    value: Float[Array, "batch length heads value_dim"],
    chunk: int,
    compute_capability: tuple[int, int] | None,
) -> bool:
    """Return whether GPUs of a compute capability can carry these states: blocks of whole powers of two."""
    (batch, length, heads, value_dim), key_dim = value.shape, key.shape[3]
    whole = key_dim & (key_dim - 1) == 0 and _KEY_DIMS[0] <= key_dim <= _KEY_DIMS[1] and value_dim % _COLUMNS[0] == 0
    chunks = -(-length // chunk)
    largest = batch * heads * chunks * max(key_dim * value_dim, chunk * max(key_dim, value_dim))
    return has_kernels(compute_capability) and whole and largest < _MOST


class CarryTerms(NamedTuple):
    """What leads from chunk to chunk: C, A, B, a or b, and D of the module's formula; None: no such term.

    `left` has an array for each value head, `right` one for those that share a key head, whose `scale` is b.
    """

    added: Float32[Array, "chunks batch key_heads chunk groups value_dim"]
    left: Float32[Array, "chunks batch key_heads chunk groups key_dim"] | None
    right: Float32[Array, "chunks batch key_heads chunk key_dim"]
    scale: Float32[Array, "chunks batch key_heads chunk groups"] | None
    keep: Float32[Array, "chunks batch key_heads key_dim groups"]


class _CarryOperands(NamedTuple):
    added: Any
    keep: Any
    start: Any
    left: Any = None
    left_scale: Any = None
    right: Any = None
    right_scale: Any = None
    more: Any = None


def _kernel(names: tuple[str, ...], reverse: bool, *refs: Any) -> None:
    given, (states, results, end) = _CarryOperands(**dict(zip(names, refs, strict=False))), refs[-3:]
    chunks = given.added.shape[0]

    def step(count: Any, state: Array) -> Array:
        at = chunks - 1 - count if reverse else count

        def scaled(x: Array, scale: Any) -> Array:
            return x if scale is None else x * plgpu.load(scale.at[at])[:, None]

        plgpu.store(states.at[at], state)
        x = plgpu.load(given.added.at[at])
        if given.left is not None:
            x = x + scaled(tile_product(plgpu.load(given.left.at[at]), state, 1, 0), given.left_scale)
        plgpu.store(results.at[at], x)
        state = state * plgpu.load(given.keep.at[at])[:, None]
        if given.more is not None:
            state = state + plgpu.load(given.more.at[at])
        if given.right is not None:
            state = state + tile_product(plgpu.load(given.right.at[at]), scaled(x, given.right_scale), 0, 0)
        return state

    plgpu.store(end.at[...], jax.lax.fori_loop(0, chunks, step, plgpu.load(given.start.at[...])))


def _run(given: _CarryOperands, reverse: bool, interpret: bool) -> tuple[Array, Array, Array]:
    """Run the kernel: return the state before each chunk in its order, X, and the state after the last."""
    chunks, batch, key_heads, _, groups, value_dim = given.added.shape
    key_dim = given.keep.shape[3]
    columns = max((size for size in _COLUMNS if value_dim % size == 0), default=value_dim)  # all only if interpreted

    def spec(name: str, array: Any) -> Any:
        """Rows of one head; of arrays of values some columns."""
        if name == "start":  # batch key_heads key_dim groups value_dim
            return pl.BlockSpec(
                (None, None, key_dim, None, columns), lambda b, h, v: (b, h // groups, 0, h % groups, v)
            )
        rows = array.shape[3]
        if name in ("added", "more"):
            block, last = (rows, None, columns), lambda h, v: (0, h % groups, v)
        elif name in ("keep", "left_scale", "right_scale"):
            block, last = (rows, None), lambda h, v: (0, h % groups)
        elif array.ndim == 6:
            block, last = (rows, None, key_dim), lambda h, v: (0, h % groups, 0)
        else:
            block, last = (rows, key_dim), lambda h, v: (0, 0)
        return pl.BlockSpec((chunks, None, None, *block), lambda b, h, v: (0, b, h // groups, *last(h, v)))

    arrays = {name: array for name, array in given._asdict().items() if array is not None}
    states = jax.ShapeDtypeStruct((chunks, *given.start.shape), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, tuple(arrays), reverse),
        grid=(batch, key_heads * groups, value_dim // columns),
        in_specs=[spec(name, array) for name, array in arrays.items()],
        out_specs=[spec("more", states), spec("added", given.added), spec("start", given.start)],
        out_shape=[states, jax.ShapeDtypeStruct(given.added.shape, jnp.float32), given.start],
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
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
    """Return the state before each chunk, X, and the state after the last chunk."""
    given = _CarryOperands(added=terms.added, keep=terms.keep, start=start, left=terms.left, right=terms.right)
    return _run(given._replace(right_scale=terms.scale), False, interpret)


def _forward(terms: CarryTerms, start: Array, interpret: bool) -> tuple[tuple[Array, Array, Array], tuple]:
    found: Any = carry(terms, start, interpret)
    states, results, end = found
    return (states, results, end), (terms, states, results)


def _backward(interpret: bool, residuals: tuple, bars: tuple[Array, Array, Array]) -> tuple[CarryTerms, Array]:
    """Compute X' = dX + b (B S'),  dA = X' S^T,  dB = (b X) S'^T,  dD = rows of S S', where S' is dS after a chunk."""
    (_, left, right, scale, keep), states, results = residuals
    states_bar, results_bar, end_bar = bars
    given = _CarryOperands(
        added=results_bar, keep=keep, start=end_bar, left=right, left_scale=scale, right=left, more=states_bar
    )
    after, added_bar, start_bar = _run(given, True, interpret)
    right_bar = product(results, after, "irv,krv->irk")
    scale_bar = None
    if scale is not None:
        scale_bar = (right_bar * right[..., None, :]).sum(-1)
        right_bar = right_bar * scale[..., None]
    left_bar = None if left is None else product(added_bar, states, "irv,krv->irk")
    terms_bar = CarryTerms(added_bar, left_bar, right_bar.sum(4), scale_bar, (states * after).sum(-1))
    return terms_bar, start_bar


def product(left: Array, right: Array, pattern: str) -> Array:
    """Compute an einsum over the dimensions behind those of chunks and heads, in f32."""
    a, b, out = pattern.replace("->", ",").split(",")
    return jnp.einsum(f"...{a},...{b}->...{out}", left, right, preferred_element_type=jnp.float32)


carry.defvjp(_forward, _backward)
