"""Multi-token prediction (MTP): depths that predict tokens after the next token (Gloeckle et al. 2024, DeepSeek-V3).

At token t, depth k reads the stream of depth k - 1 and the embedding of token t + k, and predicts token t + k + 1.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.block import SHARED_SUFFIX, Block
from eqx_decoders.blocks.residual.base import StreamMapping
from eqx_decoders.blocks.residual.streams import flat_streams, split_streams
from eqx_decoders.blocks.stack import checkpointed
from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.norm import Norm
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.sharding.explicit import at_layer


class MTPDepth(eqx.Module):
    """One MTP depth: the sum of the projected embedding and the projected stream passes through a block."""

    embed_norm: Norm
    stream_norm: Norm
    embed_kernel: Float[Array, "joined embed"]
    stream_kernel: Float[Array, "joined embed"]
    block: Block
    streams: StreamMapping | None
    final_norm: Norm | None
    config: MTPConfig = eqx.field(static=True)

    def __call__(
        self,
        stream: Float[Array, "batch length stream_embed"],
        embedded: Float[Array, "batch length embed"],
        ctx: ForwardContext,
        past: dict[str, Any] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "batch length stream_embed"], dict[str, Any], BlockStats]:
        """Return the stream of this depth, the new cache entries of its block, and the block's statistics.

        **Arguments:**

        - `stream`: stream of the previous depth; for the first depth, of the model.
        - `embedded`: embedding of the later token that this depth reads at each position.
        - `past`: cached keys and values of the block, by layer name.
        """
        residual = self.block.config.residual_config
        all_streams = self.config.all_streams
        pattern = "batch length joined, joined embed -> batch length embed"
        embed_part = ctx.einsum(pattern, self.embed_norm(embedded), self.embed_kernel)
        if all_streams:
            pattern = "batch length streams joined, joined embed -> batch length streams embed"
        stream_part = ctx.einsum(pattern, self._normed(stream, embedded.shape[-1]), self.stream_kernel)
        x = stream_part + embed_part[:, :, None] if all_streams else residual.expand(stream_part + embed_part)
        run = checkpointed(Block.__call__, ctx, prevent_cse=True)
        x, entries, stats = run(self.block, x, ctx, past, key)
        x = flat_streams(x) if all_streams else residual.reduce(x)
        return x, {name: entry for name, entry in entries.items() if not name.endswith(SHARED_SUFFIX)}, stats

    def _normed(
        self, stream: Float[Array, "batch length stream_embed"], embed_dim: int
    ) -> Float[Array, "batch length *streams embed"]:
        """Return the normalized stream, or all normalized streams with `MTPConfig.all_streams`."""
        if not self.config.all_streams:
            return self.stream_norm(stream)
        if self.config.joint_norm:
            return split_streams(self.stream_norm(stream), embed_dim)
        return self.stream_norm(split_streams(stream, embed_dim))

    def next_input(self, x: Float[Array, "batch length stream_embed"]) -> Float[Array, "batch length stream_embed"]:
        """Return the input of the next depth for the stream `x` of this depth."""
        return self.final_norm(x) if self.config.normed_depths and self.final_norm is not None else x


class MTP(eqx.Module):
    """All depths of multi-token prediction; their weights are stacked on a leading `layers` axis."""

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    depth: MTPDepth
    config: MTPConfig = eqx.field(static=True)

    @classmethod
    def build(cls, config: MTPConfig, embed_dim: int, *, key: PRNGKeyArray) -> "MTP":
        residual = config.block.residual_config

        def build_depth(key: PRNGKeyArray) -> MTPDepth:
            kernel_key, block_key = jax.random.split(key)
            streams_key = jax.random.fold_in(key, 2)
            kernel = fan_in(kernel_key, (2 * embed_dim, embed_dim), jnp.float32, 2 * embed_dim)
            norm_dim = embed_dim * (residual.streams if config.joint_norm else 1)
            return MTPDepth(
                embed_norm=config.norm.build(embed_dim),
                stream_norm=config.norm.build(norm_dim),
                embed_kernel=kernel[:embed_dim],
                stream_kernel=kernel[embed_dim:],
                block=config.block.build(embed_dim, key=block_key),
                streams=residual.build_maps(embed_dim, key=streams_key) if config.all_streams else None,
                final_norm=None if config.model_norm else config.norm.build(embed_dim),
                config=config,
            )

        return cls(depth=eqx.filter_vmap(build_depth)(jax.random.split(key, config.num_depths)), config=config)

    def unstacked(self) -> tuple[MTPDepth, ...]:
        """Return a tuple of the depths, with unstacked weights."""
        return tuple(at_layer(self.depth, index) for index in range(self.config.num_depths))


class MTPOutput(eqx.Module):
    """Streams and statistics of all depths.

    **Arguments:**

    - `hidden`: the stream of each depth before its final norm; with `MTPConfig.all_streams` the concatenated streams.
    - `real`: for depth k, whether the next k tokens belong to the document of the token (see `same_document`).
    - `stats`: statistics of the depths' blocks, stacked on a leading axis.
    """

    hidden: tuple[Float[Array, "batch length stream_embed"], ...]
    real: tuple[Bool[Array, "batch length"], ...]
    stats: BlockStats


def run_depths(
    depths: Sequence[MTPDepth],
    stream: Float[Array, "batch length stream_embed"],
    embed: Callable[[int, ForwardContext, PRNGKeyArray | None], Array],
    ctx: ForwardContext,
    *,
    order: np.ndarray | None,
    key: PRNGKeyArray | None,
) -> MTPOutput:
    """Run all depths in order; each depth reads the stream of the previous depth.

    **Arguments:**

    - `stream`: the input of the first depth.
    - `embed`: `embed(count, ctx, key)` returns for each token the embedding of the token `count` positions later;
        `ctx` has the positions of the later tokens, and `key` is for dropout.
    - `ctx`: context of the input tokens.
    - `order`: as in `shift_left`.
    """
    x = stream
    hiddens, reals, stats = [], [], []
    for count, depth in enumerate(depths, 1):
        embed_key, block_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, 3 + count))
        real = same_document(ctx.positions, ctx.segment_ids, count, order)
        later = ForwardContext(positions=shift_left(ctx.positions, count, order), execution=ctx.execution)
        depth_ctx = dataclasses.replace(ctx, positions=jnp.where(real, ctx.positions, -1))
        embedded = embed(count, later, embed_key)
        hidden, _, depth_stats = depth(x, embedded, depth_ctx, key=block_key)
        x = depth.next_input(hidden)
        hiddens.append(hidden)
        reals.append(real)
        stats.append(depth_stats)
    return MTPOutput(tuple(hiddens), tuple(reals), jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats))


def shift_left(x: Array, count: int, order: np.ndarray | None = None) -> Array:
    """Return the values `count` positions later in the text, and zeros where the text has ended.

    `order` has the index in the text of the token in each column (context parallelism reorders tokens). None: columns
    are in the order of the text, `y[:, t] = x[:, t + count]`.
    """
    length = x.shape[1]
    if order is None:
        return jnp.pad(x[:, count:], ((0, 0), (0, min(count, length))) + ((0, 0),) * (x.ndim - 2))
    columns = np.argsort(order)
    later = order + count
    inside = (later < length).reshape(1, length, *(1,) * (x.ndim - 2))
    return jnp.where(inside, x[:, columns[np.minimum(later, length - 1)]], jnp.zeros((), x.dtype))


def same_document(
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    count: int,
    order: np.ndarray | None = None,
) -> Bool[Array, "batch length"]:
    """Return whether a token and the next `count` tokens belong to one document, without padding in between.

    Padding has position -1. `order` is as in `shift_left`.
    """
    same = positions >= 0
    for shift in range(1, count + 1):
        same &= shift_left(positions + 1, shift, order) > 0
        if segment_ids is not None:
            same &= segment_ids == shift_left(segment_ids, shift, order)
    return same
