"""Attention to a sliding window of tokens and to compressed keys of earlier tokens (DeepSeek-V4, 2026).

All query heads share one head that is both key and value. As values contain the rotary embedding of their position, the
output of a query is rotated back by the query's position, so that it depends on relative positions only. A compressed
key represents a complete window of tokens. Queries attend to all compressed keys, or to those that an indexer selects.
The output projection has low rank: heads are split into output groups, and each group has its own down-projection.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, PositiveInt, check
from eqx_decoders.families.deepseek.compressed_keys import CompressedShape, NewWindows, at_ends
from eqx_decoders.families.deepseek.compression import (
    CompressionConfig,
    Compressor,
    NewCompressedKeys,
    find_windows,
    rotate_last,
)
from eqx_decoders.layers.attention.attend import run_attention
from eqx_decoders.layers.attention.indexer import index_scores
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import merge, with_sink
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_lanes
from eqx_decoders.layers.attention.topk import SelectedKeys, map_queries, top_k_mask
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import CachedKV, NewKV, Queries, kv_shape
from eqx_decoders.layers.mask import AttentionPositions, Causal, SlidingWindow, seen_keys, visible
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNorm, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import FROZEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedIndexerConfig(CheckedFields):
    """Configuration of an indexer that selects `top_k` compressed keys for each query.

    The indexer computes separate compressed keys with a separate compressor; scores are those of `IndexerConfig`. The
    selection has no gradient, and this library has no loss that trains the indexer.

    **Arguments:**

    - `num_heads`: indexer heads.
    - `head_dim`: features of the indexer's queries and of its keys, which all its heads share.
    - `top_k`: number of compressed keys that a query attends to.
    """

    num_heads: PositiveInt = 64
    head_dim: PositiveInt = 128
    top_k: PositiveInt = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedAttentionConfig(MixerConfig):
    """Configuration of attention to a sliding window and to compressed keys.

    **Arguments:**

    - `num_heads`: query heads.
    - `head_dim`: features of a query head, and of the single head that is both key and value.
    - `rope_dim`: number of features at the end of a head that rope rotates.
    - `q_rank`: features of the query latent.
    - `out_groups`, `out_rank`: number of output groups of heads, and features to which each group is projected down.
    - `window`: size of the sliding window in tokens.
    - `compression`: compression of the tokens of a window into a key; None: no compressed keys.
    - `indexer`: selects compressed keys for each query; None: all compressed keys.
    - `rope`: rotary embedding of queries, keys and compressed keys.
    - `norm`: normalization of the query latent and of keys. Queries are normalized per head, without a scale.
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    rope_dim: PositiveInt
    q_rank: PositiveInt
    out_groups: PositiveInt
    out_rank: PositiveInt
    window: PositiveInt
    compression: CompressionConfig | None = None
    indexer: CompressedIndexerConfig | None = None
    rope: Rope = Rope(pairing="interleaved")
    norm: NormConfig = RMSNormConfig()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.num_heads % self.out_groups == 0,
            f"CompressedAttentionConfig.num_heads={self.num_heads} must be a multiple of out_groups={self.out_groups}.",
        )
        dims = [self.head_dim] if self.indexer is None else [self.head_dim, self.indexer.head_dim]
        check(
            self.rope_dim % 2 == 0 and self.rope_dim <= min(dims),
            f"CompressedAttentionConfig.rope_dim={self.rope_dim} must be even and at most {min(dims)}, the smallest "
            "head_dim of the attention and of its indexer.",
        )
        check(
            self.indexer is None or self.compression is not None,
            "CompressedAttentionConfig.indexer needs a compression, not compression=None: it selects compressed keys.",
        )
        check(
            self.rope.fixed_length is None,
            f"CompressedAttentionConfig.rope={self.rope} depends on the document length. This is not supported, "
            "as compressed keys are cached with their rotation. Use a rope with fixed frequencies.",
        )

    @property
    def mask(self) -> SlidingWindow:
        """Mask of the attention to uncompressed tokens."""
        return SlidingWindow(self.window)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the caches, by name.

        `"window"`: keys of the sliding window; `"compressed"`: compressed keys; `"index"`: the indexer's compressed
        keys. The last two exist only with a compression and with an indexer.
        """
        shapes: dict[str, Any] = {
            "window": kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.head_dim, values=False)
        }
        if self.compression is not None:
            shapes["compressed"] = _cache_shape(self.compression, max_length, self.head_dim)
            if self.indexer is not None:
                shapes["index"] = _cache_shape(self.compression, max_length, self.indexer.head_dim)
        return shapes

    def token_products(self, length: int) -> int:
        """Return the number of multiplications per token of the scores and of the weighted sum of values.

        The scores include an indexer's. The result is an upper bound, reached by the last token of a document of
        `length` tokens: earlier tokens attend to fewer compressed keys.
        """
        keys = seen_keys(self.mask, length)
        indexer_products = 0
        if self.compression is not None:
            compressed_keys = length // self.compression.size
            if self.indexer is not None:
                indexer_products = self.indexer.num_heads * self.indexer.head_dim * compressed_keys
                compressed_keys = min(compressed_keys, self.indexer.top_k)
            keys += compressed_keys
        return self.num_heads * keys * 2 * self.head_dim + indexer_products

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "CompressedAttention":
        keys = jax.random.split(key, 8)
        heads = self.num_heads
        head_dim = self.head_dim
        group_heads = heads // self.out_groups

        def new_kernel(key, fan, *shape):
            return fan_in(key, shape, jnp.float32, fan, "normal")

        compressor = None
        indexer = None
        if self.compression is not None:
            compressor = self.compression.build(embed_dim, head_dim, key=keys[5])
            if self.indexer is not None:
                query_shape = (self.q_rank, self.indexer.num_heads, self.indexer.head_dim)
                indexer = CompressedIndexer(
                    query=new_kernel(keys[6], self.q_rank, *query_shape),
                    head_weight=new_kernel(keys[7], embed_dim, embed_dim, self.indexer.num_heads),
                    compressor=self.compression.build(
                        embed_dim, self.indexer.head_dim, key=jax.random.fold_in(keys[7], 1)
                    ),
                    config=self.indexer,
                )
        return CompressedAttention(
            query_down=new_kernel(keys[0], embed_dim, embed_dim, self.q_rank),
            query_norm=self.norm.build(self.q_rank),
            query_up=new_kernel(keys[1], self.q_rank, self.q_rank, heads, head_dim),
            key=new_kernel(keys[2], embed_dim, embed_dim, head_dim),
            key_norm=self.norm.build(head_dim),
            out_down=new_kernel(keys[3], group_heads * head_dim, self.out_groups, group_heads, head_dim, self.out_rank),
            out_up=new_kernel(keys[4], self.out_groups * self.out_rank, self.out_groups, self.out_rank, embed_dim),
            sink=jnp.zeros((heads,)),
            compressor=compressor,
            indexer=indexer,
            config=self,
        )


def _cache_shape(compression: CompressionConfig, max_length: int, head_dim: int) -> dict[str, Any]:
    windows = max(1, max_length // compression.size)
    keys = CompressedShape(windows=windows, size=compression.size, head_dim=head_dim)
    return {"tail": compression.state_shape(head_dim), "keys": keys}


class CompressedIndexer(eqx.Module):
    """Indexer that selects compressed keys by the scores `sum_h w_th relu(q_th . k_s)`."""

    query: Float[Array, "q_rank heads head_dim"]
    head_weight: Float[Array, "embed heads"]
    compressor: Compressor
    config: CompressedIndexerConfig = eqx.field(static=True)

    def select(
        self, query: Array, weight: Array, new: NewCompressedKeys, cached: CachedKV | None, ctx: ForwardContext
    ) -> SelectedKeys:
        """Select `top_k` keys for each query among the new and the cached compressed keys together.

        **Arguments:**

        - `query`, `weight`: the indexer's queries and head weights.
        - `new`: the indexer's compressed keys of the windows that the call completes.
        - `cached`: the indexer's compressed keys in the cache; None without a cache.
        """
        top_k = self.config.top_k
        new_keys = new.ends.shape[1]
        slots = 0 if cached is None else cached.positions.shape[1]
        if new_keys + slots <= top_k:
            return SelectedKeys()

        def masked_scores(queries: Any, key: Array, ends: Array, segments: Array | None) -> Array:
            query, weight, positions, query_segments = queries
            seen = visible(Causal(), positions, ends, None if segments is None else query_segments, segments)
            return jnp.where(seen, index_scores(query, weight, key), -jnp.inf)

        def select_tile(queries: Any) -> Array:
            parts = [masked_scores(queries, new.key[:, :, 0], new.ends, new.segments)]
            if cached is not None:
                key = cached.keys(query.dtype)[:, 0].astype(query.dtype)
                parts.append(masked_scores(queries, key, cached.positions, None))
            scores = jnp.concatenate(parts, axis=-1)
            return top_k_mask(scores, top_k) & (scores > -jnp.inf)

        queries = query, weight, ctx.positions, ctx.segment_ids
        if cached is not None:
            selected = select_tile(queries)[:, None]
            return SelectedKeys(new=selected[..., :new_keys], cached=selected[..., new_keys:])
        words = map_queries(lambda tile: pack_lanes(select_tile(tile)), queries, new_keys, self.config.num_heads)
        words = jnp.moveaxis(words, 0, 1)
        return SelectedKeys(Selection(words.reshape(len(words), 1, -1, words.shape[3])[:, :, : query.shape[1]]))


class CompressedKeySet(NamedTuple):
    """Compressed keys to which the tokens of a call attend.

    - `new`: keys of the windows that the call completes.
    - `cached`: keys in the cache; None without a cache.
    - `selected`: the keys that the indexer selected.
    """

    new: NewCompressedKeys
    cached: CachedKV | None
    selected: SelectedKeys


class CompressedAttention(eqx.Module):
    """Attention to a sliding window of tokens and to compressed keys."""

    query_down: Float[Array, "embed q_rank"]
    query_norm: Norm
    query_up: Float[Array, "q_rank heads head_dim"]
    key: Float[Array, "embed head_dim"]
    key_norm: Norm
    out_down: Float[Array, "out_groups group_heads head_dim out_rank"]
    out_up: Float[Array, "out_groups out_rank embed"]
    sink: Float[Array, "heads"]
    compressor: Compressor | None
    indexer: CompressedIndexer | None = eqx.field(metadata=FROZEN)
    config: CompressedAttentionConfig = eqx.field(static=True)

    def branch(
        self, x: Array, ctx: ForwardContext, past: dict[str, Any] | None, key: PRNGKeyArray | None
    ) -> BranchResult:
        """Run the layer in a decoder block, see `BranchLayer`."""
        config = self.config
        query_latent = ctx.einsum("batch length embed, embed q_rank -> batch length q_rank", x, self.query_down)
        query_latent = save(self.query_norm(query_latent), "mla_q")
        query = self._query(query_latent, ctx)
        new_key = self.key_norm(ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key))
        new_key = save(self._rotate(new_key[:, :, None], ctx), "key_proj")
        entries: dict[str, Any] = {"window": NewKV(key=new_key, value=None)}
        compressed = self._compress(x, query_latent, ctx, past, entries)

        def attend_without_cached_window() -> Result:
            results = [self._attend_window(query, new_key, ctx)]
            if compressed is not None:
                results += self._attend_compressed(query, compressed, ctx)
            return merge(results)

        if past is None:
            out = with_sink(*attend_without_cached_window(), self.sink)
        else:
            queries = Queries(query, ctx.positions)
            options = AttentionOptions(mask=config.mask)
            out, entries["window"] = past["window"].attend_with(
                attend_without_cached_window, entries["window"], queries, options, ctx.execution, self.sink
            )
        return BranchResult(self._project_out(out, ctx), entries)

    def _query(self, query_latent: Array, ctx: ForwardContext) -> Float[Array, "batch length heads head_dim"]:
        """Compute scaled queries, normalized per head and rotated."""
        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        norm = RMSNorm(scale=None, config=RMSNormConfig(eps=self.config.norm.eps, scale=False))
        query = self._rotate(norm(ctx.einsum(pattern, query_latent, self.query_up)), ctx) * self.config.head_dim**-0.5
        return save(ctx.constrain(query, "batch length heads head_dim"), "query_proj")

    def _rotate(self, x: Array, ctx: ForwardContext, back: bool = False) -> Array:
        rope = self.config.rope
        rope = dataclasses.replace(rope, reverse=not rope.reverse) if back else rope
        return rotate_last(x, ctx.positions, rope, self.config.rope_dim)

    def _compress(
        self, x: Array, query_latent: Array, ctx: ForwardContext, past: dict[str, Any] | None, entries: dict[str, Any]
    ) -> CompressedKeySet | None:
        """Compress the windows that the call completes, and select among new and cached compressed keys.

        Adds the new keys and states to `entries`, for the cache. Returns None if there is no compression.
        """
        config = self.config
        if self.compressor is None or config.compression is None:
            return None
        compression = config.compression
        windows = find_windows(compression, ctx, past is not None)

        def compress(name: str, compressor: Compressor) -> tuple[NewCompressedKeys, CachedKV | None]:
            cache = None if past is None else past[name]
            state = None if cache is None else cache["tail"]
            new = compressor(x, state, windows, config.rope, config.rope_dim, ctx)
            entries[name] = {"tail": new.state, "keys": NewWindows(new.key, windows.last)}
            return new, None if cache is None else at_ends(cache["keys"], compression.size, x.dtype)

        new, cached = compress("compressed", self.compressor)
        if self.indexer is None:
            return CompressedKeySet(new, cached, SelectedKeys())
        x, query_latent = jax.lax.stop_gradient((x, query_latent))
        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        query = self._rotate(ctx.einsum(pattern, query_latent, self.indexer.query), ctx)
        upcast_x = x.astype(np.promote_types(x.dtype, np.float32))
        pattern = "batch length embed, embed heads -> batch length heads"
        with jax.default_matmul_precision("highest"):  # rounding could change the selection, and there are few columns
            weight = ctx.einsum(pattern, upcast_x, self.indexer.head_weight)
        indexer_config = self.indexer.config
        weight = weight.astype(jnp.float32) * (indexer_config.num_heads * indexer_config.head_dim) ** -0.5
        new_index, cached_index = compress("index", self.indexer.compressor)
        return CompressedKeySet(new, cached, self.indexer.select(query, weight, new_index, cached_index, ctx))

    def _attend_window(self, query: Array, key: Array, ctx: ForwardContext) -> Result:
        aligned = ctx.execution.context_order == "plain"
        options = AttentionOptions(
            mask=self.config.mask, aligned=aligned, dense_positions=ctx.dense_positions and aligned
        )
        positions = AttentionPositions(ctx.positions, ctx.positions, ctx.segment_ids, ctx.segment_ids)
        inputs = AttentionInputs(query, key, key, positions)
        return run_attention(inputs, options, ctx.execution, contiguous=ctx.documents_are_contiguous)

    def _attend_compressed(self, query: Array, keys: CompressedKeySet, ctx: ForwardContext) -> list[Result]:
        """Return the results of attention to new compressed keys and to cached compressed keys, if there are any."""
        new, cached, selected = keys
        options = AttentionOptions(mask=Causal())
        results = []
        if new.key.shape[1] > 0:
            segments = None if new.segments is None else ctx.segment_ids
            positions = AttentionPositions(ctx.positions, new.ends, segments, new.segments)
            inputs = AttentionInputs(query, new.key, new.key, positions, selected.new)
            results.append(run_attention(inputs, options, ctx.execution, key_axis="slots"))
        if cached is not None:
            queries = Queries(query, ctx.positions, selected=selected.cached)
            results.append(cached.attend(queries, options, ctx.execution))
        return results

    def _project_out(self, out: Array, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        """Rotate the outputs of all heads back by the query positions, and apply the output projection."""
        out = self._rotate(out, ctx, back=True)
        out = save(ctx.constrain(out, "batch length heads head_dim"), "attention_out")
        grouped = out.reshape(*out.shape[:2], self.config.out_groups, -1, out.shape[3])
        pattern = (
            "batch length out_groups group_heads head_dim, out_groups group_heads head_dim out_rank "
            "-> batch length out_groups out_rank"
        )
        low = ctx.einsum(pattern, grouped, self.out_down)
        out = ctx.einsum(
            "batch length out_groups out_rank, out_groups out_rank embed -> batch length embed", low, self.out_up
        )
        return save(ctx.constrain(out, "batch length embed"), "out_proj")
