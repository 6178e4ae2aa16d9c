"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): keys and values are up-projections of one latent per token.

    c = norm(W_c x),  r = rotate(W_r x);  per head: k = [W_k c | r],  v = W_v c,  softmax(scale * q k^T + mask) v

The cache stores [c | r], and the indexer's key if there is an indexer. With a cache, attention runs in the absorbed
form: since q k^T = [W_k^T q_nope | q_rope] [c | r]^T, all heads attend to the single key [c | r], compute a weighted
sum of latents, and W_v maps this sum to values. Cached latents are never expanded to keys and values.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, PositiveInt, check, check_option
from eqx_decoders.layers.attention.attend import run_attention
from eqx_decoders.layers.attention.indexer import Indexer, IndexerConfig, IndexerOutput, TeacherAttention
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import run_max_scores
from eqx_decoders.layers.attention.kernels.selection import Selected
from eqx_decoders.layers.attention.topk import SelectedKeys
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, Queries, kv_shape
from eqx_decoders.layers.mask import AttentionPositions, Causal, Mask, seen_keys
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair, add_bias, as_weight
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.chips import LANES


LatentPast = Past | dict[str, Past]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(MixerConfig):
    """Configuration of multi-head latent attention.

    **Arguments:**

    - `num_heads`: heads of queries, keys and values.
    - `q_rank`: features of the query latent; None: queries are projected from `x` directly.
    - `kv_rank`: features of the key/value latent.
    - `nope_dim`, `rope_dim`: features of a head's query and key without and with rotary embedding, in this order. All
        heads share the rotary part of the key.
    - `value_dim`: features of a head's value.
    - `mask`: which keys a query sees.
    - `rope`: rotary embedding of the `rope_dim` features; None: they are not rotated (Kimi Linear).
    - `query_scale`: multiplies queries; None for `(nope_dim + rope_dim) ** -0.5 * rope.score_scale`.
    - `norm`: normalization of both latents; the shared rotary key is not normalized.
    - `kv_scale`: multiplies the normalized key/value latent (LongCat-Flash).
    - `bias`: whether the down-projections and the output projection have biases.
    - `indexer`: selects a subset of the visible keys for each query; None: all visible keys.
    """

    num_heads: PositiveInt
    q_rank: PositiveInt | None
    kv_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    mask: Mask = Causal()
    rope: Rope | None = Rope()
    query_scale: PositiveFloat | None = None
    norm: NormConfig = RMSNormConfig()
    kv_scale: PositiveFloat = 1.0
    bias: bool = False
    indexer: IndexerConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.rope is not None:
            check(self.rope_dim % 2 == 0, f"LatentAttentionConfig.rope_dim={self.rope_dim} must be even.")
            self.rope.rotated(self.rope_dim)
        if self.indexer is not None:
            check(
                self.rope is not None,
                "LatentAttentionConfig.indexer needs rope, not rope=None: the indexer's queries and keys are rotated.",
            )
            check(
                isinstance(self.mask, Causal),
                f"LatentAttentionConfig.indexer needs mask=Causal(), not {self.mask}: an indexer does not support "
                "rolling (windowed) caches.",
            )
            check(
                self.q_rank is not None,
                "LatentAttentionConfig.indexer needs q_rank, not q_rank=None: the indexer reads the query latent.",
            )
            check(
                self.indexer.head_dim >= self.rope_dim,
                f"LatentAttentionConfig.indexer.head_dim={self.indexer.head_dim} must be at least "
                f"rope_dim={self.rope_dim}, the number of its features that rope rotates.",
            )

    @property
    def head_dim(self) -> int:
        """Features of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def scale(self) -> float:
        """Factor of queries."""
        if self.query_scale is not None:
            return self.query_scale
        return self.head_dim**-0.5 * (1.0 if self.rope is None else self.rope.score_scale)

    @property
    def latent_dim(self) -> int:
        """Features of a token's key/value latent and rotary key together."""
        return self.kv_rank + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Features per token in the cache: `latent_dim`, padded to a multiple of LANES if it is at least LANES.

        A TPU can write tokens in place into a cache with a multiple of LANES features. With 576 features XLA chooses
        another layout, and each write would copy the complete cache.
        """
        return self.latent_dim if self.latent_dim < LANES else -(-self.latent_dim // LANES) * LANES

    @property
    def chooses(self) -> bool:
        """Whether the layer has an indexer, instead of reusing the selection of an earlier layer or having none."""
        return self.indexer is not None and self.indexer.shared_from is None

    @property
    def depends_on_token_order(self) -> bool:
        return False

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape]:
        """Return the shape of the cache: latents and rotary keys as one key head, without values.

        With an indexer the result is a dict: `"latents"`, and `"index"` for the indexer's keys.
        """
        latents = kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.cached_dim, values=False)
        if self.indexer is None:
            return latents
        latents = dataclasses.replace(latents, by_slot=True)
        if not self.chooses:
            return latents
        index = kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.indexer.head_dim, values=False)
        return {"latents": latents, "index": index}

    @property
    def shares_as(self) -> str | None:
        """Name by which later layers use the keys that the indexer selects."""
        return None if self.indexer is None else self.indexer.shares_as

    @property
    def shared_from(self) -> str | None:
        """Name of the selected keys of an earlier layer that this layer uses."""
        return None if self.indexer is None else self.indexer.shared_from

    def token_products(self, length: int) -> int:
        """Count multiplications per token of the scores (also an indexer's) and of the weighted sum of values.

        `length`: number of tokens of the document.
        """
        visible_keys = seen_keys(self.mask, length)
        if self.indexer is None:
            return self.num_heads * visible_keys * (self.head_dim + self.value_dim)
        selected_keys = visible_keys if self.indexer.warmup else min(visible_keys, self.indexer.top_k)
        attention_products = self.num_heads * selected_keys * (self.head_dim + self.value_dim)
        return attention_products + self.indexer.token_products(visible_keys)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LatentAttention":
        keys = jax.random.split(key, 5)
        heads = self.num_heads
        q_rank = self.q_rank

        def new_kernel(key, fan, *shape):
            return fan_in(key, shape, jnp.float32, fan, "normal")

        def new_bias(size):
            return jnp.zeros((size,)) if self.bias and size else None

        return LatentAttention(
            query=None if q_rank else new_kernel(keys[0], embed_dim, embed_dim, heads, self.head_dim),
            query_down=new_kernel(keys[0], embed_dim, embed_dim, q_rank) if q_rank else None,
            query_norm=self.norm.build(q_rank) if q_rank else None,
            query_up=new_kernel(keys[1], q_rank, q_rank, heads, self.head_dim) if q_rank else None,
            kv_down=new_kernel(keys[2], embed_dim, embed_dim, self.latent_dim),
            kv_norm=self.norm.build(self.kv_rank),
            kv_up=new_kernel(keys[3], self.kv_rank, self.kv_rank, heads, self.nope_dim + self.value_dim),
            out=new_kernel(keys[4], heads * self.value_dim, heads, self.value_dim, embed_dim),
            query_down_bias=new_bias(q_rank),
            kv_down_bias=new_bias(self.latent_dim),
            out_bias=new_bias(embed_dim),
            indexer=self._build_indexer(embed_dim, jax.random.fold_in(key, 5)),
            config=self,
        )

    def _build_indexer(self, embed_dim: int, key: PRNGKeyArray) -> Indexer | None:
        if self.indexer is None or self.q_rank is None or not self.chooses:
            return None
        return self.indexer.build(embed_dim, self.q_rank, key=key)


class LatentAttention(eqx.Module):
    """Multi-head latent attention; `kv_up` maps the latent to `[key without rope | value]` of each head.

    Queries are `query x`, or with a query latent `query_up norm(query_down x)`.
    """

    query: Float[Array, "embed heads qk_dim"] | None
    query_down: Float[Array, "embed q_rank"] | None
    query_norm: Norm | None
    query_up: Float[Array, "q_rank heads qk_dim"] | None
    kv_down: Float[Array, "embed latent"]
    kv_norm: Norm
    kv_up: Float[Array, "kv_rank heads kv_dim"]
    out: Float[Array, "heads value_dim embed"]
    query_down_bias: Float[Array, "q_rank"] | None
    kv_down_bias: Float[Array, "latent"] | None
    out_bias: Float[Array, "embed"] | None
    indexer: Indexer | None
    config: LatentAttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: LatentPast | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the layer's output, and the new latents and rotary keys to be written to the cache.

        `past`: cached latents and rotary keys; None without a cache.
        """
        result = self.branch(x, ctx, past, None)
        return result.out, result.entries

    def branch(self, x: Array, ctx: ForwardContext, past: LatentPast | None, key: PRNGKeyArray | None) -> BranchResult:
        """Run the layer in a block; see `BranchLayer`.

        Without a cache attention runs in the expanded form, with a cache in the absorbed form.
        """
        config = self.config
        query_input = self._query_input(x, ctx)
        query = self._query(query_input, ctx)
        latent = self._latent(x, ctx)
        stats = {}
        selected = self._reused_selection(ctx)
        indexer_output = None
        if self.indexer is not None and config.rope is not None:
            indexer_output = self.indexer(x, query_input, config.rope, config.rope_dim, ctx)
        if isinstance(past, dict):
            assert self.indexer is not None and indexer_output is not None
            cache = past["index"].whole().dequantize_scale_blocks(query.dtype)
            selected = self.indexer.select_cached(
                indexer_output, cache.key, cache.key_scale, cache.positions, config.mask, ctx
            )
            past = past["latents"]
        entries: Any = NewKV(key=latent, value=None)
        if past is None:
            mixed, selected, stats = self._attend_expanded(query, latent, ctx, indexer_output, selected)
        else:
            mixed, entries = self._attend_absorbed(query, entries, past, ctx, selected)
        entries = entries if indexer_output is None else {"latents": entries, "index": NewKV(indexer_output.key, None)}
        mixed = save(ctx.constrain(mixed, "batch length heads value_dim"), "attention_out")
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", mixed, self.out)
        out = save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj")
        shares = config.indexer is not None and config.indexer.shares_as is not None
        return BranchResult(out, entries, stats, selected if shares else None)

    def _reused_selection(self, ctx: ForwardContext) -> SelectedKeys:
        """Return the selection of the earlier layer named by `IndexerConfig.shared_from`; all keys if it is None."""
        name = None if self.config.indexer is None else self.config.indexer.shared_from
        return (
            SelectedKeys() if name is None else ctx.shared[check_option("IndexerConfig.shared_from", name, ctx.shared)]
        )

    def _query_input(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length features"]:
        """Return the input of the query projection: the query latent, or `x` without one."""
        if self.query_down is None or self.query_norm is None:
            return x
        latent = ctx.einsum("batch length embed, embed q_rank -> batch length q_rank", x, self.query_down)
        latent = save(add_bias(latent, self.query_down_bias), "query_wa_proj")
        return save(self.query_norm(latent), "mla_q")

    def _query(self, query_input: Array, ctx: ForwardContext) -> Float[Array, "batch length heads qk_dim"]:
        """Compute scaled queries, `[nope | rope]`."""
        config = self.config
        if self.query is not None:
            pattern = "batch length embed, embed heads qk_dim -> batch length heads qk_dim"
            query = ctx.einsum(pattern, query_input, self.query)
        else:
            assert self.query_up is not None
            pattern = "batch length q_rank, q_rank heads qk_dim -> batch length heads qk_dim"
            query = ctx.einsum(pattern, query_input, self.query_up)
        nope, rope = jnp.split(query, [config.nope_dim], axis=-1)
        query = jnp.concatenate([nope, self._rotate(rope, ctx)], axis=-1)
        query = query * config.scale
        return save(ctx.constrain(query, "batch length heads qk_dim"), "query_proj")

    def _latent(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length 1 cached"]:
        """Compute the vector of each token that is cached: `[normalized latent | rotated key | zeros]`, as one head."""
        down = ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.kv_down)
        down = save(add_bias(down, self.kv_down_bias), "kv_wa_proj")
        latent, rope = jnp.split(down[:, :, None], [self.config.kv_rank], axis=-1)
        latent = self.kv_norm(latent)
        latent = save(latent if self.config.kv_scale == 1.0 else latent * self.config.kv_scale, "mla_kv")
        return self._pad_to_cache(latent, self._rotate(rope, ctx), ctx)

    def _rotate(self, x: Array, ctx: ForwardContext) -> Array:
        return x if self.config.rope is None else rotate(x, ctx.positions, self.config.rope, ctx.segment_ids)

    def _attend_expanded(
        self,
        query: Array,
        latent: Array,
        ctx: ForwardContext,
        indexer_output: IndexerOutput | None,
        selected: SelectedKeys,
    ) -> tuple[Float[Array, "batch length heads value_dim"], SelectedKeys, dict[str, Any]]:
        """Attend with the keys and values of every head, which takes the fewest operations for many queries.

        Returns the heads' outputs, the selection that was used (of the layer's indexer, else `selected`), and
        statistics.
        """
        config = self.config
        latent, rope, _ = jnp.split(latent, [config.kv_rank, config.latent_dim], axis=-1)
        pattern = "batch length kv_rank, kv_rank heads kv_dim -> batch length heads kv_dim"
        nope, value = jnp.split(ctx.einsum(pattern, latent[:, :, 0], self.kv_up), [config.nope_dim], axis=-1)
        key = jnp.concatenate([nope, jnp.broadcast_to(rope, (*nope.shape[:3], config.rope_dim))], axis=-1)
        key = save(ctx.constrain(key, "batch length heads qk_dim"), "key_proj")
        value = save(ctx.constrain(value, "batch length heads value_dim"), "value_proj")
        new_selected: Any = selected.new
        stats: dict[str, Any] = {}
        if self.indexer is not None and indexer_output is not None:
            teacher = TeacherAttention(query, key) if self.indexer.config.loss_weight > 0 else None
            new_selected, indexer_stats = self.indexer.select(indexer_output, config.mask, ctx, teacher)
            stats = {} if indexer_stats is None else {"indexer": indexer_stats}
        if ctx.execution.attention_maxima:
            options = AttentionOptions(
                mask=config.mask, aligned=_is_aligned(ctx), platform=ctx.execution.layout.platform
            )
            scores = run_max_scores(_call_inputs(query, key, value, ctx, new_selected), options)
            stats["max_scores"] = jnp.max(scores, axis=0)
        out, _ = self._attend(query, key, value, ctx, new_selected, needs_lse=False)
        return out, SelectedKeys(new=new_selected), stats

    def _attend_absorbed(
        self, query: Array, latents: NewKV, past: Past, ctx: ForwardContext, selected: SelectedKeys
    ) -> tuple[Float[Array, "batch length heads value_dim"], Any]:
        """Attend to the cache and to the tokens of the call in latent space, and return values and new latents.

        The full keys `[c | r]` also serve as values, and the rotary part of the result is dropped: slicing the cache
        would copy it (34 MB instead of 118 MB of temporaries in a decoding step of DeepSeek-V3 on TPU v5p). The tokens
        of the call use the absorbed form, too: the expanded form would read `kv_up` a second time, which makes a
        decoding step 3 % slower, though a chunk of 512 tokens 6 % faster.
        """
        config = self.config
        nope, rope = jnp.split(query, [config.nope_dim], axis=-1)
        query = self._pad_to_cache(_queries_to_latents(nope, self.kv_up, ctx), rope, ctx)
        queries = Queries(query, ctx.positions, selected=selected.cached, slots=selected.cached_slots)

        def attend_to_call() -> Result:
            return self._attend(query, latents.key, latents.key, ctx, selected.new)

        options = AttentionOptions(mask=config.mask)
        mixed, entries = past.attend_with(attend_to_call, latents, queries, options, ctx.execution)
        return _latents_to_values(mixed[..., : config.kv_rank], self.kv_up, config.nope_dim, ctx), entries

    def _pad_to_cache(
        self, latent: Array, rope: Array, ctx: ForwardContext
    ) -> Float[Array, "batch length heads cached"]:
        """Concatenate latent and rotary part, and pad them with zeros to `cached_dim` features."""
        zeros = jnp.zeros((*rope.shape[:-1], self.config.cached_dim - self.config.latent_dim), rope.dtype)
        return ctx.constrain(jnp.concatenate([latent, rope, zeros], axis=-1), "batch length heads latent")

    def _attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        ctx: ForwardContext,
        selected: Selected | None = None,
        needs_lse: bool = True,
    ) -> Result:
        """Attend to the tokens of this call."""
        aligned = _is_aligned(ctx)
        dense = ctx.dense_positions and aligned
        options = AttentionOptions(mask=self.config.mask, aligned=aligned, dense_positions=dense, needs_lse=needs_lse)
        inputs = _call_inputs(query, key, value, ctx, selected)
        return run_attention(inputs, options, ctx.execution, contiguous=ctx.documents_are_contiguous)


def _is_aligned(ctx: ForwardContext) -> bool:
    """Return whether the tokens of a document are in the order of their positions."""
    return ctx.execution.context_order == "plain"


def _call_inputs(
    query: Array, key: Array, value: Array, ctx: ForwardContext, selected: Selected | None
) -> AttentionInputs:
    """Return the inputs of attention among the tokens of a call."""
    positions = AttentionPositions(ctx.positions, ctx.positions, ctx.segment_ids, ctx.segment_ids)
    return AttentionInputs(query, key, value, positions, selected)


# The absorbed form contracts the two halves of `kv_up` (W_k and W_v) with queries and with weighted sums of latents,
# head by head. A LoRA update of `kv_up` is lora_a (kv_rank x rank) times lora_b (rank x heads x features). W_k is
# applied transposed, so `_queries_to_latents` multiplies by lora_b first, and `_latents_to_values` by lora_a first.


def _queries_to_latents(
    query: Array, kv_up: Array | AbstractWeight, ctx: ForwardContext
) -> Float[Array, "batch length heads kv_rank"]:
    """Compute `W_k^T q`."""
    pattern = "batch length heads nope, kv_rank heads nope -> batch length heads kv_rank"
    key_part = slice(query.shape[-1])
    base, pair = as_weight(kv_up).base_and_pair()
    if pair is not None and pair.factor is not None:
        query = _scale_columns(query, pair.factor[..., key_part])
    out = ctx.einsum(pattern, query, as_weight(base).array(0)[..., key_part])
    if pair is None:
        return out
    batch = _batch_axis(pair)
    down = f"batch length heads nope, {batch}rank heads nope -> batch length heads rank"
    low = pair.scale * ctx.einsum(down, query, pair.lora_b[..., key_part])
    up = f"batch length heads rank, {batch}kv_rank rank -> batch length heads kv_rank"
    return out + ctx.einsum(up, low, pair.lora_a)


def _latents_to_values(
    mixed: Array, kv_up: Array | AbstractWeight, nope_dim: int, ctx: ForwardContext
) -> Float[Array, "batch length heads value_dim"]:
    """Compute `W_v c` of weighted sums of latents."""
    pattern = "batch length heads kv_rank, kv_rank heads value_dim -> batch length heads value_dim"
    base, pair = as_weight(kv_up).base_and_pair()
    out = ctx.einsum(pattern, mixed, as_weight(base).array(0)[..., nope_dim:])
    if pair is None:
        return out
    batch = _batch_axis(pair)
    down = f"batch length heads kv_rank, {batch}kv_rank rank -> batch length heads rank"
    low = pair.scale * ctx.einsum(down, mixed, pair.lora_a)
    up = f"batch length heads rank, {batch}rank heads value_dim -> batch length heads value_dim"
    out = out + ctx.einsum(up, low, pair.lora_b[..., nope_dim:])
    return out if pair.factor is None else _scale_columns(out, pair.factor[..., nope_dim:])


def _batch_axis(pair: LowRankPair) -> str:
    """Return the leading axis of the factors in an einsum pattern: `"batch "` with one adapter per sequence."""
    return "batch " if pair.lora_a.ndim == 3 else ""


def _scale_columns(x: Float[Array, "batch length heads features"], factor: Array) -> Array:
    """Multiply by factors `[heads, features]` or `[batch, heads, features]`."""
    return (x * factor.reshape(-1, 1, *factor.shape[-2:])).astype(x.dtype)
