"""Indexer over blocks of keys (MiniMax M3, 2026): selects the blocks that a group of query heads attends to.

    score_tc = max over keys s of block c of  rotate(norm(W_q x_t)) . rotate(norm(W_k x_s))

One key per token is shared by all heads of the indexer, each of which chooses for as many query heads. The query's own
block and perhaps some before it are always taken. The choice has no gradient, and no loss teaches it here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray

from eqx_decoders.context import Context
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.attention.moba import BlockSelection, products
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockIndexerConfig(BlockSelection):
    """Selection of `top_k` blocks of keys by learned scores, the largest of a block's keys.

    **Arguments:**

    - `size`, `top_k`, `local_blocks`: as in `BlockSelection`.
    - `num_heads`: its heads, a divisor of the attention's: each chooses for as many of these.
    - `head_dim`: features of their queries and of the key that they share, of which as many are rotated as of a head.
    - `norm`: normalization of its queries and keys.
    """

    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 128
    norm: NormConfig = RMSNormConfig()

    def token_products(self, keys: int) -> int:
        """Count multiplications per token of its scores over so many keys."""
        return self.num_heads * self.head_dim * keys

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "BlockIndexer":
        keys, heads, head_dim = jax.random.split(key), self.num_heads, self.head_dim
        return BlockIndexer(
            query=fan_in(keys[0], (embed_dim, heads, head_dim), jnp.float32, embed_dim, "normal"),
            key=fan_in(keys[1], (embed_dim, head_dim), jnp.float32, embed_dim, "normal"),
            query_norm=self.norm.build(head_dim),
            key_norm=self.norm.build(head_dim),
        )

    def _scorer(self, key: Array, blocks: Array, real: Bool[Array, "batch length"]) -> Callable[[Array, int], Array]:
        blocks = jnp.where(real, blocks, -1)
        return lambda query, count: _block_maxima(products(query, key), blocks, count)

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int
    ) -> Float32[Array, "batch heads length blocks"]:
        maxima = [_block_maxima(products(query, key), blocks, count) for blocks, key in parts]
        return jnp.maximum(*maxima)


class BlockIndex(NamedTuple):
    """Queries and keys of an indexer for the tokens of a call."""

    query: Float[Array, "batch length index_heads head_dim"]
    key: Float[Array, "batch length 1 head_dim"]


class BlockIndexer(eqx.Module):
    """Indexer whose scores of blocks are the largest products of its queries and their keys."""

    query: Float[Array, "embed kv_heads head_dim"]
    key: Float[Array, "embed head_dim"]
    query_norm: Norm
    key_norm: Norm

    def __call__(
        self, x: Float[Array, "batch length embed"], rope: Rope | None, rope_dim: int, ctx: Context
    ) -> BlockIndex:
        """Compute queries and keys; their first `rope_dim` features are rotated."""
        x = jax.lax.stop_gradient(x)

        def rotated(y: Array) -> Array:
            if rope is None:
                return y
            first, rest = jnp.split(y, [rope_dim], axis=-1)
            first = rotate(first, ctx.positions, dataclasses.replace(rope, fraction=1.0), ctx.segment_ids)
            return jnp.concatenate([first, rest], axis=-1)

        pattern = "batch length embed, embed kv_heads head_dim -> batch length kv_heads head_dim"
        query = self.query_norm(ctx.einsum(pattern, x, self.query))
        key = self.key_norm(ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key))
        return BlockIndex(
            query=ctx.constrain(rotated(query), "batch length kv_heads head_dim"),
            key=ctx.constrain(rotated(key[:, :, None]), "batch length slots head_dim"),
        )


def _block_maxima(
    scores: Float32[Array, "batch heads length keys"], blocks: Array, count: int
) -> Float32[Array, "batch heads length blocks"]:
    """Return the largest score of each block, of the block of each key; -inf where there is none."""

    def row(scores: Array, into: Array) -> Array:
        empty = jnp.full((count, *scores.shape[:2]), -jnp.inf)
        maxima = empty.at[jnp.where(into < 0, count, into)].max(jnp.moveaxis(scores, 2, 0), mode="drop")
        return jnp.moveaxis(maxima, 0, 2)

    return jax.vmap(row)(scores, blocks)
