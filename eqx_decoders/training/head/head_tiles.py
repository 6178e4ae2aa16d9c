"""The map from hidden states to logits and its gradients, for a tile of positions."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_decoders.errors import CheckedFields, PositiveFloat, check, check_integer
from eqx_decoders.numerics.einsum import add_bias
from eqx_decoders.numerics.matmul import matmul, prefers_row_major_weights, row_major_transpose
from eqx_decoders.sharding.backend import Backend
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.training.head.vocab_parallel import HeadSplit, HeadWeights


# Positions below which a tile is not worth reading the whole kernel for.
_TILE_LEAST = 64


class HeadTiles(NamedTuple):
    """Parts in which head and loss are computed together.

    **Arguments:**

    - `positions`: of each sequence on a device in a tile; None: so many that their logits take 64 MB there, 256 MB on a
        TPU, 1 GB on a GPU.
    - `head_bytes`: bound of a device's gathered kernel and its gradient, with the kernel of the next part if there are
        several; None: no bound.
    """

    positions: int | None = None
    head_bytes: int | None = None


def tile_length(batch: int, length: int, vocab: int, tile: int | None, backend: Backend) -> int:
    """Return the requested length, or the largest within the bound (but no sliver), evened out over the tiles.

    Logits of a tile are small beside the weights, and large enough that few gradients of the kernel are added: an
    accelerator reads and writes that sum as fast as it multiplies from about a thousand positions on.
    """
    if tile is None:
        tile = max(_TILE_LEAST, backend.loss_tile_bytes // max(1, 4 * batch * vocab))
        tile = math.ceil(length / max(1, math.ceil(length / tile)))
    return max(1, min(tile, length))


def cut(x: Any, tile: int) -> Any:
    """Cut `[batch, length, ...]` into `[tiles, batch, tile, ...]`, zeros filling the last one; the batch stays."""
    missing = -x.shape[1] % tile
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // tile, tile, *x.shape[2:]), 1, 0)


def joined(tiles: Any, length: int) -> Any:
    """Join the tiles of `cut` again."""
    x = jnp.moveaxis(tiles, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def zeros(like: Any) -> Any:
    """Return zeros in f32, in which gradients are added up."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def added(one: HeadWeights, other: HeadWeights) -> HeadWeights:
    """Add gradients of the head."""
    return jax.tree.map(jnp.add, one, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadForm(CheckedFields):
    """The map from hidden states to logits, `cap(hidden @ kernel + bias) / temperature`, and its gradients.

    Raises ConfigError for options out of range.
    """

    checked_name = ""  # errors name the arguments of the functions of this package
    tied: bool
    soft_cap: PositiveFloat | None = None
    temperature: PositiveFloat = 1.0
    flatten: bool = False
    tiles: HeadTiles = HeadTiles()
    layout: Layout = Layout()

    def __post_init__(self):
        super().__post_init__()
        if self.tiles.positions is not None:
            check_integer("HeadTiles.positions", self.tiles.positions)
        if self.tiles.head_bytes is not None:
            check_integer("HeadTiles.head_bytes", self.tiles.head_bytes)

    def check_kernel(self, name: str, hidden: Array, kernel: Array) -> None:
        """Raise ConfigError if the kernel does not fit the hidden states."""
        shape = kernel.shape
        rule = f"{name} kernel of shape {shape} with tied={self.tied} does not fit hidden {hidden.shape}:"
        rule = f"{rule} it must be [vocab, embed] if tied, otherwise [embed, vocab]."
        check(shape[1 if self.tied else 0] == hidden.shape[2], rule)

    def split(self, hidden: Array, kernel: Array) -> HeadSplit:
        """Split tokens and vocabulary over the mesh."""
        return HeadSplit.create(self.layout, self.tied, hidden.shape, kernel.shape)

    def kernels(self, kernel):
        """Return the kernel for the logits and for the gradient of hidden, and the dimensions to contract."""
        inside = 1 if self.tied else 0
        if self.flatten and prefers_row_major_weights(kernel.dtype):
            pair = (row_major_transpose(kernel), kernel)
            return (pair if self.tied else pair[::-1]), (0, 0)
        return (kernel, kernel), (inside, 1 - inside)

    def logits(self, hidden, kernel, dimension, bias):
        """Compute the logits of a tile, in f32."""
        logits = add_bias(self.times(hidden, kernel, dimension), bias)
        logits = logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def before_cap(self, logits, gradient):
        """Compute the gradient by the products, before cap and temperature, from that by the logits."""
        if self.temperature != 1.0:
            logits, gradient = logits * self.temperature, gradient / self.temperature
        return gradient if self.soft_cap is None else gradient * (1 - (logits / self.soft_cap) ** 2)

    def times(self, x, kernel, dimension):
        """Multiply `[batch, tile, n]` by the kernel over n, in f32."""
        if not self.flatten:
            return lax.dot_general(x, kernel, (((2,), (dimension,)), ((), ())), preferred_element_type=jnp.float32)
        batch, tile, inner = x.shape
        product = matmul(x.reshape(batch * tile, inner), kernel, (1, dimension), jnp.float32)
        return product.reshape(batch, tile, kernel.shape[1 - dimension])

    def weight_gradients(self, hidden, gradient, bias):
        """Compute the gradients of the kernel, and of the bias if there is one, in f32."""
        to_bias = None if bias is None else jnp.sum(gradient, axis=(0, 1))
        return HeadWeights(self.outer(hidden, gradient.astype(hidden.dtype)), to_bias)

    def outer(self, hidden, gradient):
        """Compute the gradient of the kernel, in f32."""
        a, b = (gradient, hidden) if self.tied else (hidden, gradient)
        if not self.flatten:
            return lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
        rows = a.shape[0] * a.shape[1]
        return matmul(a.reshape(rows, a.shape[2]), b.reshape(rows, b.shape[2]), (0, 0), jnp.float32)
