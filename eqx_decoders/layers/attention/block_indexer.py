"""Indexers that select the key blocks to which query heads attend, by learned scores.

    score_tc = max over keys s of block c of  rotate(norm(W_q x_t)) . rotate(norm(W_k x_s))           (MiniMax M3, 2026)
    score_tc = sum over heads h of max(0, rotate(norm(W_h x_t)) . rotate(norm(mean over s of W_k x_s))) / sqrt(head_dim)

All heads of an indexer share one key per token. In the first form each indexer head selects blocks for an equal number
of query heads, and always selects the query's own block and the `local_blocks - 1` blocks before it. In the second form
(Qwen 4, 2026) all query heads share one selection.

The selection has no gradient, and this library has no loss that trains the indexer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveInt
from eqx_decoders.layers.attention.moba import BlockSelection, MakeBlockKeys, mean_keys, query_key_products
from eqx_decoders.layers.attention.topk import top_k_mask
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.initializers import fan_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockIndexerConfig(BlockSelection):
    """Selection of `top_k` key blocks by an indexer; the score of a block is the largest score of its keys.

    **Arguments:**

    - `size`, `top_k`, `local_blocks`: as in `BlockSelection`.
    - `num_heads`: indexer heads, a divisor of the attention's query heads. Each selects for an equal number of query
        heads.
    - `head_dim`: features of the indexer's queries and keys. Rope rotates as many of them as of an attention head.
    - `norm`: normalization of the indexer's queries and keys.
    """

    num_heads: PositiveInt = 4
    head_dim: PositiveInt = 128
    norm: NormConfig = RMSNormConfig()

    def token_products(self, keys: int) -> int:
        """Count multiplications per token for scoring `keys` keys."""
        return self.num_heads * self.head_dim * keys

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "BlockIndexer":
        query_key, key_key = jax.random.split(key)
        query_shape = (embed_dim, self.num_heads, self.head_dim)
        return BlockIndexer(
            query=fan_in(query_key, query_shape, jnp.float32, embed_dim, "normal"),
            key=fan_in(key_key, (embed_dim, self.head_dim), jnp.float32, embed_dim, "normal"),
            query_norm=self.norm.build(self.head_dim),
            key_norm=self.norm.build(self.head_dim),
        )

    def _make_scorer(
        self, key: Array, blocks: Array, positions: Array, make_block_keys: MakeBlockKeys | None
    ) -> Callable[[Array, int], Array]:
        blocks = jnp.where(positions >= 0, blocks, -1)
        return lambda query, count: _block_maxima(query_key_products(query, key), blocks, count)

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, make_block_keys: MakeBlockKeys | None
    ) -> Float32[Array, "batch heads length blocks"]:
        maxima = [_block_maxima(query_key_products(query, key), blocks, count) for blocks, key in parts]
        return jnp.maximum(*maxima)


class SelectionInputs(NamedTuple):
    """Queries and keys of the tokens of a call by which key blocks are scored.

    `make_block_keys`: computes block keys from mean keys; None if the selection does not need it.
    """

    query: Float[Array, "batch length index_heads head_dim"]
    key: Float[Array, "batch length 1 head_dim"]
    make_block_keys: MakeBlockKeys | None = None


class BlockIndexer(eqx.Module):
    """Indexer that scores a key block by the largest dot product of a query with the block's keys."""

    query: Float[Array, "embed kv_heads head_dim"]
    key: Float[Array, "embed head_dim"]
    query_norm: Norm
    key_norm: Norm

    def __call__(
        self, x: Float[Array, "batch length embed"], rope: Rope | None, rope_dim: int, ctx: ForwardContext
    ) -> SelectionInputs:
        """Compute the indexer's queries and keys, with their first `rope_dim` features rotated."""
        query, key = self._project(jax.lax.stop_gradient(x), ctx)
        query, key = (
            rotate_first(y, ctx.positions, rope, rope_dim, ctx.segment_ids)
            for y in (self.query_norm(query), self.key_norm(key))
        )
        return SelectionInputs(
            query=ctx.constrain(query, "batch length kv_heads head_dim"),
            key=ctx.constrain(key, "batch length one head_dim"),
        )

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        pattern = "batch length embed, embed kv_heads head_dim -> batch length kv_heads head_dim"
        key = ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key)
        return ctx.einsum(pattern, x, self.query), key[:, :, None]


def rotate_first(
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "batch length"],
    rope: Rope | None,
    count: int,
    segment_ids: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotate the first `count` features of every head; the other features are unchanged."""
    if rope is None:
        return x
    rotated, unrotated = jnp.split(x, [count], axis=-1)
    rotated = rotate(rotated, positions, dataclasses.replace(rope, fraction=1.0), segment_ids)
    return jnp.concatenate([rotated, unrotated], axis=-1)


def _block_maxima(
    scores: Float32[Array, "batch heads length keys"], blocks: Array, count: int
) -> Float32[Array, "batch heads length blocks"]:
    """Return the largest score in each of the first `count` blocks; -inf for a block without keys.

    `blocks`: block index of each key, `[batch, keys]`. Keys with a negative index are ignored.
    """

    def sequence_maxima(scores: Array, blocks: Array) -> Array:
        empty = jnp.full((count, *scores.shape[:2]), -jnp.inf)
        maxima = empty.at[jnp.where(blocks < 0, count, blocks)].max(jnp.moveaxis(scores, 2, 0), mode="drop")
        return jnp.moveaxis(maxima, 0, 2)

    return jax.vmap(sequence_maxima)(scores, blocks)


# --- selection by mean keys (Qwen 4) ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledIndexerConfig(BlockIndexerConfig):
    """Selection of `top_k` complete key blocks for all heads, by the mean key of each block (Qwen 4).

    Only complete blocks compete; among equal scores the earlier block is selected. The mean key of a block is rotated
    to the block's first position. The query's own block is attended to in addition while it is incomplete.

    **Arguments:**

    - `size`: positions per key block.
    - `top_k`: number of complete blocks that a query attends to.
    - `local_blocks`: 1 or more; the `local_blocks - 1` blocks just before the query's own are always among the `top_k`.
    - `num_heads`: indexer heads, whose scores are summed.
    - `head_dim`: features of the indexer's queries and keys.
    - `norm`: normalization of the indexer's queries and of the mean keys.
    """

    def num_selections(self, heads: int) -> int:
        return 1

    def token_products(self, keys: int) -> int:
        """Count multiplications per token for scoring the blocks of `keys` keys."""
        return self.num_heads * self.head_dim * keys // self.size

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "PooledIndexer":
        indexer = super().build(embed_dim, key=key)
        return PooledIndexer(indexer.query, indexer.key, indexer.query_norm, indexer.key_norm)

    def _make_scorer(
        self, key: Array, blocks: Array, positions: Array, make_block_keys: MakeBlockKeys | None
    ) -> Callable[[Array, int], Array]:
        assert make_block_keys is not None
        block_maxima = jax.vmap(lambda values, blocks: jnp.zeros_like(values).at[blocks].max(values))
        first_positions = block_maxima(positions, blocks) // self.size * self.size
        keys = make_block_keys(mean_keys(key, blocks, positions >= 0), first_positions)
        return lambda query, count: self._sum_heads(query_key_products(query, keys[:, :count]))

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, make_block_keys: MakeBlockKeys | None
    ) -> Float32[Array, "batch 1 length blocks"]:
        assert make_block_keys is not None
        blocks, keys = (jnp.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
        means, occupied = _cached_means(keys, blocks, count)
        first_positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32) * self.size, means.shape[:2])
        scores = self._sum_heads(query_key_products(query, make_block_keys(means, first_positions)))
        # scores are not negative, so an empty block with score 0 could be selected before blocks that have keys
        return jnp.where(occupied[:, None, None], scores, -jnp.inf)

    def _sum_heads(
        self, scores: Float32[Array, "batch heads length blocks"]
    ) -> Float32[Array, "batch 1 length blocks"]:
        return jnp.sum(jax.nn.relu(scores), axis=1, keepdims=True) * self.head_dim**-0.5

    def _select_blocks(
        self,
        scores: Float32[Array, "batch 1 length blocks"],
        allowed: Bool[Array, "batch length blocks"],
        distance: Int[Array, "batch length blocks"],
        positions: Int[Array, "batch length"],
    ) -> Bool[Array, "batch 1 length blocks"]:
        incomplete = allowed & (distance == 0) & ((positions + 1) % self.size != 0)[:, :, None]
        local = ((distance > 0) & (distance < self.local_blocks))[:, None] & (scores > -jnp.inf)
        scores = jnp.where((allowed & ~incomplete)[:, None], jnp.where(local, jnp.inf, scores), -jnp.inf)
        return (top_k_mask(scores, self.top_k) & (scores > -jnp.inf)) | incomplete[:, None]


class PooledIndexer(BlockIndexer):
    """Indexer that normalizes and rotates mean keys of blocks instead of the keys of tokens."""

    def __call__(
        self, x: Float[Array, "batch length embed"], rope: Rope | None, rope_dim: int, ctx: ForwardContext
    ) -> SelectionInputs:
        """Compute queries, with their first `rope_dim` features rotated, and raw keys."""
        query, key = self._project(jax.lax.stop_gradient(x), ctx)
        query = rotate_first(self.query_norm(query), ctx.positions, rope, rope_dim, ctx.segment_ids)

        def make_block_keys(means: Array, first_positions: Array) -> Array:
            normed = self.key_norm(means.astype(x.dtype))
            return jax.lax.stop_gradient(rotate_first(normed, first_positions, rope, rope_dim))

        query = ctx.constrain(query, "batch length kv_heads head_dim")
        return SelectionInputs(query, ctx.constrain(key, "batch length one head_dim"), make_block_keys)


def _cached_means(
    keys: Float[Array, "batch keys 1 head_dim"], blocks: Int[Array, "batch keys"], count: int
) -> tuple[Float32[Array, "batch blocks 1 head_dim"], Bool[Array, "batch blocks"]]:
    """Return the mean key of each of `count` blocks, and whether the block has any keys.

    `blocks`: block index of each key. Keys with a negative index are ignored.
    """

    def sequence_means(key: Array, blocks: Array) -> tuple[Array, Array]:
        blocks = jnp.where(blocks < 0, count, blocks)
        sums = jnp.zeros((count, *key.shape[1:]), jnp.float32).at[blocks].add(key.astype(jnp.float32), mode="drop")
        num_keys = jnp.zeros((count,), jnp.float32).at[blocks].add(1.0, mode="drop")
        return sums / jnp.maximum(num_keys, 1.0)[:, None, None], num_keys > 0

    return jax.vmap(sequence_means)(keys, blocks)
