"""Attention to a window of tokens and to compressed keys of all that came before (DeepSeek-V4, 2026).

One head is key and value for all heads of queries; the result of each is rotated back by its position, so that it
depends on distances alone. Compressed keys stand for complete windows of tokens: few that all are attended to, or more
of which an indexer chooses some. Heads are projected to the stream in groups, each by a matrix of low rank.
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
from eqx_decoders.layers.attention.compression import (
    Compressed,
    CompressionConfig,
    Compressor,
    find_windows,
    rotate_last,
)  # fmt: skip
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.indexer import index_scores
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import merge, with_sink
from eqx_decoders.layers.attention.kernels.selection import Selection, pack_lanes
from eqx_decoders.layers.attention.topk import KeyChoice, map_queries, top_k_mask
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.compressed_keys import CompressedShape, NewWindows, at_ends
from eqx_decoders.layers.cache.kv_cache import CachedKV, NewKV, Queries, kv_shape
from eqx_decoders.layers.mask import AttentionPositions, Causal, SlidingWindow, seen_keys, visible
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNorm, RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import FROZEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedIndexerConfig(CheckedFields):
    """Configuration of an indexer that chooses `top_k` compressed keys for each query, by compressed keys of its own.

    Its score is that of `IndexerConfig`. The choice has no gradient, and no loss teaches it here.

    **Arguments:**

    - `num_heads`, `head_dim`: its heads, and the features of their queries and of the keys that they share.
    - `top_k`: compressed keys that a query attends to.
    """

    num_heads: PositiveInt = 64
    head_dim: PositiveInt = 128
    top_k: PositiveInt = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedAttentionConfig(MixerConfig):
    """Configuration of attention to a window and to compressed keys.

    **Arguments:**

    - `num_heads`, `head_dim`: query heads, and features of each and of the one head that is key and value.
    - `rope_dim`: the last features of a head, which are rotated.
    - `q_rank`: features of the latent that queries are made from.
    - `out_groups`, `out_rank`: groups of heads, and the features to which the results of each are projected.
    - `window`: the last tokens, which all queries see.
    - `compression`: of the tokens of windows into keys; None: there are none.
    - `indexer`: chooses compressed keys; None takes all.
    - `rope`: rotary embedding of queries, keys and compressed keys.
    - `norm`: of the latent and of the key; queries are normalized by head, without a scale.
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
        rule = f"must be a multiple of out_groups={self.out_groups}"
        check(self.num_heads % self.out_groups == 0, f"CompressedAttentionConfig.num_heads={self.num_heads} {rule}.")
        dims = [self.head_dim] if self.indexer is None else [self.head_dim, self.indexer.head_dim]
        rule = f"must be even and at most {min(dims)}, the features of a head"
        fits = self.rope_dim % 2 == 0 and self.rope_dim <= min(dims)
        check(fits, f"CompressedAttentionConfig.rope_dim={self.rope_dim} {rule}.")
        rule = "CompressedAttentionConfig.indexer needs a compression: it chooses compressed keys"
        check(self.indexer is None or self.compression is not None, f"{rule}.")
        rule = "CompressedAttentionConfig.rope must not depend on a text's length: keys of windows keep their rotation"
        check(self.rope.fixed_length is None, f"{rule}.")

    @property
    def mask(self) -> SlidingWindow:
        """Mask of single tokens."""
        return SlidingWindow(self.window)

    def cache_shape(self, max_length: int) -> dict[str, Any]:
        """Return the shapes of the cache: a window of keys, and compressed keys, those of an indexer too."""
        shapes: dict[str, Any] = {
            "window": kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.head_dim, values=False)
        }
        if self.compression is not None:
            shapes["compressed"] = _cache_shape(self.compression, max_length, self.head_dim)
            if self.indexer is not None:
                shapes["index"] = _cache_shape(self.compression, max_length, self.indexer.head_dim)
        return shapes

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores, an indexer's too, and of their products with values."""
        keys, scores = seen_keys(self.mask, length), 0
        if self.compression is not None:
            windows = length // self.compression.size
            if self.indexer is not None:
                scores = self.indexer.num_heads * self.indexer.head_dim * windows
                windows = min(windows, self.indexer.top_k)
            keys += windows
        return self.num_heads * keys * 2 * self.head_dim + scores

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "CompressedAttention":
        keys, heads, head_dim = jax.random.split(key, 8), self.num_heads, self.head_dim
        group = heads // self.out_groups

        def new(number, fan, *shape):
            return fan_in(keys[number], shape, jnp.float32, fan, "normal")

        compressor, indexer = None, None
        if self.compression is not None:
            compressor = self.compression.build(embed_dim, head_dim, key=keys[5])
            if self.indexer is not None:
                indexer = CompressedIndexer(
                    query=new(6, self.q_rank, self.q_rank, self.indexer.num_heads, self.indexer.head_dim),
                    head_weight=new(7, embed_dim, embed_dim, self.indexer.num_heads),
                    compressor=self.compression.build(
                        embed_dim, self.indexer.head_dim, key=jax.random.fold_in(keys[7], 1)
                    ),
                    config=self.indexer,
                )
        return CompressedAttention(
            query_down=new(0, embed_dim, embed_dim, self.q_rank),
            query_norm=self.norm.build(self.q_rank),
            query_up=new(1, self.q_rank, self.q_rank, heads, head_dim),
            key=new(2, embed_dim, embed_dim, head_dim),
            key_norm=self.norm.build(head_dim),
            out_down=new(3, group * head_dim, self.out_groups, group, head_dim, self.out_rank),
            out_up=new(4, self.out_groups * self.out_rank, self.out_groups, self.out_rank, embed_dim),
            sink=jnp.zeros((heads,)),
            compressor=compressor,
            indexer=indexer,
            config=self,
        )


def _cache_shape(compression: CompressionConfig, max_length: int, head_dim: int) -> dict[str, Any]:
    windows = max(1, max_length // compression.size)
    keys = CompressedShape(windows=windows, size=compression.size, head_dim=head_dim)
    return {"tail": compression.tail_shape(head_dim), "keys": keys}


class CompressedIndexer(eqx.Module):
    """Indexer of compressed keys: scores `sum_h w_th relu(q_th . k_s)`."""

    query: Float[Array, "q_rank heads head_dim"]
    head_weight: Float[Array, "embed heads"]
    compressor: Compressor
    config: CompressedIndexerConfig = eqx.field(static=True)

    def choose(
        self, query: Array, weight: Array, own: Compressed, past: CachedKV | None, ctx: ForwardContext
    ) -> KeyChoice:
        """Choose among the windows of the call and of the cache together, by the indexer's keys of both."""
        top_k, places = self.config.top_k, own.ends.shape[1]
        slots = 0 if past is None else past.positions.shape[1]
        if places + slots <= top_k:
            return KeyChoice()

        def scored(queries: Any, key: Array, ends: Array, segments: Array | None) -> Array:
            query, weight, positions, query_segments = queries
            seen = visible(Causal(), positions, ends, None if segments is None else query_segments, segments)
            return jnp.where(seen, index_scores(query, weight, key), -jnp.inf)

        def best(queries: Any) -> Array:
            parts = [scored(queries, own.key[:, :, 0], own.ends, own.segments)]
            if past is not None:
                key = past.keys(query.dtype)[:, 0].astype(query.dtype)
                parts.append(scored(queries, key, past.positions, None))
            scores = jnp.concatenate(parts, axis=-1)
            return top_k_mask(scores, top_k) & (scores > -jnp.inf)

        queries = query, weight, ctx.positions, ctx.segment_ids
        if past is not None:
            chosen = best(queries)[:, None]
            return KeyChoice(present=chosen[..., :places], past=chosen[..., places:])
        words = map_queries(lambda some: pack_lanes(best(some)), queries, places, self.config.num_heads)
        words = jnp.moveaxis(words, 0, 1)
        return KeyChoice(Selection(words.reshape(len(words), 1, -1, words.shape[3])[:, :, : query.shape[1]]))


class CompressedParts(NamedTuple):
    """Compressed keys of a call and of a cache, and which of them are attended to."""

    own: Compressed
    past: CachedKV | None
    choice: KeyChoice


class CompressedAttention(eqx.Module):
    """Attention to a window of tokens and to compressed keys."""

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
        """Call the layer for a block: return the output and new entries for a cache."""
        config = self.config
        low = ctx.einsum("batch length embed, embed q_rank -> batch length q_rank", x, self.query_down)
        low = save(self.query_norm(low), "mla_q")
        query = self._query(low, ctx)
        own = self.key_norm(ctx.einsum("batch length embed, embed head_dim -> batch length head_dim", x, self.key))
        own = save(self._rotated(own[:, :, None], ctx), "key_proj")
        entries: dict[str, Any] = {"window": NewKV(key=own, value=None)}
        parts = self._compressed(x, low, ctx, past, entries)

        def present() -> Result:
            results = [self._attend_window(query, own, ctx)]
            return merge(results + ([] if parts is None else self._attend_compressed(query, parts, ctx)))

        if past is None:
            out = with_sink(*present(), self.sink)
        else:
            queries, options = Queries(query, ctx.positions), AttentionOptions(mask=config.mask)
            window = past["window"].attend_with(present, entries["window"], queries, options, ctx.execution, self.sink)
            out, entries["window"] = window
        return BranchResult(self._project_out(out, ctx), entries)

    def _query(self, low: Array, ctx: ForwardContext) -> Float[Array, "batch length heads head_dim"]:
        """Compute scaled queries, each head normalized and rotated."""
        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        norm = RMSNorm(scale=None, config=RMSNormConfig(eps=self.config.norm.eps, scale=False))
        query = self._rotated(norm(ctx.einsum(pattern, low, self.query_up)), ctx) * self.config.head_dim**-0.5
        return save(ctx.constrain(query, "batch length heads head_dim"), "query_proj")

    def _rotated(self, x: Array, ctx: ForwardContext, back: bool = False) -> Array:
        rope = self.config.rope
        rope = dataclasses.replace(rope, reverse=not rope.reverse) if back else rope
        return rotate_last(x, ctx.positions, rope, self.config.rope_dim)

    def _compressed(
        self, x: Array, low: Array, ctx: ForwardContext, past: dict[str, Any] | None, entries: dict[str, Any]
    ) -> CompressedParts | None:
        """Compress the windows that end in the call, and choose among those and the cached ones."""
        config = self.config
        if self.compressor is None or config.compression is None:
            return None
        compression = config.compression
        windows = find_windows(compression, ctx, past is not None)

        def compressed(name: str, compressor: Compressor) -> tuple[Compressed, CachedKV | None]:
            part = None if past is None else past[name]
            tail = None if part is None else part["tail"]
            own = compressor(x, tail, windows, config.rope, config.rope_dim, ctx)
            entries[name] = {"tail": own.tail, "keys": NewWindows(own.key, windows.last)}
            return own, None if part is None else at_ends(part["keys"], compression.size, x.dtype)

        own, cached = compressed("compressed", self.compressor)
        if self.indexer is None:
            return CompressedParts(own, cached, KeyChoice())
        x, low = jax.lax.stop_gradient((x, low))
        pattern = "batch length q_rank, q_rank heads head_dim -> batch length heads head_dim"
        query = self._rotated(ctx.einsum(pattern, low, self.indexer.query), ctx)
        wide = x.astype(np.promote_types(x.dtype, np.float32))
        with jax.default_matmul_precision("highest"):  # few columns, and they decide
            weight = ctx.einsum("batch length embed, embed heads -> batch length heads", wide, self.indexer.head_weight)
        index = self.indexer.config
        weight = weight.astype(jnp.float32) * (index.num_heads * index.head_dim) ** -0.5
        index_own, index_cached = compressed("index", self.indexer.compressor)
        return CompressedParts(own, cached, self.indexer.choose(query, weight, index_own, index_cached, ctx))

    def _attend_window(self, query: Array, key: Array, ctx: ForwardContext) -> Result:
        aligned = ctx.execution.context_order == "plain"
        options = AttentionOptions(
            mask=self.config.mask, aligned=aligned, dense_positions=ctx.dense_positions and aligned
        )
        positions = AttentionPositions(ctx.positions, ctx.positions, ctx.segment_ids, ctx.segment_ids)
        inputs = AttentionInputs(query, key, key, positions)
        return attend_on_mesh(inputs, options, ctx.execution, contiguous=ctx.contiguous)

    def _attend_compressed(self, query: Array, parts: CompressedParts, ctx: ForwardContext) -> list[Result]:
        """Attend to the compressed keys of the call, and to those of the cache."""
        own, past, choice = parts
        options, results = AttentionOptions(mask=Causal()), []
        if own.key.shape[1] > 0:
            segments = None if own.segments is None else ctx.segment_ids
            positions = AttentionPositions(ctx.positions, own.ends, segments, own.segments)
            inputs = AttentionInputs(query, own.key, own.key, positions, choice.present)
            results.append(attend_on_mesh(inputs, options, ctx.execution, key_axis="slots"))
        if past is not None:
            queries = Queries(query, ctx.positions, selected=choice.past)
            results.append(past.attend(queries, options, ctx.execution))
        return results

    def _project_out(self, out: Array, ctx: ForwardContext) -> Float[Array, "batch length embed"]:
        """Rotate the results of all heads back, and project them in groups."""
        out = self._rotated(out, ctx, back=True)
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
