"""Logits of a tile of positions, and their gradients with respect to hidden states and head."""

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


# Minimum number of positions of a tile: each tile reads the complete kernel.
_MIN_TILE_LENGTH = 64


class HeadTiles(NamedTuple):
    """Sizes of the parts in which head and loss are computed together.

    **Arguments:**

    - `positions`: number of positions of each sequence on a device in a tile. None: as many as have logits of 64 MB on
        a CPU, 256 MB on a TPU and 1 GB on a GPU.
    - `head_bytes`: maximum bytes per device of the gathered kernel and its gradient, including the kernel of the next
        part if there are several parts. None: no maximum.
    """

    positions: int | None = None
    head_bytes: int | None = None


def tile_length(batch: int, length: int, vocab: int, tile: int | None, backend: Backend) -> int:
    """Return `tile`, or by default the largest number of positions within the backend's bound, equal for all tiles.

    The logits of a tile are then small compared with the weights, and there are few tiles: the gradient of the kernel
    is added once per tile, which takes as long as the products of about a thousand positions on an accelerator.
    """
    if tile is None:
        tile = max(_MIN_TILE_LENGTH, backend.loss_tile_bytes // max(1, 4 * batch * vocab))
        tile = math.ceil(length / max(1, math.ceil(length / tile)))
    return max(1, min(tile, length))


def split_tiles(x: Any, tile: int) -> Any:
    """Split `[batch, length, ...]` into `[tiles, batch, tile, ...]`. The last tile is padded with zeros."""
    missing = -x.shape[1] % tile
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // tile, tile, *x.shape[2:]), 1, 0)


def join_tiles(tiles: Any, length: int) -> Any:
    """Join the tiles of `split_tiles`."""
    x = jnp.moveaxis(tiles, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


def float32_zeros(like: Any) -> Any:
    """Return float32 zeros with the shapes of `like`, to which gradients are added."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def add_head_gradients(first: HeadWeights, second: HeadWeights) -> HeadWeights:
    """Add two gradients of the head."""
    return jax.tree.map(jnp.add, first, second)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadForm(CheckedFields):
    """Function from hidden states to logits, `cap(hidden @ kernel + bias) / temperature`, and its gradients.

    Raises ConfigError for invalid options.

    **Arguments:**

    - `tied`: whether the kernel is the embedding table, `[vocab, embed]`.
    - `soft_cap`: `cap(x) = soft_cap * tanh(x / soft_cap)`. None: no cap.
    - `temperature`: divisor of the logits.
    - `flatten`: compute products of matrices, as in `numerics.einsum`.
    - `tiles`: sizes of tiles and parts.
    - `layout`: the mesh.
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
        check(
            kernel.shape[1 if self.tied else 0] == hidden.shape[2],
            f"{name}: kernel of shape {kernel.shape} with tied={self.tied} does not fit hidden states of shape "
            f"{hidden.shape}: it must be [vocab, embed] if tied, otherwise [embed, vocab].",
        )

    def split(self, hidden: Array, kernel: Array) -> HeadSplit:
        """Return the division of tokens and vocabulary over the mesh."""
        return HeadSplit.create(self.layout, self.tied, hidden.shape, kernel.shape)

    def kernels(self, kernel):
        """Return the kernels for logits and for the gradient of hidden states, and their contracted dimensions."""
        inside = 1 if self.tied else 0
        if self.flatten and prefers_row_major_weights(kernel.dtype):
            pair = (row_major_transpose(kernel), kernel)
            return (pair if self.tied else pair[::-1]), (0, 0)
        return (kernel, kernel), (inside, 1 - inside)

    def logits(self, hidden, kernel, dimension, bias):
        """Compute the logits of a tile, in float32."""
        logits = add_bias(self.multiply(hidden, kernel, dimension), bias)
        logits = logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def product_gradient(self, logits, gradient):
        """Compute the gradient with respect to the products (before cap and temperature) from that of the logits."""
        if self.temperature != 1.0:
            logits, gradient = logits * self.temperature, gradient / self.temperature
        return gradient if self.soft_cap is None else gradient * (1 - (logits / self.soft_cap) ** 2)

    def multiply(self, x, kernel, dimension):
        """Multiply `[batch, tile, n]` by the kernel over n, in float32."""
        if not self.flatten:
            return lax.dot_general(x, kernel, (((2,), (dimension,)), ((), ())), preferred_element_type=jnp.float32)
        batch, tile, inner = x.shape
        product = matmul(x.reshape(batch * tile, inner), kernel, (1, dimension), jnp.float32)
        return product.reshape(batch, tile, kernel.shape[1 - dimension])

    def weight_gradients(self, hidden, gradient, bias):
        """Compute the gradients of the kernel and of the bias (if there is one), in float32."""
        to_bias = None if bias is None else jnp.sum(gradient, axis=(0, 1))
        return HeadWeights(self.kernel_gradient(hidden, gradient.astype(hidden.dtype)), to_bias)

    def kernel_gradient(self, hidden, gradient):
        """Compute the gradient of the kernel, in float32."""
        a, b = (gradient, hidden) if self.tied else (hidden, gradient)
        if not self.flatten:
            return lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)
        rows = a.shape[0] * a.shape[1]
        return matmul(a.reshape(rows, a.shape[2]), b.reshape(rows, b.shape[2]), (0, 0), jnp.float32)
