"""Gated residual streams (Qwen 4, 2026): layers read a gated mean of several streams, and write to all with gates."""

import dataclasses
from typing import Annotated, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer, ReadWriteResidual, Residual
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import AtLeast, PositiveInt
from eqx_decoders.layers.norm import RMSNormConfig, normalize_streams
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedStreams(Residual):
    """Configuration of gated residual streams: each layer reads a gated mean of K streams, and writes to all of them.

        read    = mean_k sigmoid(up^T silu(down^T n / K))_k n_k
        x_k    <- x_k + 2 sigmoid(write^T n / K)_k layer(read)

    `n` is the concatenation of the streams `n_k`, each normalized with a separate scale. The gate of the mean has one
    value for each feature of each stream. The streams start as copies of the embedding, and after the last layer they
    are reduced by a gated mean. A layer with `reads_streams` (an Engram) is added to all streams.

    **Arguments:**

    - `streams`: number of streams K.
    - `rank`: output features of `down`, and input features of `up`.
    - `norm`: norm of each stream.
    """

    mtp_streams: ClassVar[bool] = True
    weighted_sum: ClassVar[bool] = True
    streams: Annotated[int, AtLeast(2)] = 4  # pyright: ignore[reportIncompatibleVariableOverride] - a ClassVar in Residual
    rank: PositiveInt = 320
    norm: RMSNormConfig = RMSNormConfig()

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length streams embed"]:
        """Copy the embedding to all streams."""
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[2]))

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "GatedMean":
        """Build the gated mean after the last layer."""
        size = self.streams * embed_dim
        down_key, up_key = jax.random.split(key)
        return GatedMean(
            scale=jnp.full((self.streams, embed_dim), 1.0 - self.norm.offset),
            down=fan_in(down_key, (size, self.rank), jnp.float32, size, "normal"),
            up=fan_in(up_key, (self.rank, size), jnp.float32, self.rank, "normal"),
            config=self,
        )

    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "GatedConnections":
        """Return the connections of a block; `branches` is the number of its layers that read one stream."""
        size = self.streams * embed_dim

        def build_connection(key: PRNGKeyArray) -> GatedConnection:
            mean_key, write_key = jax.random.split(key)
            write = fan_in(write_key, (size, self.streams), jnp.float32, size, "normal")
            return GatedConnection(mean=self.build_maps(embed_dim, key=mean_key), write=write)

        return GatedConnections(connections=tuple(map(build_connection, jax.random.split(key, branches))))


class GatedMean(eqx.Module):
    """Mean over the normalized streams, with a separate gate for each feature of each stream."""

    scale: Float[Array, "streams norm"]
    down: Float[Array, "stream_embed gate_rank"]
    up: Float[Array, "gate_rank stream_embed"]
    config: GatedStreams = eqx.field(static=True)

    def expand(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length streams embed"]:
        """Return the input of the first block: copies of the embedding."""
        return self.config.expand(x)

    def reduce(
        self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the gated mean of the output of the last block."""
        return self.read(self.normed(x), ctx)

    def normed(self, x: Float[Array, "batch length streams embed"]) -> Float[Array, "batch length streams embed"]:
        """Normalize the streams."""
        return normalize_streams(x, self.scale, self.config.norm)

    def read(
        self, n: Float[Array, "batch length streams embed"], ctx: ForwardContext
    ) -> Float[Array, "batch length embed"]:
        """Return the gated mean of the normalized streams `n`."""
        flat = n.reshape(*n.shape[:2], -1)
        pattern = "batch length stream_embed, stream_embed gate_rank -> batch length gate_rank"
        inner = jax.nn.silu(ctx.einsum(pattern, flat, self.down) / self.config.streams)
        pattern = "batch length gate_rank, gate_rank stream_embed -> batch length stream_embed"
        gate = jax.nn.sigmoid(ctx.einsum(pattern, inner, self.up).astype(jnp.float32)).reshape(n.shape)
        return jnp.mean(gate * n.astype(jnp.float32), axis=2).astype(n.dtype)


class GatedConnection(eqx.Module):
    """Connection of one layer: the gated mean that it reads, and the gates of its output."""

    mean: GatedMean
    write: Float[Array, "stream_embed streams"]

    def __call__(self, x: Float[Array, "batch length streams embed"], ctx: ForwardContext) -> tuple[Array, Array]:
        """Return the layer's input, and the gate of each stream."""
        n = self.mean.normed(x)
        pattern = "batch length stream_embed, stream_embed streams -> batch length streams"
        gate = ctx.einsum(pattern, n.reshape(*n.shape[:2], -1), self.write).astype(jnp.float32)
        return self.mean.read(n, ctx), 2 * jax.nn.sigmoid(gate / x.shape[2])


class GatedConnections(ReadWriteResidual):
    """Connections of one block: one for each layer that reads one stream."""

    connections: tuple[GatedConnection, ...]

    def read(self, state: Array, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Array | None]:
        return (state, None) if layer.reads_streams else self.connections[layer.position](state, ctx)

    def write(self, state: Array, out: Array, coefficients: Array | None = None) -> Array:
        if coefficients is None:
            return state + out
        gated = coefficients[..., None] * out.astype(jnp.float32)[:, :, None]
        return (state.astype(jnp.float32) + gated).astype(state.dtype)
