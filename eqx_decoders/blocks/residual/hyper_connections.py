"""Hyper-connections (Zhu et al. 2024): several residual streams, which layers read and write with learned coefficients.

The streams are mixed by doubly stochastic matrices (rows and columns sum to 1), so that signals neither grow nor vanish
over many layers (manifold-constrained hyper-connections, mHC, Xie et al. 2025).
"""

import dataclasses
import functools
import itertools
import math
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, ReadWriteResidual, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(Residual):
    """Configuration of hyper-connections: for each layer, and each stream m,

        x_m <- sum_k mix_km x_k + write_m layer(sum_k read_k x_k)

    The coefficients are computed for each token from `h = kernel^T norm(x_1 … x_n)`: `read = sigmoid(scale h + bias) +
    eps`, `write = 2 sigmoid(scale h + bias)`, and `mix` is a doubly stochastic matrix computed from `scale h + bias`.
    Each of the three has a separate scale and bias. The streams start as copies of the embedding, and are summed after
    the last layer. A layer with `reads_streams` (an Engram) is added to all streams.

    **Arguments:**

    - `streams`: number of streams.
    - `mixing`: computation of `mix`. `"sinkhorn"`: a softmax over each row plus `eps`; then columns and rows are
        divided by their sums alternately (Sinkhorn & Knopp 1967), columns last. `"permutations"`: a convex combination
        of all permutation matrices (mHC-lite), which is exactly doubly stochastic.
    - `iterations`: number of Sinkhorn iterations.
    - `norm`: norm of the concatenated streams of a token.
    - `eps`: added to `read`, to the first softmax and to the denominators of the Sinkhorn iterations.
    - `weighted_sum`: whether the final sum of the streams has weights `sigmoid(scale h + bias) + eps` for each token
        (DeepSeek-V4); otherwise it is unweighted.
    """

    mtp_streams: ClassVar[bool] = True
    streams: PositiveInt = 4  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    iterations: PositiveInt = 20
    norm: NormConfig = RMSNormConfig()
    eps: PositiveFloat = 1e-6
    weighted_sum: bool = False  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual

    def __post_init__(self):
        super().__post_init__()
        check(
            self.mixing == "sinkhorn" or self.streams <= 6,
            f"HyperConnections.streams={self.streams} has {self.streams}! permutations, too many for one coefficient "
            "each. Use at most 6 streams, or mixing='sinkhorn'.",
        )

    @property
    def coefficients(self) -> int:
        """Number of coefficients per token and layer."""
        n = self.streams
        return 2 * n + (n * n if self.mixing == "sinkhorn" else math.factorial(n))

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copy the embedding to all streams."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def reduce(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length embed"]:
        """Sum the streams."""
        return jnp.sum(x, axis=2, dtype=jnp.float32).astype(x.dtype)

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "StreamSum | None":
        """Build the weighted sum of the streams; None without `weighted_sum`, because `reduce` has no weights."""
        if not self.weighted_sum:
            return None
        n = self.streams
        size = n * embed_dim
        kernel = fan_in(key, (size, n), jnp.float32, size, "normal")
        return StreamSum(self.norm.build(size), kernel, jnp.full((1,), 0.01), jnp.zeros((n,)), config=self)

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "HyperConnected":
        """Return the connections of a block; `branches` is the number of its layers that read one stream."""
        size = self.streams * embed_dim

        def build_connection(key: PRNGKeyArray) -> Connection:
            return Connection(
                norm=self.norm.build(size),
                kernel=fan_in(key, (size, self.coefficients), jnp.float32, size, "normal"),
                scale=jnp.full((3,), 0.01),
                bias=jnp.zeros((self.coefficients,)),
                config=self,
            )

        return HyperConnected(connections=tuple(map(build_connection, jax.random.split(key, branches))), config=self)


class Coefficients(eqx.Module):
    """Coefficients of each token for reading, writing and mixing; `mix[k, m]` is the share of stream k in stream m."""

    read: Float32[Array, "streams batch length"]
    write: Float32[Array, "streams batch length"]
    mix: Float32[Array, "streams streams batch length"]


class Connection(eqx.Module):
    """Weights that compute one layer's coefficients, in the order reading, writing, mixing."""

    norm: Norm
    kernel: Float[Array, "stream_embed coefficients"]
    scale: Float[Array, "coefficient_kinds"]
    bias: Float[Array, "coefficients"]
    config: HyperConnections = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext) -> Coefficients:
        """Return the coefficients of every token, in float32.

        Tokens are on the last axis, because a 4 x 4 matrix per token would leave most of a vector register unused.
        """
        n = self.config.streams
        u = self.norm(x.astype(jnp.float32).reshape(*x.shape[:2], -1))
        pattern = "batch length stream_embed, stream_embed coefficients -> batch length coefficients"
        h = jnp.moveaxis(ctx.einsum(pattern, u, self.kernel), -1, 0)
        scale = self.scale.astype(h.dtype)
        bias = self.bias.astype(h.dtype).reshape(-1, 1, 1)
        read = scale[0] * h[:n] + bias[:n]
        write = scale[1] * h[n : 2 * n] + bias[n : 2 * n]
        mix = scale[2] * h[2 * n :] + bias[2 * n :]
        return Coefficients(
            read=jax.nn.sigmoid(read) + self.config.eps,
            write=2 * jax.nn.sigmoid(write),
            mix=_permutations(mix, n) if self.config.mixing == "permutations" else _sinkhorn(mix, self.config),
        )


class StreamSum(eqx.Module):
    """Sum of the residual streams with learned weights for each token."""

    norm: Norm
    kernel: Float[Array, "stream_embed streams"]
    scale: Float[Array, "one"]
    bias: Float[Array, "streams"]
    config: HyperConnections = eqx.field(static=True)

    def expand(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length streams embed"]:
        """Return the input of the first block: copies of the embedding."""
        return self.config.expand(x)

    def reduce(
        self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the weighted sum of the streams, the input of the final norm."""
        u = self.norm(x.astype(jnp.float32).reshape(*x.shape[:2], -1))
        h = ctx.einsum("batch length stream_embed, stream_embed streams -> batch length streams", u, self.kernel)
        h = h * self.scale.astype(h.dtype)[None, None] + self.bias.astype(h.dtype)[None, None]
        return _read(x, jnp.moveaxis(jax.nn.sigmoid(h) + self.config.eps, -1, 0))


class HyperConnected(ReadWriteResidual):
    """Hyper-connections of one block: one connection for each layer that reads one stream."""

    connections: tuple[Connection, ...]
    config: HyperConnections = eqx.field(static=True)

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Coefficients | None]:
        if layer.reads_streams:
            return state, None
        coefficients = self.connections[layer.position](state, ctx)
        return _read(state, coefficients.read), coefficients

    def write(self, state: Array, out: Array, coefficients: Coefficients | None = None) -> Array:
        return state + out if coefficients is None else _mixed(state, out, coefficients)


# Sums over streams are Python loops, because matrices of a few streams are too small for a matrix unit.


def _read(x: Array, read: Array) -> Float[Array, "batch length embed"]:
    parts = [read[k][..., None] * x[:, :, k].astype(jnp.float32) for k in range(len(read))]
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def _mixed(x: Array, out: Array, coefficients: Coefficients) -> Float[Array, "batch length streams embed"]:
    upcast = [x[:, :, k].astype(jnp.float32) for k in range(x.shape[2])]
    streams = (
        coefficients.write[m][..., None] * out.astype(jnp.float32)
        + sum(coefficients.mix[k, m][..., None] * stream for k, stream in enumerate(upcast))
        for m in range(len(upcast))
    )
    return jnp.stack([stream.astype(x.dtype) for stream in streams], axis=2)


def _sinkhorn(logits: Float32[Array, "pairs batch length"], config: HyperConnections) -> Array:
    """Return approximately doubly stochastic matrices: normalize rows and columns of `exp(logits)` alternately.

    `logits` are the matrices in row-major order. `jax.checkpoint` saves only the logits for the backward pass, not the
    iterations.
    """
    n, eps = config.streams, config.eps

    def normalize_columns(matrix: Array) -> Array:
        return matrix / (jnp.sum(matrix, axis=0, keepdims=True) + eps)

    def normalize_rows(matrix: Array) -> Array:
        return matrix / (jnp.sum(matrix, axis=1, keepdims=True) + eps)

    @jax.checkpoint
    def normalize(logits: Array) -> Array:
        matrix = normalize_columns(jax.nn.softmax(logits, axis=1) + eps)
        return jax.lax.fori_loop(
            0, config.iterations - 1, lambda _, matrix: normalize_columns(normalize_rows(matrix)), matrix
        )

    return normalize(logits.reshape(n, n, *logits.shape[1:]))


def _permutations(logits: Float32[Array, "permutations batch length"], n: int) -> Array:
    """Return the combination of all permutation matrices, in lexicographic order, weighted by `softmax(logits)`."""
    matrices = np.eye(n, dtype=np.float32)[list(itertools.permutations(range(n)))]
    return jnp.einsum("pbl,pkm->kmbl", jax.nn.softmax(logits, axis=0), jnp.asarray(matrices))
