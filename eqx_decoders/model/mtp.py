"""Multi-token prediction: depths that predict tokens after the next one (Gloeckle et al. 2024, DeepSeek-V3).

Depth k reads at token t what depth k - 1 made of it and the embedding of token t + k, and predicts token t + k + 1.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from eqx_decoders.blocks.block import Block, BlockConfig, checkpointed
from eqx_decoders.blocks.stack import at_layer
from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import Context
from eqx_decoders.errors import check_integer, check_number
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.matmul import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """`h_k[t] = block(project([norm(embed(token[t + k])), norm(h_{k-1}[t])]))`, and the model's head on `norm(h_k)`.

    h_0 is the residual stream after the last layer. Embedding and head are the model's, all else is a depth's own.

    **Arguments:**

    - `num_depths`: how many tokens after the next one are predicted.
    - `block`: the layer of each depth.
    - `norm`: of the embedding, of the stream, and before the head.
    - `normed_stream`: the first depth reads the stream after the final norm (DeepSeek's published weights expect it).
    - `loss_weight`: of the depths' cross-entropy, the mean over all their targets, in the training loss.
    """

    num_depths: int
    block: BlockConfig
    norm: NormConfig
    normed_stream: bool = False
    loss_weight: float = 0.1

    def __post_init__(self):
        check_integer("MTPConfig.num_depths", self.num_depths)
        check_number("MTPConfig.loss_weight", self.loss_weight, least=0)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "MTP":
        def one(key):
            kernel_key, block_key = jax.random.split(key)
            return MTPDepth(
                embed_norm=self.norm.build(embed_dim),
                stream_norm=self.norm.build(embed_dim),
                kernel=fan_in(kernel_key, (2 * embed_dim, embed_dim), jnp.float32, 2 * embed_dim),
                block=self.block.build(embed_dim, key=block_key),
                final_norm=self.norm.build(embed_dim),
            )

        return MTP(depth=eqx.filter_vmap(one)(jax.random.split(key, self.num_depths)), config=self)


class MTPDepth(eqx.Module):
    """One depth: an embedding and the stream side by side, projected, through a block."""

    embed_norm: Norm
    stream_norm: Norm
    kernel: Float[Array, "joined embed"]
    block: Block
    final_norm: Norm

    def __call__(
        self,
        stream: Float[Array, "batch length embed"],
        embedded: Float[Array, "batch length embed"],
        ctx: Context,
        past: dict[str, Any] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "batch length embed"], dict[str, Any], BlockStats]:
        """The stream of this depth, from that of the last one and the embeddings of later tokens."""
        joined = jnp.concatenate([self.embed_norm(embedded), self.stream_norm(stream)], axis=-1)
        x = ctx.einsum("batch length joined, joined embed -> batch length embed", joined, self.kernel)
        residual = self.block.config.residual
        x, entries, stats = checkpointed(ctx, prevent_cse=True)(self.block, residual.expand(x), ctx, past, key)
        return residual.reduce(x), entries, stats


class MTP(eqx.Module):
    """The depths of multi-token prediction, their weights stacked on a leading `layers` axis."""

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    depth: MTPDepth
    config: MTPConfig = eqx.field(static=True)

    def unstacked(self) -> tuple[MTPDepth, ...]:
        """The depths one by one."""
        return tuple(at_layer(self.depth, index) for index in range(self.config.num_depths))


class MTPOutput(eqx.Module):
    """What the depths make of a batch.

    **Arguments:**

    - `hidden`: the stream of each depth, before its final norm.
    - `real`: where there is one: the token `depth` places on belongs to the same document.
    - `stats`: of their blocks, stacked.
    """

    hidden: tuple[Float[Array, "batch length embed"], ...]
    real: tuple[Bool[Array, "batch length"], ...]
    stats: BlockStats


def shift_left(x: Array, count: int, order: np.ndarray | None = None) -> Array:
    """What stands `count` places on in the text, zeros at its end.

    `order` says which token of the text stands where in a row; None: `y[:, t] = x[:, t + count]`.
    """
    length = x.shape[1]
    if order is None:
        return jnp.pad(x[:, count:], ((0, 0), (0, min(count, length))) + ((0, 0),) * (x.ndim - 2))
    places, later = np.argsort(order), order + count
    inside = (later < length).reshape(1, length, *(1,) * (x.ndim - 2))
    return jnp.where(inside, x[:, places[np.minimum(later, length - 1)]], jnp.zeros((), x.dtype))


def same_document(
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    count: int,
    order: np.ndarray | None = None,
) -> Bool[Array, "batch length"]:
    """Whether a token and all up to the one `count` places on are of one document, without padding in between.

    Padding is at position -1; `order` as in `shift_left`.
    """
    inside = positions >= 0
    for later in range(1, count + 1):
        inside &= shift_left(positions + 1, later, order) > 0
        if segment_ids is not None:
            inside &= segment_ids == shift_left(segment_ids, later, order)
    return inside
