"""Indexers over blocks of keys: which blocks query heads attend to. Their choice has no gradient, and no loss here.

    score_tc = max over keys s of block c of  rotate(norm(W_q x_t)) . rotate(norm(W_k x_s))           (MiniMax M3, 2026)
    score_tc = sum over heads h of max(0, rotate(norm(W_h x_t)) . rotate(norm(mean over s of W_k x_s))) / sqrt(head_dim)

One key per token is shared by all heads of an indexer. In the first form each head chooses for as many query heads, and
the query's own block and perhaps some before it are always taken; the second (Qwen 4, 2026) is one choice for all.
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
from eqx_decoders.layers.attention.moba import BlockKeys, BlockSelection, mean_keys, products
from eqx_decoders.layers.attention.topk import top_k_mask
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

    def _scorer(
        self, key: Array, blocks: Array, positions: Array, block_keys: BlockKeys | None
    ) -> Callable[[Array, int], Array]:
        blocks = jnp.where(positions >= 0, blocks, -1)
        return lambda query, count: _block_maxima(products(query, key), blocks, count)

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, block_keys: BlockKeys | None
    ) -> Float32[Array, "batch heads length blocks"]:
        maxima = [_block_maxima(products(query, key), blocks, count) for blocks, key in parts]
        return jnp.maximum(*maxima)


class BlockIndex(NamedTuple):
    """Queries and keys of an indexer for the tokens of a call, and what makes keys of blocks from their means."""

    query: Float[Array, "batch length index_heads head_dim"]
    key: Float[Array, "batch length 1 head_dim"]
    block_keys: BlockKeys | None = None


class BlockIndexer(eqx.Module):
    """Indexer whose scores of blocks are the largest products of its queries and their keys."""

    query: Float[Array, "embed kv_heads head_dim"]
    key: Float[Array, "embed head_dim"]
    query_norm: Norm
    key_norm: Norm

    def __call__(
        self, x: Float[Array, "batch length embed"], rope: Rope | None, rope_dim: int, ctx: ForwardContext
    ) -> BlockIndex:
        """Compute queries and keys; their first `rope_dim` features are rotated."""
        query, key = self._project(jax.lax.stop_gradient(x), ctx)
        query, key = (
            rotate_first(y, ctx.positions, rope, rope_dim, ctx.segment_ids)
            for y in (self.query_norm(query), self.key_norm(key))
        )
        return BlockIndex(
            query=ctx.constrain(query, "batch length kv_heads head_dim"),
            key=ctx.constrain(key, "batch length slots head_dim"),
        )

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array]:
        """Project to queries and to a key."""
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
    """Rotate the first `count` features of every head."""
    if rope is None:
        return x
    first, rest = jnp.split(x, [count], axis=-1)
    first = rotate(first, positions, dataclasses.replace(rope, fraction=1.0), segment_ids)
    return jnp.concatenate([first, rest], axis=-1)


def _block_maxima(
    scores: Float32[Array, "batch heads length keys"], blocks: Array, count: int
) -> Float32[Array, "batch heads length blocks"]:
    """Return the largest score of each block, of the block of each key; -inf where there is none."""

    def row(scores: Array, into: Array) -> Array:
        empty = jnp.full((count, *scores.shape[:2]), -jnp.inf)
        maxima = empty.at[jnp.where(into < 0, count, into)].max(jnp.moveaxis(scores, 2, 0), mode="drop")
        return jnp.moveaxis(maxima, 0, 2)

    return jax.vmap(row)(scores, blocks)


# --- means of keys ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledIndexerConfig(BlockIndexerConfig):
    """Selection of `top_k` complete blocks of keys for all heads, by the mean of each block's keys (Qwen 4).

    A block competes once it is complete, the earlier of equals first; its key is rotated to its first position. The
    query's own block, while it is not complete, is attended to beside those that are chosen.

    **Arguments:**

    - `size`, `top_k`: positions of a block, and complete blocks that a query attends to.
    - `local_blocks`: 1 for the query's own block while it is not complete; more for blocks just before it, which are
        then among the chosen ones.
    - `num_heads`, `head_dim`: its heads, and features of their queries and of the keys.
    - `norm`: normalization of its queries, and of the means.
    """

    def choices(self, heads: int) -> int:
        """Return how many choices so many heads of queries make: one."""
        return 1

    def token_products(self, keys: int) -> int:
        """Count multiplications per token of its scores over so many keys."""
        return self.num_heads * self.head_dim * keys // self.size

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "PooledIndexer":
        built = super().build(embed_dim, key=key)
        return PooledIndexer(built.query, built.key, built.query_norm, built.key_norm)

    def _scorer(
        self, key: Array, blocks: Array, positions: Array, block_keys: BlockKeys | None
    ) -> Callable[[Array, int], Array]:
        assert block_keys is not None
        firsts = jax.vmap(lambda each, into: jnp.zeros_like(each).at[into].max(each))(positions, blocks)
        keys = block_keys(mean_keys(key, blocks, positions >= 0), firsts // self.size * self.size)
        return lambda query, count: self._sum(products(query, keys[:, :count]))

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, block_keys: BlockKeys | None
    ) -> Float32[Array, "batch 1 length blocks"]:
        assert block_keys is not None
        blocks, keys = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        means, occupied = _means_of(keys, blocks, count)
        firsts = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32) * self.size, means.shape[:2])
        scores = self._sum(products(query, block_keys(means, firsts)))
        # scores are not negative, so an empty block with score 0 could be selected before blocks that have keys
        return jnp.where(occupied[:, None, None], scores, -jnp.inf)

    def _sum(self, scores: Float32[Array, "batch heads length blocks"]) -> Float32[Array, "batch 1 length blocks"]:
        return jnp.sum(jax.nn.relu(scores), axis=1, keepdims=True) * self.head_dim**-0.5

    def _best(
        self,
        scores: Float32[Array, "batch 1 length blocks"],
        up_to: Bool[Array, "batch length blocks"],
        back: Int[Array, "batch length blocks"],
        positions: Int[Array, "batch length"],
    ) -> Bool[Array, "batch 1 length blocks"]:
        tail = up_to & (back == 0) & ((positions + 1) % self.size != 0)[:, :, None]
        near = ((back > 0) & (back < self.local_blocks))[:, None] & (scores > -jnp.inf)
        scores = jnp.where((up_to & ~tail)[:, None], jnp.where(near, jnp.inf, scores), -jnp.inf)
        return (top_k_mask(scores, self.top_k) & (scores > -jnp.inf)) | tail[:, None]


class PooledIndexer(BlockIndexer):
    """Indexer whose keys are normalized and rotated once they are pooled."""

    def __call__(
        self, x: Float[Array, "batch length embed"], rope: Rope | None, rope_dim: int, ctx: ForwardContext
    ) -> BlockIndex:
        """Compute queries, of which the first `rope_dim` features are rotated, and keys as they are."""
        query, key = self._project(jax.lax.stop_gradient(x), ctx)
        query = rotate_first(self.query_norm(query), ctx.positions, rope, rope_dim, ctx.segment_ids)

        def block_keys(means: Array, firsts: Array) -> Array:
            normed = self.key_norm(means.astype(x.dtype))
            return jax.lax.stop_gradient(rotate_first(normed, firsts, rope, rope_dim))

        query = ctx.constrain(query, "batch length kv_heads head_dim")
        return BlockIndex(query, ctx.constrain(key, "batch length slots head_dim"), block_keys)


def _means_of(
    keys: Float[Array, "batch keys 1 head_dim"], blocks: Int[Array, "batch keys"], count: int
) -> tuple[Float32[Array, "batch blocks 1 head_dim"], Bool[Array, "batch blocks"]]:
    """Return the mean key of each block, and whether it has any keys.

    `blocks`: index of each key's block. Keys with a negative index are ignored.
    """

    def row(key: Array, into: Array) -> tuple[Array, Array]:
        into = jnp.where(into < 0, count, into)
        sums = jnp.zeros((count, *key.shape[1:]), jnp.float32).at[into].add(key.astype(jnp.float32), mode="drop")
        total = jnp.zeros((count,), jnp.float32).at[into].add(1.0, mode="drop")
        return sums / jnp.maximum(total, 1.0)[:, None, None], total > 0

    return jax.vmap(row)(keys, blocks)


BlockChoice = BlockSelection | BlockIndexerConfig | PooledIndexerConfig
