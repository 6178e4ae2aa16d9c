"""Hyper-connections (Zhu et al. 2024): several residual streams, which branches read and write by learned mixtures.

Between layers the streams are mixed by matrices whose rows and columns sum to 1, so that no signal grows or fades over
many layers (manifold-constrained hyper-connections, Xie et al. 2025).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BranchFunction, Dropout, Residual, SteppedResidual, Steps
from eqx_decoders.context import Context
from eqx_decoders.errors import check, check_integer, check_number, check_word
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.numerics.matmul import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyperConnections(Residual):
    """`x_m <- sum_k mix_km x_k + write_m branch(sum_k read_k x_k)` for each branch and each stream m.

    Where `h = kernel^T norm(x_1 … x_n)` are numbers of the token, `read = sigmoid(scale h + bias) + eps`,
    `write = 2 sigmoid(scale h + bias)`, and `mix` is a doubly stochastic matrix made of `scale h + bias`, with a scale
    and a bias for each of the three. The streams begin as copies of the embedding and are added up behind the last
    layer. A branch that reads and writes all streams by itself (an Engram) is added to them.

    **Arguments:**

    - `streams`: how many there are.
    - `mixing`: `"sinkhorn"`, `exp(h)` with its rows and columns divided by their sums in turn (Sinkhorn & Knopp 1967),
        the columns last; or `"permutations"`, a convex combination of all permutations of the streams (mHC-lite), whose
        sums are exact.
    - `iterations`: how often rows and columns are divided.
    - `norm`: of all streams of a token together.
    - `eps`: added to `read` and in each division.
    """

    streams: int = 4  # pyright: ignore[reportIncompatibleVariableOverride] - other wirings have one, always
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    iterations: int = 20
    norm: NormConfig = RMSNormConfig()
    eps: float = 1e-6

    def __post_init__(self):
        check_integer("HyperConnections.streams", self.streams)
        check_word("HyperConnections.mixing", self.mixing, ("sinkhorn", "permutations"))
        check_integer("HyperConnections.iterations", self.iterations)
        check_number("HyperConnections.eps", self.eps, above=0)
        check(
            self.mixing == "sinkhorn" or self.streams <= 6,
            f"HyperConnections.streams={self.streams} has {self.streams}! permutations, too many to learn a number for "
            "each: take at most 6, or mixing='sinkhorn'.",
        )

    @property
    def coefficients(self) -> int:
        """How many numbers a token has at each branch."""
        n = self.streams
        return 2 * n + (n * n if self.mixing == "sinkhorn" else math.factorial(n))

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copies."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def reduce(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length embed"]:
        """The sum of the streams."""
        return jnp.sum(x, axis=2, dtype=jnp.float32).astype(x.dtype)

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "HyperConnected":
        """The wiring of a block with so many branches, all of which read and write `embed_dim` features."""
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
    """How each token's streams are read, written and mixed; `mix[k, m]` is how much of stream k goes to stream m."""

    read: Float32[Array, "streams batch length"]
    write: Float32[Array, "streams batch length"]
    mix: Float32[Array, "streams streams batch length"]


class Connection(eqx.Module):
    """What makes the coefficients of one branch: those that read, that write and that mix, in this order."""

    norm: Norm
    kernel: Float[Array, "stream_embed coefficients"]
    scale: Float[Array, "coefficient_kinds"]
    bias: Float[Array, "coefficients"]
    config: HyperConnections = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch length streams embed"], ctx: Context) -> Coefficients:
        """The coefficients of every token, in float32. Tokens come last: a matrix of 4 x 4 would fill no register."""
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


class HyperConnected(SteppedResidual):
    """The wiring of one block: a connection for each of its branches, but for those that read all streams."""

    connections: tuple[Connection, ...]
    config: HyperConnections = eqx.field(static=True)

    def steps(
        self,
        x: Float[Array, "batch length streams embed"],
        branches: Sequence[BranchFunction],
        drop: Dropout,
        ctx: Context,
    ) -> Steps:
        """The streams behind all branches, one after the other; `drop` is the block's dropout."""
        connections = iter(self.connections)
        for branch in branches:
            if branch.reads_streams:
                x = x + (yield branch, x)
                continue
            coefficients = next(connections)(x, ctx)
            out = yield branch, _read(x, coefficients.read)
            x = _mixed(x, out, coefficients)
        return drop(x)


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
    """`exp(logits)`, row by row, with its rows and columns divided by their sums in turn.

    Of all iterations nothing is kept for the gradient but where they began.
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
    """The matrices of all permutations, in lexicographic order, weighed by a softmax."""
    matrices = np.eye(n, dtype=np.float32)[list(itertools.permutations(range(n)))]
    return jnp.einsum("pbl,pkm->kmbl", jax.nn.softmax(logits, axis=0), jnp.asarray(matrices))
