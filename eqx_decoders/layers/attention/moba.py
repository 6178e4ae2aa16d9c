"""Mixture of block attention (MoBA; Lu et al., 2025): each query head attends to a few key blocks.

A key block is `size` consecutive positions of a document. A query selects `top_k` key blocks: its own block (causally
masked) and the earlier blocks whose mean key has the largest dot product with the query. Among equal scores the
earlier block is selected. The selection has no weights and no gradient. `BlockIndexerConfig` scores key blocks by
learned keys instead.
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
from eqx_decoders.layers.attention.topk import SelectedKeys, map_queries, top_k_mask
from eqx_decoders.layers.documents import previous_tokens


# (mean keys of blocks, first positions of blocks) -> keys by which blocks are scored
MakeBlockKeys = Callable[[Float32[Array, "batch blocks 1 head_dim"], Int[Array, "batch blocks"]], Array]
# Packed documents share no key block, so a packed sequence has more key blocks than a single document. Up to this many
# additional blocks are expected; with more, every token is compared with `length` candidate blocks.
EXTRA_BLOCKS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSelection(CheckedFields):
    """Selection of `top_k` key blocks for each query head, including the query's own block.

    **Arguments:**

    - `size`: positions per key block.
    - `top_k`: number of key blocks that a query attends to.
    - `local_blocks`: number of key blocks that are always selected: the query's own and those just before it.
    """

    size: PositiveInt = 1024
    top_k: PositiveInt = 8
    local_blocks: PositiveInt = 1

    def __post_init__(self):
        super().__post_init__()
        check(
            self.local_blocks <= self.top_k,
            f"{type(self).__name__}.local_blocks={self.local_blocks} must be at most top_k={self.top_k}.",
        )

    def token_products(self, keys: int) -> int:
        """Count multiplications per token for scoring the blocks of `keys` keys; 0: they are not counted."""
        return 0

    def select(
        self,
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
        segments: Int[Array, "batch length"] | None,
        contiguous: bool = False,
        make_block_keys: MakeBlockKeys | None = None,
    ) -> Selection | None:
        """Select key blocks for each token of a call without a cache; None: every token attends to all blocks.

        Blocks are numbered along the sequence. Without `contiguous` positions a sequence of n tokens may have n blocks.
        With `contiguous` positions the returned bits count blocks from the first block of the token's document, so that
        fewer words are needed.

        **Arguments:**

        - `query`, `key`: queries and keys by which blocks are scored.
        - `positions`, `segments`: position of each token in its document (-1: padding), and document of each token.
        - `contiguous`: see `ForwardContext.documents_are_contiguous`.
        - `make_block_keys`: computes block keys from mean keys, for selections that need it.
        """
        length = positions.shape[1]
        heads = self.num_selections(query.shape[2])
        # one more block, as a sequence may start in the middle of a block
        max_document_blocks = -(-length // self.size) + 1 if contiguous else length
        if max_document_blocks <= self.top_k:
            return None
        single_document = segments is None
        usual_blocks = min(length, max_document_blocks + (0 if single_document else EXTRA_BLOCKS))
        query, key = jax.lax.stop_gradient((query, key))
        segments = jnp.zeros_like(positions) if segments is None else segments
        blocks, document_starts = _number_blocks(positions, segments, self.size)
        if contiguous:
            first_blocks = jax.lax.cummax(jnp.where(document_starts, blocks, 0), axis=1)
        else:
            first_blocks = jnp.zeros_like(blocks)
        scorer = self._make_scorer(key, blocks, positions, make_block_keys)
        block_maxima = jax.vmap(lambda values, blocks: jnp.full_like(values, -1).at[blocks].max(values))
        block_segments = block_maxima(segments, blocks)
        block_positions = block_maxima(positions // self.size, blocks)  # in units of blocks

        def select_among(candidates: int) -> UInt32[Array, "batch heads length words"]:
            # without a checkpoint the scores would be saved for the backward pass, though they have no gradient
            @functools.partial(jax.checkpoint, prevent_cse=False)
            def select_tile(queries):
                query, own_block, segment, first_block, position = queries
                index = jnp.arange(candidates, dtype=jnp.int32)[None, None]
                same_document = block_segments[:, None, :candidates] == segment[:, :, None]
                allowed = (index <= own_block[:, :, None]) & same_document
                distance = position[:, :, None] // self.size - block_positions[:, None, :candidates]
                packed = pack_groups(self._select_blocks(scorer(query, candidates), allowed, distance, position))
                if not contiguous:
                    return packed
                return _shift_bits(packed, first_block[:, None], -(-max_document_blocks // WORD))

            queries = query, blocks, segments, first_blocks, positions
            words = jnp.moveaxis(map_queries(select_tile, queries, candidates, heads), 0, 2)
            return words.reshape(*words.shape[:2], -1, words.shape[4])[:, :, :length]

        if usual_blocks == length or (contiguous and single_document):
            words = select_among(usual_blocks)
        else:
            words = jax.lax.cond(
                jnp.max(blocks) < usual_blocks, lambda: select_among(usual_blocks), lambda: select_among(length)
            )
        return Selection(words, jnp.where(positions >= 0, blocks - first_blocks, -1))

    def select_cached(
        self,
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        positions: Int[Array, "batch length"],
        past_key: Float[Array, "batch kv_heads slots head_dim"],
        past_positions: Int[Array, "batch slots"],
        make_block_keys: MakeBlockKeys | None = None,
    ) -> SelectedKeys:
        """Select the tokens of a call and of a cache that are in the selected blocks of each query.

        Each sequence of the cache is one document. `past_key`, `past_positions`: cached keys and their positions.
        """
        slots = past_positions.shape[1]
        length = positions.shape[1]
        num_blocks = -(-(slots + length) // self.size)
        if num_blocks <= self.top_k:
            return SelectedKeys()
        query, key, past_key = jax.lax.stop_gradient((query, key, past_key))
        blocks = positions // self.size
        past_blocks = past_positions // self.size
        parts = ((past_blocks, past_key.swapaxes(1, 2)), (blocks, key))
        scores = self._cached_scores(query, parts, num_blocks, make_block_keys)
        distance = blocks[:, :, None] - jnp.arange(num_blocks, dtype=jnp.int32)[None, None]
        selected = self._select_blocks(scores, distance >= 0, distance, positions)
        return SelectedKeys(_blocks_to_keys(selected, blocks), _blocks_to_keys(selected, past_blocks))

    def num_selections(self, heads: int) -> int:
        """Return the number of separate selections that `heads` scoring heads make."""
        return heads

    def _make_scorer(
        self, key: Array, blocks: Array, positions: Array, make_block_keys: MakeBlockKeys | None
    ) -> Callable[[Array, int], Array]:
        """Return a function `(queries, count) -> scores of the first count blocks`."""
        means = mean_keys(key, blocks, positions >= 0)
        return lambda query, count: query_key_products(query, means[:, :count])

    def _cached_scores(
        self, query: Array, parts: Sequence[tuple[Array, Array]], count: int, make_block_keys: MakeBlockKeys | None
    ) -> Float32[Array, "batch heads length blocks"]:
        """Score the first `count` blocks; -inf for a block without keys.

        `parts`: pairs of the block index of each key, `[batch, keys]`, and the keys, `[batch, keys, kv_heads, dim]`.
        """
        sums: Any = 0.0
        num_keys: Any = 0.0
        for blocks, keys in parts:
            # this order of axes, as XLA's CPU backend has no matrix product for the other one
            membership = jax.nn.one_hot(blocks, count, dtype=keys.dtype, axis=1)
            sums += jnp.einsum("bcs,bsnd->bcnd", membership, keys, preferred_element_type=jnp.float32)
            num_keys += jnp.sum(membership, axis=2, dtype=jnp.float32)
        scores = query_key_products(query, sums / jnp.maximum(num_keys, 1.0)[:, :, None, None])
        return jnp.where((num_keys > 0)[:, None, None], scores, -jnp.inf)

    def _select_blocks(
        self,
        scores: Float32[Array, "batch heads length blocks"],
        allowed: Bool[Array, "batch length blocks"],
        distance: Int[Array, "batch length blocks"],
        positions: Int[Array, "batch length"],
    ) -> Bool[Array, "batch heads length blocks"]:
        """Select `top_k` of the allowed blocks for each query head, local blocks first.

        **Arguments:**

        - `scores`: -inf for a block that must not be selected.
        - `allowed`: blocks of the query's document up to its own block.
        - `distance`: number of blocks from a block to the query's own block; 0 for its own block.
        - `positions`: positions of the queries.
        """
        scores = jnp.where(allowed[:, None], scores, -jnp.inf)
        local = distance < self.local_blocks
        scores = jnp.where(local[:, None] & (scores > -jnp.inf), jnp.inf, scores)
        return top_k_mask(scores, self.top_k) & (scores > -jnp.inf)


def query_key_products(
    query: Float[Array, "batch length heads head_dim"], key: Float[Array, "batch keys kv_heads head_dim"]
) -> Float32[Array, "batch heads length keys"]:
    """Compute the dot products of queries and keys in float32."""
    batch, length, heads, dim = query.shape
    grouped = query.astype(jnp.float32).reshape(batch, length, key.shape[2], -1, dim)
    with jax.default_matmul_precision("highest"):  # rounding could change the selection
        return jnp.einsum("blngd,bcnd->bnglc", grouped, key.astype(jnp.float32)).reshape(batch, heads, length, -1)


def _number_blocks(
    positions: Array, segments: Array, size: int
) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """Number the key blocks along each sequence.

    Returns the block index of each token, and whether the token is the first of its document. Padding gets the index of
    the preceding block.
    """
    previous = previous_tokens(positions >= 0)
    previous_position, previous_segment = (
        jnp.take_along_axis(x, jnp.maximum(previous, 0), axis=1) for x in (positions, segments)
    )
    document_starts = ((previous < 0) | (previous_segment != segments)) & (positions >= 0)
    block_starts = document_starts | ((previous_position // size != positions // size) & (positions >= 0))
    return jnp.maximum(jnp.cumsum(block_starts, axis=1) - 1, 0), document_starts


def mean_keys(
    key: Array, blocks: Array, real: Bool[Array, "batch length"]
) -> Float32[Array, "batch blocks kv_heads head_dim"]:
    """Compute the mean key of each block, in float32.

    **Arguments:**

    - `key`: keys, `[batch, length, kv_heads, head_dim]`.
    - `blocks`: block index of each key, less than `length`.
    - `real`: False for keys that are ignored (padding).

    **Returns:**

    The means of `length` blocks; zero for a block without keys.
    """

    def sequence_means(key, blocks, real):
        weight = real.astype(jnp.float32)
        sums = jnp.zeros(key.shape, jnp.float32).at[blocks].add(key.astype(jnp.float32) * weight[:, None, None])
        num_keys = jnp.zeros_like(weight).at[blocks].add(weight)
        return sums / jnp.maximum(num_keys, 1.0)[:, None, None]

    return jax.vmap(sequence_means)(key, blocks, real)


def _shift_bits(
    words: UInt32[Array, "batch heads length words"], first: Int[Array, "batch 1 length"], count: int
) -> UInt32[Array, "batch heads length count"]:
    """Return `count` words with the bits that start at bit `first` of `words`."""
    index = jnp.arange(words.shape[3]).reshape(1, 1, 1, -1)
    start = jnp.maximum(first, 0)[..., None]
    shift = (first & (WORD - 1)).astype(jnp.uint32)

    def word(n: int) -> Array:
        return jnp.sum(jnp.where(index == start // WORD + n, words, 0), axis=3, dtype=jnp.uint32)

    parts = [word(n) for n in range(count + 1)]
    high_bits = [jnp.where(shift == 0, 0, part << ((WORD - shift) & (WORD - 1))) for part in parts[1:]]
    return jnp.stack([(low >> shift) | high for low, high in zip(parts[:-1], high_bits, strict=True)], axis=3)


def _blocks_to_keys(
    selected: Bool[Array, "batch heads length blocks"], blocks: Int[Array, "batch keys"]
) -> Bool[Array, "batch heads length keys"]:
    """Return whether the block of each key is selected. A key with a negative block index is not selected."""
    clipped = jnp.clip(blocks, 0, selected.shape[-1] - 1)
    taken = jax.vmap(lambda selected, blocks: jnp.take(selected, blocks, axis=-1))(selected, clipped)
    return taken & (blocks >= 0)[:, None, None]
