"""Mixture of block attention (MoBA; Lu et al., 2025): each query head attends to a few blocks of keys.

A block is `size` positions of a document. A query takes its own block, in which it sees what came before, and the
earlier blocks whose mean key has the largest product with it: `top_k` blocks in all, the earlier ones of equals.
There are no weights, and the choice has no gradient. `BlockIndexerConfig` scores the blocks by learned keys instead.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.layers.attention.kernels.selection import WORD, Selection, pack_groups
from eqx_decoders.layers.attention.topk import KeyChoice, map_queries, top_k_mask


# from the mean keys of blocks and their first positions to the keys by which they are scored
BlockKeys = Callable[[Float32[Array, "batch blocks 1 head_dim"], Int[Array, "batch blocks"]], Array]
DOCUMENTS = 128  # of a row, for which a few more blocks are compared than one document has


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSelection(CheckedFields):
    """Selection of `top_k` blocks of keys for each query head, its own block among them.

    **Arguments:**

    - `size`: positions of a block.
    - `top_k`: blocks that a query attends to.
    - `local_blocks`: how many of them are its own block and those before it.
    """

    size: PositiveInt = 1024
    top_k: PositiveInt = 8
    local_blocks: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        name, rule = type(self).__name__, f"must be at most top_k={self.top_k}"
        check(self.local_blocks <= self.top_k, f"{name}.local_blocks={self.local_blocks} {rule}.")

    def token_products(self, keys: int) -> int:
        """Count multiplications per token of its scores over so many keys."""
        return 0

    def choose(
        self,
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
        segments: Int[Array, "batch length"] | None,
        contiguous: bool = False,
        block_keys: BlockKeys | None = None,
    ) -> Selection | None:
        """Return the blocks of whole documents that each token chooses; None: all of them.

        `block_keys` makes the keys of blocks from their means, for selections that need it.

        Unless positions are `contiguous` each token may stand in a block of its own. Blocks of contiguous documents are
        numbered within each, so that few words hold them. A row of up to DOCUMENTS more blocks than a single document
        has compares no more; any other compares as many as it has tokens.
        """
        length, heads = positions.shape[1], self.choices(query.shape[2])
        most = -(-length // self.size) + 1 if contiguous else length  # one more where a row begins within a block
        if most <= self.top_k:
            return None
        single = segments is None
        usual = min(length, most + (0 if single else DOCUMENTS))
        query, key = jax.lax.stop_gradient((query, key))
        segments = jnp.zeros_like(positions) if segments is None else segments
        blocks, begins = _blocks_of(positions, segments, self.size)
        first = jax.lax.cummax(jnp.where(begins, blocks, 0), axis=1) if contiguous else jnp.zeros_like(blocks)
        scorer, places = self._scorer(key, blocks, positions, block_keys), positions // self.size
        largest = jax.vmap(lambda each, into: jnp.full_like(each, -1).at[into].max(each))
        owners, numbers = largest(segments, blocks), largest(places, blocks)

        def words(candidates: int) -> UInt32[Array, "batch heads length words"]:
            # without a checkpoint what is compared would be kept, though it has no gradient
            @functools.partial(jax.checkpoint, prevent_cse=False)
            def some(queries):
                query, own_block, segment, first, position = queries
                index = jnp.arange(candidates, dtype=jnp.int32)[None, None]
                up_to = (index <= own_block[:, :, None]) & (owners[:, None, :candidates] == segment[:, :, None])
                back = position[:, :, None] // self.size - numbers[:, None, :candidates]
                packed = pack_groups(self._best(scorer(query, candidates), up_to, back, position))
                return _shifted(packed, first[:, None], -(-most // WORD)) if contiguous else packed

            queries = query, blocks, segments, first, positions
            found = jnp.moveaxis(map_queries(some, queries, candidates, heads), 0, 2)
            return found.reshape(*found.shape[:2], -1, found.shape[4])[:, :, :length]

        if usual == length or (contiguous and single):
            found = words(usual)
        else:
            found = jax.lax.cond(jnp.max(blocks) < usual, lambda: words(usual), lambda: words(length))
        return Selection(found, jnp.where(positions >= 0, blocks - first, -1))

    def choose_cached(
        self,
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
        past_key: Float[Array, "batch kv_heads slots head_dim"],
        past_positions: Int[Array, "batch slots"],
        block_keys: BlockKeys | None = None,
    ) -> KeyChoice:
        """Return which tokens of a call and of a cache are in the chosen blocks; a row of the cache is one document."""
        slots, length = past_positions.shape[1], positions.shape[1]
        count = -(-(slots + length) // self.size)
        if count <= self.top_k:
            return KeyChoice()
        query, key, keys = jax.lax.stop_gradient((query, key, past_key))
        own_block, others = positions // self.size, past_positions // self.size
        scores = self._cached_scores(query, ((others, keys.swapaxes(1, 2)), (own_block, key)), count, block_keys)
        back = own_block[:, :, None] - jnp.arange(count, dtype=jnp.int32)[None, None]
        chosen = self._best(scores, back >= 0, back, positions)
        return KeyChoice(_of_tokens(chosen, own_block), _of_tokens(chosen, others))

    def choices(self, heads: int) -> int:
        """Return how many choices so many heads of queries make."""
        return heads

    def _scorer(
        self, key: Array, blocks: Array, positions: Array, block_keys: BlockKeys | None
    ) -> Callable[[Array, int], Array]:
        """Return a function from some queries to their scores of the first so many blocks."""
        means = mean_keys(key, blocks, positions >= 0)
        return lambda query, count: products(query, means[:, :count])

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, block_keys: BlockKeys | None
    ) -> Float32[Array, "batch heads length blocks"]:
        """Compute scores of all blocks, of parts with the block of each key and the keys; -inf where there is none."""
        sums: Any = 0.0
        totals: Any = 0.0
        for blocks, some in parts:
            inside = jax.nn.one_hot(blocks, count, dtype=some.dtype, axis=1)  # another order CPUs have no product for
            sums += jnp.einsum("bcs,bsnd->bcnd", inside, some, preferred_element_type=jnp.float32)
            totals += jnp.sum(inside, axis=2, dtype=jnp.float32)
        scores = products(query, sums / jnp.maximum(totals, 1.0)[:, :, None, None])
        return jnp.where((totals > 0)[:, None, None], scores, -jnp.inf)

    def _best(
        self,
        scores: Float32[Array, "batch heads length blocks"],
        up_to: Bool[Array, "batch length blocks"],
        back: Int[Array, "batch length blocks"],
        positions: Int[Array, "batch length"],
    ) -> Bool[Array, "batch heads length blocks"]:
        """Return the blocks that each query head takes of those up to its own, local ones before all others.

        `back` is how many blocks each one is before the query's own.
        """
        scores, local = jnp.where(up_to[:, None], scores, -jnp.inf), back < self.local_blocks
        scores = jnp.where(local[:, None] & (scores > -jnp.inf), jnp.inf, scores)
        return top_k_mask(scores, self.top_k) & (scores > -jnp.inf)


def products(
    query: Float[Array, "batch length heads head_dim"], key: Float[Array, "batch keys kv_heads head_dim"]
) -> Float32[Array, "batch heads length keys"]:
    """Compute the products of queries and keys in f32."""
    batch, length, heads, dim = query.shape
    split = query.astype(jnp.float32).reshape(batch, length, key.shape[2], -1, dim)
    with jax.default_matmul_precision("highest"):  # they decide
        return jnp.einsum("blngd,bcnd->bnglc", split, key.astype(jnp.float32)).reshape(batch, heads, length, -1)


def _blocks_of(
    positions: Array, segments: Array, size: int
) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """Number the block of each token, counted along the row; padding belongs to the block before it.

    Returns the first tokens of documents, too.
    """
    index = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    latest = jax.lax.cummax(jnp.where(positions >= 0, index, -1), axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    place, segment = (jnp.take_along_axis(x, jnp.maximum(before, 0), axis=1) for x in (positions, segments))
    document = ((before < 0) | (segment != segments)) & (positions >= 0)
    begins = document | ((place // size != positions // size) & (positions >= 0))
    return jnp.maximum(jnp.cumsum(begins, axis=1) - 1, 0), document


def mean_keys(
    key: Array, blocks: Array, real: Bool[Array, "batch length"]
) -> Float32[Array, "batch blocks kv_heads head_dim"]:
    """Compute the mean key of each of as many blocks as there are tokens; zero for blocks that do not exist."""

    def row(key, into, real):
        zeros, weight = jnp.zeros(key.shape, jnp.float32), real.astype(jnp.float32)
        sums = zeros.at[into].add(key.astype(jnp.float32) * weight[:, None, None])
        return sums / jnp.maximum(jnp.zeros_like(weight).at[into].add(weight), 1.0)[:, None, None]

    return jax.vmap(row)(key, blocks, real)


def _shifted(
    words: UInt32[Array, "batch heads length words"], first: Int[Array, "batch 1 length"], count: int
) -> UInt32[Array, "batch heads length count"]:
    """Return so many words of bits from bit `first` on."""
    index = jnp.arange(words.shape[3]).reshape(1, 1, 1, -1)
    start, shift = jnp.maximum(first, 0)[..., None], (first & (WORD - 1)).astype(jnp.uint32)

    def word(n: int) -> Array:
        return jnp.sum(jnp.where(index == start // WORD + n, words, 0), axis=3, dtype=jnp.uint32)

    parts = [word(n) for n in range(count + 1)]
    above = [jnp.where(shift == 0, 0, part << ((WORD - shift) & (WORD - 1))) for part in parts[1:]]
    return jnp.stack([(low >> shift) | high for low, high in zip(parts[:-1], above, strict=True)], axis=3)


def _of_tokens(
    chosen: Bool[Array, "batch heads length blocks"], blocks: Int[Array, "batch keys"]
) -> Bool[Array, "batch heads length keys"]:
    """Return whether the block of each key is chosen; a key in a block below 0 is in none."""
    inside = jnp.clip(blocks, 0, chosen.shape[-1] - 1)
    taken = jax.vmap(lambda chosen, blocks: jnp.take(chosen, blocks, axis=-1))(chosen, inside)
    return taken & (blocks >= 0)[:, None, None]
