"""Hyper-connections (Zhu et al. 2024): several residual streams, which layers read and write by learned mixtures.

Between layers the streams are mixed by matrices whose rows and columns sum to 1, so that no signal grows or fades over
many layers (manifold-constrained hyper-connections, Xie et al. 2025).
"""

import dataclasses
import functools
import itertools
import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.base import CountingResidual, Reader, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, PositiveInt, check
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(Residual):
    """`x_m <- sum_k mix_km x_k + write_m branch(sum_k read_k x_k)` for each branch and each stream m.

    Where `h = kernel^T norm(x_1 … x_n)` are numbers of the token, `read = sigmoid(scale h + bias) + eps`,
    `write = 2 sigmoid(scale h + bias)`, and `mix` is a doubly stochastic matrix computed from `scale h + bias`, with a
    scale and a bias for each of the three. The streams begin as copies of the embedding and are added up behind the
    last layer, perhaps with weights like `read`. A branch that reads and writes all streams by itself (an Engram) is
    added to them.

    **Arguments:**

    - `streams`: number of streams.
    - `mixing`: `"sinkhorn"`, `exp(h)` with its rows and columns divided by their sums in turn (Sinkhorn & Knopp 1967),
        the columns last; or `"permutations"`, a convex combination of all permutations of the streams (mHC-lite), whose
        sums are exact.
    - `iterations`: number of divisions of rows and columns.
    - `norm`: of all streams of a token together.
    - `eps`: added to `read` and in each division.
    - `weighted_sum`: whether the streams are added up with weights of the token, `sigmoid(scale h + bias) + eps`
        (DeepSeek-V4), or as they are.
    """

    streams: PositiveInt = 4  # pyright: ignore[reportIncompatibleVariableOverride] - other wirings have one, always
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    iterations: PositiveInt = 20
    norm: NormConfig = RMSNormConfig()
    eps: PositiveFloat = 1e-6
    weighted_sum: bool = False  # pyright: ignore[reportIncompatibleVariableOverride] - as above

    def __post_init__(self):
        super().__post_init__()
        check(
            self.mixing == "sinkhorn" or self.streams <= 6,
            f"HyperConnections.streams={self.streams} has {self.streams}! permutations, too many to learn a number for "
            "each: take at most 6, or mixing='sinkhorn'.",
        )

    @property
    def coefficients(self) -> int:
        """Number of coefficients of a token for each layer."""
        n = self.streams
        return 2 * n + (n * n if self.mixing == "sinkhorn" else math.factorial(n))

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copy the embedding to all streams."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def reduce(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length embed"]:
        """Sum the streams."""
        return jnp.sum(x, axis=2, dtype=jnp.float32).astype(x.dtype)

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "StreamSum | None":
        """Build the weighted sum of the streams, if there is one; None uses `reduce`."""
        if not self.weighted_sum:
            return None
        size, n = self.streams * embed_dim, self.streams
        kernel = fan_in(key, (size, n), jnp.float32, size, "normal")
        return StreamSum(self.norm.build(size), kernel, jnp.full((1,), 0.01), jnp.zeros((n,)), config=self)

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "HyperConnected":
        """Return the connections of a block with so many layers that read and write `embed_dim` features."""
        size = self.streams * embed_dim

        def one(key):
            return Connection(
                norm=self.norm.build(size),
                kernel=fan_in(key, (size, self.coefficients), jnp.float32, size, "normal"),
                scale=jnp.full((3,), 0.01),
                bias=jnp.zeros((self.coefficients,)),
                config=self,
            )

        return HyperConnected(connections=tuple(map(one, jax.random.split(key, branches))), config=self)


class Coefficients(eqx.Module):
    """Reading, writing and mixing coefficients of tokens; `mix[k, m]` is the fraction of stream k in stream m."""

    read: Float32[Array, "streams batch length"]
    write: Float32[Array, "streams batch length"]
    mix: Float32[Array, "streams streams batch length"]


class Connection(eqx.Module):
    """Weights of one layer's coefficients: for reading, writing and mixing, in this order."""

    norm: Norm
    kernel: Float[Array, "stream_embed coefficients"]
    scale: Float[Array, "coefficient_kinds"]
    bias: Float[Array, "coefficients"]
    config: HyperConnections = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext) -> Coefficients:
        """Return the coefficients of every token, in float32. Tokens come last: a 4 x 4 matrix fills no register."""
        config, n = self.config, self.config.streams
        u = self.norm(x.astype(jnp.float32).reshape(*x.shape[:2], -1))
        pattern = "batch length stream_embed, stream_embed coefficients -> batch length coefficients"
        h = jnp.moveaxis(ctx.einsum(pattern, u, self.kernel), -1, 0)
        scale, bias = self.scale.astype(h.dtype), self.bias.astype(h.dtype).reshape(-1, 1, 1)
        read, write, mix = (
            scale[i] * part + shift
            for i, (part, shift) in enumerate(zip(*(jnp.split(each, [n, 2 * n]) for each in (h, bias)), strict=True))
        )
        mixing = _permutations(mix, n) if config.mixing == "permutations" else _sinkhorn(mix, config)
        return Coefficients(read=jax.nn.sigmoid(read) + config.eps, write=2 * jax.nn.sigmoid(write), mix=mixing)


class StreamSum(eqx.Module):
    """Sum of the residual streams with weights of the token."""

    norm: Norm
    kernel: Float[Array, "stream_embed streams"]
    scale: Float[Array, "one"]
    bias: Float[Array, "streams"]
    config: HyperConnections = eqx.field(static=True)

    def expand(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length streams embed"]:
        """Return the input of the first block: copies."""
        return self.config.expand(x)

    def reduce(
        self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the input of the final norm."""
        u = self.norm(x.astype(jnp.float32).reshape(*x.shape[:2], -1))
        h = ctx.einsum("batch length stream_embed, stream_embed streams -> batch length streams", u, self.kernel)
        h = h * self.scale.astype(h.dtype)[None, None] + self.bias.astype(h.dtype)[None, None]
        return _read(x, jnp.moveaxis(jax.nn.sigmoid(h) + self.config.eps, -1, 0))


class HyperConnected(CountingResidual):
    """Hyper-connections of one block: a connection for each layer, but for those that read all streams."""

    connections: tuple[Connection, ...]
    config: HyperConnections = eqx.field(static=True)

    def read(self, state: tuple[Array, int], reader: Reader, ctx: ForwardContext) -> tuple[Array, Coefficients | None]:
        x, used = state
        if reader.reads_streams:
            return x, None
        coefficients = self.connections[used](x, ctx)
        return _read(x, coefficients.read), coefficients

    def write(
        self, state: tuple[Array, int], out: Array, coefficients: Coefficients | None = None
    ) -> tuple[Array, int]:
        x, used = state
        return (x + out, used) if coefficients is None else (_mixed(x, out, coefficients), used + 1)


# Sums over a few streams are written out: a product of matrices this small would leave a matrix unit idle.


def _read(x: Array, read: Array) -> Float[Array, "batch length embed"]:
    parts = [read[k][..., None] * x[:, :, k].astype(jnp.float32) for k in range(len(read))]
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def _mixed(x: Array, out: Array, coefficients: Coefficients) -> Float[Array, "batch length streams embed"]:
    wide = [x[:, :, k].astype(jnp.float32) for k in range(x.shape[2])]
    streams = (
        coefficients.write[m][..., None] * out.astype(jnp.float32)
        + sum(coefficients.mix[k, m][..., None] * stream for k, stream in enumerate(wide))
        for m in range(len(wide))
    )
    return jnp.stack([stream.astype(x.dtype) for stream in streams], axis=2)


def _sinkhorn(logits: Float32[Array, "pairs batch length"], config: HyperConnections) -> Array:
    """Return `exp(logits)`, row by row, with its rows and columns divided by their sums in turn.

    For the gradient only the first matrix is saved, not the iterations.
    """
    n, eps = config.streams, config.eps

    def columns(m):
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    @jax.checkpoint
    def normalised(logits):
        m = columns(jax.nn.softmax(logits, axis=1) + eps)
        return jax.lax.fori_loop(
            0, config.iterations - 1, lambda _, m: columns(m / (jnp.sum(m, axis=1, keepdims=True) + eps)), m
        )

    return normalised(logits.reshape(n, n, *logits.shape[1:]))


def _permutations(logits: Float32[Array, "permutations batch length"], n: int) -> Array:
    """Return the matrices of all permutations, in lexicographic order, weighted by a softmax."""
    matrices = np.eye(n, dtype=np.float32)[list(itertools.permutations(range(n)))]
    return jnp.einsum("pbl,pkm->kmbl", jax.nn.softmax(logits, axis=0), jnp.asarray(matrices))
