"""Multi-head latent attention (DeepSeek-V2, 2024): all keys and values of a token come from one short vector.

    c = norm(W_c x),  r = rotate(W_r x);  per head: k = [W_k c | r],  v = W_v c,  softmax(scale * q k^T + mask) v

Only [c | r] is cached, and an indexer's key, if there is one. Over a cache attention runs in the absorbed form: as
q k^T = [W_k^T q_nope | q_rope] [c | r]^T, all heads share the one key [c | r], mix latents, and W_v turns the mixture
into values. It never expands the cached latents.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import PositiveFloat, PositiveInt, check, check_word
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.indexer import Index, Indexer, IndexerConfig, Teacher
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import run_max_scores
from eqx_decoders.layers.attention.kernels.selection import Selected
from eqx_decoders.layers.attention.topk import KeyChoice
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, Queries, kv_shape
from eqx_decoders.layers.cache.page_layout import LANE
from eqx_decoders.layers.mask import AttentionPositions, Causal, Mask, seen_keys
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotate
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair, add_bias, as_weight
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save


LatentPast = Past | dict[str, Past]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(MixerConfig):
    """Configuration of `softmax(scale * q k^T + mask) v`, with keys and values from a latent of `kv_rank` features.

    **Arguments:**

    - `num_heads`: heads of queries, keys and values.
    - `q_rank`: features of the latent from which queries are made; None makes them from `x` itself.
    - `kv_rank`: features of the latent from which keys and values are made.
    - `nope_dim`, `rope_dim`: features of a head's query and key without and with rotary embedding, in this order; all
        heads share the rotary part of the key.
    - `value_dim`: features of a head's value.
    - `mask`: which keys a query sees.
    - `rope`: rotary embedding of the `rope_dim` features; None leaves them as they are (Kimi Linear).
    - `query_scale`: multiplies queries; None for `(nope_dim + rope_dim) ** -0.5`, times `rope.score_scale`.
    - `norm`: of both latents; the shared rotary key has none.
    - `kv_scale`: multiplies the latent of keys and values after its norm (LongCat-Flash).
    - `bias`: biases of the projections into the latents and of the output projection.
    - `indexer`: chooses some of the keys that a query sees; None takes all.
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
            check(self.rope is not None, "LatentAttentionConfig.indexer needs rope: it rotates its keys.")
            causal, fits = isinstance(self.mask, Causal), self.indexer.head_dim >= self.rope_dim
            rule = f"LatentAttentionConfig.indexer needs mask=Causal(), not {self.mask}"
            check(causal, f"{rule}: of a window it would choose by slots that turn round.")
            check(
                self.q_rank is not None, "LatentAttentionConfig.indexer needs q_rank: it reads the latent of queries."
            )
            rule = f"LatentAttentionConfig.indexer.head_dim={self.indexer.head_dim} must be at least"
            check(fits, f"{rule} rope_dim={self.rope_dim}: so many of its features are rotated.")

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
        """Features of a token's latent and its rotary key together."""
        return self.kv_rank + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Features that a cache holds of a token: from one lane on, zeros fill the last of its lanes.

        A TPU stores such a cache feature by feature in memory and writes tokens in place; one of 576 features it stores
        slot by slot, and each write costs a copy of the whole.
        """
        return self.latent_dim if self.latent_dim < LANE else -(-self.latent_dim // LANE) * LANE

    @property
    def chooses(self) -> bool:
        """Whether it has an indexer of its own."""
        return self.indexer is not None and self.indexer.shared_from is None

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape]:
        """Return the shape of the cache: one head of latents and rotary keys, without values, and an indexer's keys."""
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
        """Count multiplications per token of scores, an indexer's too, and of their products with values."""
        seen = seen_keys(self.mask, length)
        if self.indexer is None:
            return self.num_heads * seen * (self.head_dim + self.value_dim)
        chosen = seen if self.indexer.warmup else min(seen, self.indexer.top_k)
        return self.num_heads * chosen * (self.head_dim + self.value_dim) + self.indexer.token_products(seen)

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "LatentAttention":
        keys = jax.random.split(key, 5)
        heads, q_rank = self.num_heads, self.q_rank

        def new(key, fan, *shape):
            return fan_in(key, shape, jnp.float32, fan, "normal")

        def zeros(size):
            return jnp.zeros((size,)) if self.bias and size else None

        into_values = self.nope_dim + self.value_dim
        return LatentAttention(
            query=None if q_rank else new(keys[0], embed_dim, embed_dim, heads, self.head_dim),
            query_down=new(keys[0], embed_dim, embed_dim, q_rank) if q_rank else None,
            query_norm=self.norm.build(q_rank) if q_rank else None,
            query_up=new(keys[1], q_rank, q_rank, heads, self.head_dim) if q_rank else None,
            kv_down=new(keys[2], embed_dim, embed_dim, self.latent_dim),
            kv_norm=self.norm.build(self.kv_rank),
            kv_up=new(keys[3], self.kv_rank, self.kv_rank, heads, into_values),
            out=new(keys[4], heads * self.value_dim, heads, self.value_dim, embed_dim),
            query_down_bias=zeros(q_rank),
            kv_down_bias=zeros(self.latent_dim),
            out_bias=zeros(embed_dim),
            indexer=self._build_indexer(embed_dim, jax.random.fold_in(key, 5)),
            config=self,
        )

    def _build_indexer(self, embed_dim: int, key: PRNGKeyArray) -> Indexer | None:
        if self.indexer is None or self.q_rank is None or not self.chooses:
            return None
        return self.indexer.build(embed_dim, self.q_rank, key=key)


class LatentAttention(eqx.Module):
    """Attention `softmax(scale * q k^T + mask) v` with keys and values made from a latent, projected out."""

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
        """Return the layer's output, and the new latents and rotary keys for a cache."""
        result = self.branch(x, ctx, past, None)
        return result.out, result.entries

    def branch(self, x: Array, ctx: ForwardContext, past: LatentPast | None, key: PRNGKeyArray | None) -> BranchResult:
        """Call the layer for a block: return the output, new entries for a cache, and statistics."""
        low = self._query_input(x, ctx)
        query, latent = self._query(low, ctx), self._latent(x, ctx)
        config, stats, index, choice = self.config, {}, None, self._shared_choice(ctx)
        if self.indexer is not None and config.rope is not None:
            index = self.indexer(x, low, config.rope, config.rope_dim, ctx)
        if isinstance(past, dict):
            assert self.indexer is not None and index is not None
            keys, past = past["index"].whole().without_blocks(query.dtype), past["latents"]
            stored = keys.key, keys.key_scale, keys.positions
            choice = self.indexer.choose_cached(index, *stored, config.mask, ctx)
        entries: Any = NewKV(key=latent, value=None)
        if past is None:
            mixed, choice, stats = self._expanded(query, latent, ctx, index, choice)
        else:
            mixed, entries = self._absorbed(query, entries, past, ctx, choice)
        entries = entries if index is None else {"latents": entries, "index": NewKV(index.key, None)}
        mixed = save(ctx.constrain(mixed, "batch length heads value_dim"), "attention_out")
        out = ctx.einsum("batch length heads value_dim, heads value_dim embed -> batch length embed", mixed, self.out)
        out = save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj")
        lends = config.indexer is not None and config.indexer.shares_as is not None
        return BranchResult(out, entries, stats, choice if lends else None)

    def _shared_choice(self, ctx: ForwardContext) -> KeyChoice:
        """Return what the indexer of an earlier layer chose, where that is used; else all."""
        name = None if self.config.indexer is None else self.config.indexer.shared_from
        return KeyChoice() if name is None else ctx.shared[check_word("IndexerConfig.shared_from", name, ctx.shared)]

    def _query_input(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length features"]:
        """Return the input of queries: their latent, or `x` itself."""
        if self.query_down is None or self.query_norm is None:
            return x
        low = ctx.einsum("batch length embed, embed q_rank -> batch length q_rank", x, self.query_down)
        low = save(add_bias(low, self.query_down_bias), "query_wa_proj")
        return save(self.query_norm(low), "mla_q")

    def _query(self, low: Array, ctx: ForwardContext) -> Float[Array, "batch length heads qk_dim"]:
        """Compute scaled queries, `[nope | rope]`."""
        config = self.config
        if self.query is not None:
            pattern = "batch length embed, embed heads qk_dim -> batch length heads qk_dim"
            query = ctx.einsum(pattern, low, self.query)
        else:
            assert self.query_up is not None
            pattern = "batch length q_rank, q_rank heads qk_dim -> batch length heads qk_dim"
            query = ctx.einsum(pattern, low, self.query_up)
        nope, rope = jnp.split(query, [config.nope_dim], axis=-1)
        query = jnp.concatenate([nope, self._rotated(rope, ctx)], axis=-1)
        query = query * config.scale
        return save(ctx.constrain(query, "batch length heads qk_dim"), "query_proj")

    def _latent(self, x: Array, ctx: ForwardContext) -> Float[Array, "batch length 1 cached"]:
        """Compute the cached vector of each token, as of one head: normalized latent, rotated key, and zeros."""
        low = ctx.einsum("batch length embed, embed latent -> batch length latent", x, self.kv_down)
        low = save(add_bias(low, self.kv_down_bias), "kv_wa_proj")
        latent, rope = jnp.split(low[:, :, None], [self.config.kv_rank], axis=-1)
        latent = self.kv_norm(latent)
        latent = save(latent if self.config.kv_scale == 1.0 else latent * self.config.kv_scale, "mla_kv")
        return self._padded(latent, self._rotated(rope, ctx), ctx)

    def _rotated(self, x: Array, ctx: ForwardContext) -> Array:
        return x if self.config.rope is None else rotate(x, ctx.positions, self.config.rope, ctx.segment_ids)

    def _expanded(
        self, query: Array, latent: Array, ctx: ForwardContext, index: Index | None, choice: KeyChoice
    ) -> tuple[Float[Array, "batch length heads value_dim"], KeyChoice, dict[str, Any]]:
        """Attend with every head's own keys and values, the fewest operations for many queries.

        Returns what is attended to, too: what the layer's own indexer chooses, or `choice`; and statistics.
        """
        config = self.config
        low, rope, _ = jnp.split(latent, [config.kv_rank, config.latent_dim], axis=-1)
        pattern = "batch length kv_rank, kv_rank heads kv_dim -> batch length heads kv_dim"
        nope, value = jnp.split(ctx.einsum(pattern, low[:, :, 0], self.kv_up), [config.nope_dim], axis=-1)
        key = jnp.concatenate([nope, jnp.broadcast_to(rope, (*nope.shape[:3], config.rope_dim))], axis=-1)
        key = save(ctx.constrain(key, "batch length heads qk_dim"), "key_proj")
        value = save(ctx.constrain(value, "batch length heads value_dim"), "value_proj")
        selected: Any = choice.present
        stats: dict[str, Any] = {}
        if self.indexer is not None and index is not None:
            teacher = Teacher(query, key) if self.indexer.config.loss_weight > 0 else None
            selected, learned = self.indexer.choose(index, config.mask, ctx, teacher)
            stats = {} if learned is None else {"indexer": learned}
        if ctx.execution.attention_maxima:
            options = AttentionOptions(mask=config.mask, aligned=_aligned(ctx), platform=ctx.execution.layout.platform)
            scores = run_max_scores(_present_inputs(query, key, value, ctx, selected), options)
            stats["max_scores"] = jnp.max(scores, axis=0)
        out, _ = self._attend(query, key, value, ctx, selected, needs_lse=False)
        return out, KeyChoice(present=selected), stats

    def _absorbed(
        self, query: Array, latents: NewKV, past: Past, ctx: ForwardContext, choice: KeyChoice
    ) -> tuple[Float[Array, "batch length heads value_dim"], Any]:
        """Attend to the cache and to the call's own tokens, merged by their log-sum-exp while they are latents.

        Values are the whole keys, and the rotary part of the mixture is dropped: a slice of a cache would be copied. A
        decoding step of DeepSeek-V3 for v5p: 34 MB of temporaries against 118. There the call's own tokens cost 3 %
        more in the expanded form, whose weights are read once more; in chunks of 512 tokens it would cost 6 % less.
        """
        config = self.config
        nope, rope = jnp.split(query, [config.nope_dim], axis=-1)
        query = self._padded(_into_latents(nope, self.kv_up, ctx), rope, ctx)
        queries = Queries(query, ctx.positions, selected=choice.past, slots=choice.slots)

        def present() -> Result:
            return self._attend(query, latents.key, latents.key, ctx, choice.present)

        options = AttentionOptions(mask=config.mask)
        mixed, entries = past.attend_with(present, latents, queries, options, ctx.execution)
        return _into_values(mixed[..., : config.kv_rank], self.kv_up, config.nope_dim, ctx), entries

    def _padded(self, latent: Array, rope: Array, ctx: ForwardContext) -> Float[Array, "batch length heads cached"]:
        """Join latent and rotary part, padded to the width of the cache; also for queries in the absorbed form."""
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
        aligned = _aligned(ctx)
        dense = ctx.dense_positions and aligned
        options = AttentionOptions(mask=self.config.mask, aligned=aligned, dense_positions=dense, needs_lse=needs_lse)
        inputs = _present_inputs(query, key, value, ctx, selected)
        return attend_on_mesh(inputs, options, ctx.execution, contiguous=ctx.contiguous)


def _aligned(ctx: ForwardContext) -> bool:
    """Return whether a call's tokens stand in the order of their positions."""
    return ctx.execution.context_order == "plain"


def _present_inputs(
    query: Array, key: Array, value: Array, ctx: ForwardContext, selected: Selected | None
) -> AttentionInputs:
    """Return the inputs of attention among the tokens of a call."""
    positions = AttentionPositions(ctx.positions, ctx.positions, ctx.segment_ids, ctx.segment_ids)
    return AttentionInputs(query, key, value, positions, selected)


# The two halves of `kv_up`, used head by head. They are not contracted as in the expanded form, but have its numbers.
# Of a low-rank pair the second factor has the heads: it comes first on the way into the latents, where the weight is
# transposed, and last on the way out of them.


def _into_latents(
    query: Array, kv_up: Array | AbstractWeight, ctx: ForwardContext
) -> Float[Array, "batch length heads kv_rank"]:
    """Compute `W_k^T q`."""
    pattern, keys = "batch length heads nope, kv_rank heads nope -> batch length heads kv_rank", slice(query.shape[-1])
    base, pair = as_weight(kv_up).base_and_pair()
    if pair is not None and pair.factor is not None:
        query = _times_columns(query, pair.factor[..., keys])
    out = ctx.einsum(pattern, query, as_weight(base).array(0)[..., keys])
    if pair is None:
        return out
    row = _row_of(pair)
    down = f"batch length heads nope, {row}rank heads nope -> batch length heads rank"
    low = pair.scale * ctx.einsum(down, query, pair.lora_b[..., keys])
    up = f"batch length heads rank, {row}kv_rank rank -> batch length heads kv_rank"
    return out + ctx.einsum(up, low, pair.lora_a)


def _into_values(
    mixed: Array, kv_up: Array | AbstractWeight, nope_dim: int, ctx: ForwardContext
) -> Float[Array, "batch length heads value_dim"]:
    """Compute `W_v c`."""
    pattern = "batch length heads kv_rank, kv_rank heads value_dim -> batch length heads value_dim"
    base, pair = as_weight(kv_up).base_and_pair()
    out = ctx.einsum(pattern, mixed, as_weight(base).array(0)[..., nope_dim:])
    if pair is None:
        return out
    row = _row_of(pair)
    down = f"batch length heads kv_rank, {row}kv_rank rank -> batch length heads rank"
    low = pair.scale * ctx.einsum(down, mixed, pair.lora_a)
    up = f"batch length heads rank, {row}rank heads value_dim -> batch length heads value_dim"
    out = out + ctx.einsum(up, low, pair.lora_b[..., nope_dim:])
    return out if pair.factor is None else _times_columns(out, pair.factor[..., nope_dim:])


def _row_of(pair: LowRankPair) -> str:
    """Return the first axis of factors that each row of a batch has for itself."""
    return "batch " if pair.lora_a.ndim == 3 else ""


def _times_columns(x: Float[Array, "batch length heads features"], factor: Array) -> Array:
    """Multiply by factors of `heads features`, or of `batch heads features`."""
    return (x * factor.reshape(-1, 1, *factor.shape[-2:])).astype(x.dtype)
