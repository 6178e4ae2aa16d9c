"""Grouped-query attention (Ainslie et al. 2023) with the options of the decoder families."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check, check_word
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.block_indexer import BlockChoice, BlockIndex, BlockIndexer, BlockIndexerConfig
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.registry import with_sink
from eqx_decoders.layers.attention.topk import KeyChoice
from eqx_decoders.layers.base import BranchResult, MixerConfig
from eqx_decoders.layers.cache.kv_cache import KVShape, NewKV, Past, Queries, kv_shape
from eqx_decoders.layers.mask import AttentionPositions, Causal, Mask, seen_keys
from eqx_decoders.layers.norm import Norm, NormConfig, RMSNormConfig
from eqx_decoders.layers.rope import Rope, rotary_positions, rotate
from eqx_decoders.numerics.einsum import add_bias, scale
from eqx_decoders.numerics.initializers import fan_in
from eqx_decoders.remat import save
from eqx_decoders.sharding.axes import FROZEN


AttentionPast = Past | dict[str, Past]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QKNorm(CheckedFields):
    """Normalization of queries and keys.

    **Arguments:**

    - `norm`: its configuration.
    - `over`: `"head"`, each head by itself with a shared scale; `"each_head"`, each by itself with a scale of its own
        (Cohere); or `"heads"`, all heads together (OLMo).
    - `when`: `"before_rope"` or `"after_rope"` (Llama 4).
    """

    norm: NormConfig = RMSNormConfig()
    over: Literal["head", "each_head", "heads"] = "head"
    when: Literal["before_rope", "after_rope"] = "before_rope"

    def __post_init__(self):
        super().__post_init__()
        plain = self.norm.scale and not self.norm.offset and not getattr(self.norm, "bias", False)
        rule = "QKNorm.over='each_head' needs a norm with a scale that is stored as it is, and without a bias"
        check(self.over != "each_head" or plain, f"{rule}, not {self.norm}.")

    @property
    def built(self) -> NormConfig:
        """Norm without the scales of single heads, which the layer has itself."""
        return dataclasses.replace(self.norm, scale=False) if self.over == "each_head" else self.norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryTemperature(CheckedFields):
    """Temperature of queries: at position p they are multiplied by `1 + scale ln(1 + floor((p + offset) / length))`.

    As in Nakanishi 2025 and Llama 4.

    **Arguments:**

    - `scale`: how fast they grow.
    - `length`: positions over which they stay the same.
    - `offset`: 1 for Llama 4, 0 for Ministral 3.
    """

    scale: PositiveFloat = 0.1
    length: PositiveInt = 8192
    offset: NonNegativeInt = 1

    def __call__(
        self, query: Float[Array, "batch length heads head_dim"], positions: Int[Array, "batch length"]
    ) -> Float[Array, "batch length heads head_dim"]:
        """Scale the queries by their positions; padding, below 0, is unchanged."""
        steps = jnp.floor((positions.astype(jnp.float32) + self.offset) / self.length)
        factor = 1.0 + self.scale * jnp.log1p(jnp.maximum(steps, 0.0))
        return (query.astype(jnp.float32) * factor[:, :, None, None]).astype(query.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Configuration of `softmax(scale * q k^T + mask) v`, projected out.

    **Arguments:**

    - `num_heads`, `num_kv_heads`, `head_dim`: query heads, key and value heads (a divisor), features of a head.
    - `mask`: which keys a query sees.
    - `selection`: each query head takes only the keys of a few blocks, by their means (MoBA) or by an indexer (a
        `BlockIndexerConfig`, MiniMax M3; a `PooledIndexerConfig`, Qwen 4); None takes all that the mask allows.
    - `spans`: whether the tokens of a span (an image, say) also see its later tokens; earlier tokens are up to the
        mask.
    - `rope`: rotary embedding; None for none.
    - `query_scale`: multiplies queries; None for `head_dim ** -0.5`.
    - `key_scale`: multiplies keys as they are projected (Falcon-H1).
    - `temperature`: lets queries grow with their position; None for none.
    - `alibi`: linear biases that are added to scores, before a soft cap; None for none.
    - `soft_cap`: scores become `cap * tanh(scores / cap)`; None for none.
    - `sinks`: one learned logit per head that joins the softmax and takes no value (GPT-OSS).
    - `qk_norm`: normalization of queries and keys; None for none.
    - `qkv_clip`: bounds queries, keys and values to `-qkv_clip` and `qkv_clip`, before they are rotated and after a
        `qk_norm` that comes before (OLMo); None for none.
    - `qkv_bias`, `out_bias`: biases of the projections.
    - `fused_qkv`: one product for queries, keys and values.
    - `shared_kv`: values are the raw key projection; there is no value projection.
    - `value_norm`: normalization of each head's values; None for none.
    - `value_dim`: features of a head's values; None for `head_dim` (MiMo-V2).
    - `value_scale`: multiplies values.
    - `kv_shared_from`: reuses the keys and values of an earlier layer, the latest whose `BlockConfig.shares_kv_as` is
        this word (Gemma 4); the layer has no projections for them and no cache. None: it computes them.
    - `output_gate`: the result of each head is multiplied by `sigmoid(gate x)` (Qwen3-Next).
    - `inner_norm`: normalization of the results of all heads together, before the output projection (BitNet); None for
        none.
    - `out_dim`: features of the output; None for those of the input. Another number needs a block without residual.
    """

    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    mask: Mask = Causal()
    spans: bool = False
    rope: Rope | None = Rope()
    query_scale: PositiveFloat | None = None
    key_scale: PositiveFloat = 1.0
    temperature: QueryTemperature | None = None
    alibi: Alibi | None = None
    soft_cap: PositiveFloat | None = None
    sinks: bool = False
    qk_norm: QKNorm | None = None
    qkv_clip: PositiveFloat | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    shared_kv: bool = False
    output_gate: bool = False
    inner_norm: NormConfig | None = None
    out_dim: PositiveInt | None = None
    value_norm: NormConfig | None = None
    value_dim: PositiveInt | None = None
    value_scale: PositiveFloat = 1.0
    selection: BlockChoice | None = None
    kv_shared_from: str | None = None

    def __post_init__(self):
        super().__post_init__()
        rule = f"must be a multiple of num_kv_heads={self.num_kv_heads}"
        check(self.num_heads % self.num_kv_heads == 0, f"AttentionConfig.num_heads={self.num_heads} {rule}.")
        rule = "AttentionConfig.fused_qkv=True and shared_kv=True exclude each other: no values to fuse"
        check(not (self.fused_qkv and self.shared_kv), f"{rule}.")
        for field in ("fused_qkv", "shared_kv", "value_norm", "key_scale", "value_scale"):
            rule = f"kv_shared_from={self.kv_shared_from!r} excludes {field}={getattr(self, field)}"
            alone = self.kv_shared_from is None or getattr(self, field) == getattr(AttentionConfig, field)
            check(alone, f"AttentionConfig.{rule}: keys and values are another's.")
        for field in ("fused_qkv", "shared_kv", "out_dim"):
            rule = f"value_dim={self.value_dim} excludes {field}={getattr(self, field)}"
            check(self.value_dim is None or not getattr(self, field), f"AttentionConfig.{rule}.")
        plain = isinstance(self.mask, Causal) and not self.spans
        rule = "AttentionConfig.selection needs mask=Causal() and spans=False: blocks are chosen of what came before"
        check(self.selection is None or plain, f"{rule}.")
        self._check_indexer()

    def _check_indexer(self) -> None:
        rotated = 0 if self.rope is None else self.rope.rotated(self.head_dim)
        indexer = self.block_indexer
        if indexer is None:
            return
        where = "AttentionConfig.selection"
        rule = f"{where}.num_heads={indexer.num_heads} must be a divisor of num_heads={self.num_heads}"
        divides = self.num_heads % indexer.choices(indexer.num_heads) == 0
        check(divides, f"{rule}: each chooses for as many heads.")
        rule = f"{where}.head_dim={indexer.head_dim} must be at least {rotated}"
        check(indexer.head_dim >= rotated, f"{rule}: so many features of a head are rotated.")
        rule = f"{where} with an indexer excludes kv_shared_from={self.kv_shared_from!r}: it caches keys of its own"
        check(self.kv_shared_from is None, f"{rule}.")

    @property
    def block_indexer(self) -> BlockIndexerConfig | None:
        """What chooses blocks of keys by keys of its own; None for nothing."""
        return self.selection if isinstance(self.selection, BlockIndexerConfig) else None

    def cache_shape(self, max_length: int) -> KVShape | dict[str, KVShape] | None:
        """Return the shape of the cache: a ring of `size` slots for a window or chunk, else a slot for each token.

        Beside it are the keys of an indexer, if there is one.
        """
        if self.kv_shared_from is not None:
            return None
        heads, value_dim = self.num_kv_heads, self.value_dim
        shape = kv_shape(self.mask, max_length, kv_heads=heads, head_dim=self.head_dim, value_dim=value_dim)
        if self.block_indexer is None:
            return shape
        index = kv_shape(self.mask, max_length, kv_heads=1, head_dim=self.block_indexer.head_dim, values=False)
        return {"kv": shape, "index": index}

    @property
    def shared_from(self) -> str | None:
        """Name of the keys and values of an earlier layer that this layer uses."""
        return self.kv_shared_from

    def token_products(self, length: int) -> int:
        """Count multiplications per token of scores and of their products with values."""
        keys, scores = seen_keys(self.mask, length), 0
        if self.selection is not None:
            scores = self.selection.token_products(keys)
            keys = min(keys, self.selection.size * self.selection.top_k)
        return self.num_heads * keys * (self.head_dim + (self.value_dim or self.head_dim)) + scores

    def build(self, embed_dim: int, *, key: PRNGKeyArray) -> "Attention":
        keys = jax.random.split(key, 5)
        heads, kv_heads, head_dim = self.num_heads, self.num_kv_heads, self.head_dim
        values_dim = self.value_dim or head_dim

        def into(key, count, wanted=True, dim=head_dim):
            return fan_in(key, (embed_dim, count, dim), jnp.float32, embed_dim, "normal") if wanted else None

        def zeros(count, wanted=True, dim=head_dim):
            return jnp.zeros((count, dim)) if self.qkv_bias and wanted else None

        split, has_kv = not self.fused_qkv, self.kv_shared_from is None
        has_key, has_value = split and has_kv, split and has_kv and not self.shared_kv
        norm, group = self.qk_norm, self.qk_norm is not None and self.qk_norm.over == "heads"
        scales = norm is not None and norm.over == "each_head"
        out_dim = self.out_dim or embed_dim
        narrow = Attention if self.out_dim is None else NarrowAttention
        return (narrow if self.value_dim is None else UnequalAttention)(
            query=into(keys[0], heads, split),
            key=into(keys[1], kv_heads, has_key),
            value=into(keys[2], kv_heads, has_value, values_dim),
            qkv=into(keys[0], heads + 2 * kv_heads, self.fused_qkv),
            gate=into(keys[3], heads, self.output_gate, values_dim),
            out=fan_in(keys[4], (heads, values_dim, out_dim), jnp.float32, heads * values_dim, "normal"),
            query_bias=zeros(heads, split),
            key_bias=zeros(kv_heads, has_key),
            value_bias=zeros(kv_heads, has_value, values_dim),
            qkv_bias=zeros(heads + 2 * kv_heads, self.fused_qkv),
            out_bias=jnp.zeros((out_dim,)) if self.out_bias else None,
            query_norm=norm.built.build(heads * head_dim if group else head_dim) if norm else None,
            key_norm=norm.built.build(kv_heads * head_dim if group else head_dim) if norm and has_kv else None,
            query_norm_scale=jnp.ones((heads, head_dim)) if scales else None,
            key_norm_scale=jnp.ones((kv_heads, head_dim)) if scales and has_kv else None,
            value_norm=self.value_norm.build(values_dim) if self.value_norm else None,
            inner_norm=self.inner_norm.build(heads * values_dim) if self.inner_norm else None,
            sink=jnp.zeros((heads,)) if self.sinks else None,
            indexer=self.block_indexer.build(embed_dim, key=jax.random.fold_in(key, 5)) if self.block_indexer else None,
            config=self,
        )


class Attention(eqx.Module):
    """Attention `softmax(scale * q k^T + mask) v`, projected out."""

    query: Float[Array, "embed heads head_dim"] | None
    key: Float[Array, "embed kv_heads head_dim"] | None
    value: Float[Array, "embed kv_heads head_dim"] | None
    qkv: Float[Array, "embed qkv_heads head_dim"] | None
    gate: Float[Array, "embed heads head_dim"] | None
    out: Float[Array, "heads head_dim embed"]
    query_bias: Float[Array, "heads head_dim"] | None
    key_bias: Float[Array, "kv_heads head_dim"] | None
    value_bias: Float[Array, "kv_heads head_dim"] | None
    qkv_bias: Float[Array, "qkv_heads head_dim"] | None
    out_bias: Float[Array, "embed"] | None
    query_norm: Norm | None
    key_norm: Norm | None
    query_norm_scale: Float[Array, "heads head_dim"] | None
    key_norm_scale: Float[Array, "kv_heads head_dim"] | None
    value_norm: Norm | None
    inner_norm: Norm | None
    sink: Float[Array, "heads"] | None
    indexer: BlockIndexer | None = eqx.field(metadata=FROZEN)
    config: AttentionConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length embed"], Any]:
        """Return the layer's output, and the new keys and values for a cache."""
        out, entries = self._attend_heads(x, ctx, past)
        out = ctx.einsum("batch length heads head_dim, heads head_dim embed -> batch length embed", out, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length embed"), "out_proj"), entries

    def branch(
        self, x: Array, ctx: ForwardContext, past: AttentionPast | None, key: PRNGKeyArray | None
    ) -> BranchResult:
        """Call the layer for a block."""
        return BranchResult(*self(x, ctx, past))

    def _attend_heads(self, x: Array, ctx: ForwardContext, past: AttentionPast | None) -> tuple[Array, Any]:
        """Compute the output of all heads, before the output projection, and what is new for the cache."""
        return self._attend_projected(self._project(x, ctx), x, ctx, past)

    def _attend_projected(
        self,
        projections: tuple[Array, Array | None, Array | None],
        x: Array,
        ctx: ForwardContext,
        past: AttentionPast | None,
    ) -> tuple[Array, Any]:
        """Compute the output of all heads from their projections."""
        query, own_kv = self._normalize_and_rotate(*projections, ctx)
        index_past = None
        if isinstance(past, dict):
            past, index_past = past["kv"], past["index"]
        past, new_kv = (past, own_kv) if own_kv is not None else self._shared_kv(ctx)
        index = self._index(x, ctx)
        chooses = BlockIndex(query, new_kv.key) if index is None else index
        choice = self._choose_blocks(chooses, past if index is None else index_past, ctx)
        out, entries = self._attend(query, past, new_kv, choice, ctx)
        if index is not None:
            entries = {"kv": entries, "index": NewKV(index.key, None)}
        out = save(ctx.constrain(out, "batch length heads head_dim"), "attention_out")
        if self.gate is not None:
            gate = ctx.einsum("batch length embed, embed heads head_dim -> batch length heads head_dim", x, self.gate)
            out = out * jax.nn.sigmoid(gate)
        out = out if self.inner_norm is None else _over_heads(self.inner_norm, out)
        return out, None if own_kv is None else entries

    def _index(self, x: Array, ctx: ForwardContext) -> BlockIndex | None:
        """Return queries and keys of the indexer, if there is one."""
        if self.indexer is None:
            return None
        rope = self.config.rope
        return self.indexer(x, rope, 0 if rope is None else rope.rotated(self.config.head_dim), ctx)

    def _shared_kv(self, ctx: ForwardContext) -> tuple[Past | None, Any]:
        """Return the cached and the new keys and values of the earlier layer that shares them."""
        name = self.config.kv_shared_from or ""
        past, entries = ctx.shared[check_word("AttentionConfig.kv_shared_from", name, ctx.shared)]
        return None if past is None else past["mixer"], entries["mixer"]

    def _project(self, x: Array, ctx: ForwardContext) -> tuple[Array, Array | None, Array | None]:
        """Project to queries, keys and values; keys and values are None where an earlier layer's are used."""
        config = self.config
        if self.qkv is not None:
            pattern = "batch length embed, embed qkv_heads head_dim -> batch length qkv_heads head_dim"
            qkv = save(add_bias(ctx.einsum(pattern, x, self.qkv), self.qkv_bias), "qkv_proj")
            query, key, value = jnp.split(qkv, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
            return query, key, value
        assert self.query is not None
        pattern = "batch length embed, embed heads head_dim -> batch length heads head_dim"
        query = add_bias(ctx.einsum(pattern, x, self.query), self.query_bias)
        if self.key is None:
            return query, None, None
        key = add_bias(ctx.einsum(pattern, x, self.key), self.key_bias)
        value = key if self.value is None else add_bias(ctx.einsum(pattern, x, self.value), self.value_bias)
        return query, key, value

    def _normalize_and_rotate(
        self, query: Array, key: Array | None, value: Array | None, ctx: ForwardContext
    ) -> tuple[Array, NewKV | None]:
        """Return queries ready for the kernel, and the layer's own keys and values, if it has any."""
        config = self.config
        query = self._norm_and_rope(query, self.query_norm, self.query_norm_scale, ctx)
        query = query * (config.head_dim**-0.5 if config.query_scale is None else config.query_scale)
        if config.temperature is not None:
            query = config.temperature(query, ctx.positions)
        query = save(ctx.constrain(query, "batch length heads head_dim"), "query_proj")
        if key is None or value is None:
            return query, None
        key = self._norm_and_rope(scale(key, config.key_scale), self.key_norm, self.key_norm_scale, ctx)
        key = save(ctx.constrain(key, "batch length kv_heads head_dim"), "key_proj")
        value = self._clip(value if self.value_norm is None else self.value_norm(value))
        value = scale(value, config.value_scale)
        value = save(ctx.constrain(value, "batch length kv_heads head_dim"), "value_proj")
        return query, NewKV(key=key, value=value)

    def _norm_and_rope(self, x: Array, norm: Norm | None, scales: Array | None, ctx: ForwardContext) -> Array:
        """Normalize and rotate queries or keys; `scales` has a number for each head and feature."""
        after_rope = self.config.qk_norm is not None and self.config.qk_norm.when == "after_rope"
        x = self._clip(x if after_rope else self._normalize(x, norm, scales))
        rope = self.config.rope
        x = x if rope is None else rotate(x, rotary_positions(ctx, rope), rope, ctx.segment_ids)
        return self._normalize(x, norm, scales) if after_rope else x

    def _normalize(self, x: Array, norm: Norm | None, scales: Array | None) -> Array:
        if norm is None:
            return x
        if scales is not None:
            return (norm(x.astype(jnp.float32)) * scales.astype(jnp.float32)[None, None]).astype(x.dtype)
        return _over_heads(norm, x) if self.config.qk_norm and self.config.qk_norm.over == "heads" else norm(x)

    def _clip(self, x: Array) -> Array:
        bound = self.config.qkv_clip
        return x if bound is None else jnp.clip(x, -bound, bound)

    def _attend(
        self, query: Array, past: Past | None, entries: Any, chosen: KeyChoice, ctx: ForwardContext
    ) -> tuple[Array, Any]:
        """Attend to the tokens of this call and to the cached ones; return the entries to be cached, too."""
        config, execution = self.config, ctx.execution
        spans = ctx.spans if config.spans else None
        aligned = execution.context_order == "plain" and ctx.unseen is None
        of_keys = ctx.positions if ctx.unseen is None else jnp.where(ctx.unseen, -1, ctx.positions)
        positions = AttentionPositions(ctx.positions, of_keys, ctx.segment_ids, ctx.segment_ids, spans)
        inputs = AttentionInputs(query, entries.key, entries.value, positions, chosen.present)
        options = AttentionOptions(mask=config.mask, soft_cap=config.soft_cap, alibi=config.alibi)
        of_call = dataclasses.replace(
            options,
            aligned=aligned,
            dense_positions=ctx.dense_positions and aligned,
            needs_lse=past is not None or self.sink is not None,
        )

        def present() -> Result:
            return attend_on_mesh(inputs, of_call, execution, contiguous=ctx.contiguous)

        if past is not None:
            queries = Queries(query, ctx.positions, spans, chosen.past)
            return past.attend_with(present, entries, queries, options, execution, self.sink)
        out, lse = present()
        return out if self.sink is None else with_sink(out, lse, self.sink), entries

    def _choose_blocks(self, index: BlockIndex, past: Past | None, ctx: ForwardContext) -> KeyChoice:
        """Select the tokens of this call and of the cache that are in each query's blocks."""
        blocks, (query, key, block_keys) = self.config.selection, index
        if blocks is None:
            return KeyChoice()
        if past is not None:
            whole = past.whole()
            stored = whole.key if whole.key_scale is None else whole.keys(key.dtype)
            choice = blocks.choose_cached(query, key, ctx.positions, stored, whole.positions, block_keys)
        else:
            present = blocks.choose(query, key, ctx.positions, ctx.segment_ids, ctx.contiguous, block_keys)
            choice = KeyChoice(present)
        return choice.repeated(self.config.num_heads // blocks.choices(query.shape[2]))


def _over_heads(norm: Norm, x: Array) -> Array:
    """Normalize the features of all heads together."""
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


class UnequalAttention(Attention):
    """Attention whose values have another number of features than queries and keys."""

    value: Float[Array, "embed kv_heads value_dim"] | None
    value_bias: Float[Array, "kv_heads value_dim"] | None
    gate: Float[Array, "embed heads value_dim"] | None
    out: Float[Array, "heads value_dim embed"]


class NarrowAttention(Attention):
    """Attention whose output has `out_dim` features instead of the input's."""

    out: Float[Array, "heads head_dim latent"]
    out_bias: Float[Array, "latent"] | None

    def __call__(
        self, x: Float[Array, "batch length embed"], ctx: ForwardContext, past: AttentionPast | None = None
    ) -> tuple[Float[Array, "batch length latent"], Any]:
        """Return the layer's output, and the new keys and values for a cache."""
        out, entries = self._attend_heads(x, ctx, past)
        out = ctx.einsum("batch length heads head_dim, heads head_dim latent -> batch length latent", out, self.out)
        return save(ctx.constrain(add_bias(out, self.out_bias), "batch length latent"), "out_proj"), entries
